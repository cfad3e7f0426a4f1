"""The regression data of the paper's Bayesian neural networks, and their splits.

A data set is one entry of `RECIPES`, one line ``fetch_<name> = _fetcher("<name>", ...)`` and its description in
``descr/<name>.rst``.
"""

from __future__ import annotations

import os
from typing import Any, Protocol

import numpy as np

from skksivi._utils.checks import check_integer
from skksivi.datasets._base import OLD_UCI, UCI, Options, Recipe, fetch

#: The splits of the paper: a tenth for the test, by this seed.
TEST_SIZE = 0.1
PAPER_SEED = 42

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="boston",
            urls=(f"{OLD_UCI}/housing/housing.data", "http://lib.stat.cmu.edu/datasets/boston"),
            files=("housing.data",),
            sha256="832e894115c56dd24ec63848d4a3d9bd921d268d0be1bee2a8f4ee5ea318f5f7",
            n_samples=506,
            feature_names=(
                "CRIM", "ZN", "INDUS", "CHAS", "NOX", "RM", "AGE", "DIS", "RAD", "TAX", "PTRATIO", "B", "LSTAT",
            ),
            target="MEDV",
        ),
        Recipe(
            name="concrete",
            urls=(
                f"{UCI}/165/concrete+compressive+strength.zip",
                f"{OLD_UCI}/concrete/compressive/Concrete_Data.xls",
            ),
            files=("Concrete_Data.xls",),
            sha256="8b9a7af0366e0f437ad04cfba6bb729ec0c3ea76fa780ff3d3f4d057356b6af6",
            n_samples=1030,
            feature_names=(
                "cement", "blast furnace slag", "fly ash", "water", "superplasticizer", "coarse aggregate",
                "fine aggregate", "age",
            ),
            target="compressive strength",
        ),
        Recipe(
            name="power",
            urls=(f"{UCI}/294/combined+cycle+power+plant.zip", f"{OLD_UCI}/00294/CCPP.zip"),
            files=("Folds5x2_pp.xlsx", "ccpp_sheet1.csv"),
            sha256="99a3e1a8b4d8640155030577f49c00789d0d390e4e5b4cd8e28f1a6a288abab2",
            n_samples=9568,
            feature_names=("AT", "V", "AP", "RH"),
            target="PE",
        ),
        Recipe(
            name="wine_red",
            urls=(f"{UCI}/186/wine+quality.zip", f"{OLD_UCI}/wine-quality/winequality-red.csv"),
            files=("winequality-red.csv",),
            sha256="d4f6a6d672e0ee31d41fdd93b4b58985b45a31f2f971499c18137c42229278ac",
            n_samples=1599,
            feature_names=(
                "fixed acidity", "volatile acidity", "citric acid", "residual sugar", "chlorides",
                "free sulfur dioxide", "total sulfur dioxide", "density", "pH", "sulphates", "alcohol",
            ),
            target="quality",
        ),
        Recipe(
            name="yacht",
            urls=(f"{UCI}/243/yacht+hydrodynamics.zip", f"{OLD_UCI}/00243/yacht_hydrodynamics.data"),
            files=("yacht_hydrodynamics.data",),
            sha256="ec08588637fd93582116a1ead33f0c1e787dae755168073608e030e5282a3f4e",
            n_samples=308,
            feature_names=(
                "longitudinal position", "prismatic coefficient", "length-displacement ratio", "beam-draught ratio",
                "length-beam ratio", "Froude number",
            ),
            target="residuary resistance",
        ),
        Recipe(
            name="protein",
            urls=(
                f"{UCI}/265/physicochemical+properties+of+protein+tertiary+structure.zip",
                f"{OLD_UCI}/00265/CASP.csv",
            ),
            files=("CASP.csv",),
            sha256="7ef1fe7545cf0e288fd88fd1c6a14a2ef5886f8470baca797fff3d2373f6189d",
            n_samples=45730,
            feature_names=tuple(f"F{j}" for j in range(1, 10)),
            target="RMSD",
            target_column=0,
        ),
    )
}  # fmt: skip

_DOC = """Fetch {title}: {n_samples:,} samples, {n_features} features, a real target.

    The original file is searched for in `data_home`, where it may be placed by hand ({originals}), and otherwise
    downloaded to there. The sha256 of its numbers is verified.{needs}

    Parameters
    ----------
    data_home : str or path-like, default=None
        The folder of original files. None stands for scikit-learn's, ``~/scikit_learn_data``.
    download_if_missing : bool, default=True
        Whether to download data that are not in `data_home`, or raise OSError.
    return_X_y : bool, default=False
        Whether to return (data, target) instead of a Bunch.
    as_frame : bool, default=False
        Whether data and target are a pandas DataFrame and a Series.
    n_retries : int, default=3
        How often each address is tried again when it does not answer.
    delay : float, default=1.0
        Seconds between these attempts.

    Returns
    -------
    data : Bunch
        With

        - `data`, {n_samples} x {n_features}, and `target`, {n_samples}: float64;
        - `frame`: a DataFrame of both with `as_frame`, else None;
        - `feature_names` and `target_names`, [{target!r}];
        - `DESCR`: what the columns are, source and licence;
        - `data_filename`: the original file.
    (data, target) : tuple of ndarray or of pandas objects
        With `return_X_y`.

    Raises
    ------
    OSError
        The data are not in `data_home` and cannot be downloaded; the message says which file to put where.
    ValueError
        The file in `data_home` is damaged or of more than 32 MiB, or an option is out of its range.
    ImportError
        pandas or the library for Excel files is needed, and it is not installed.

    See Also
    --------
    uci_splits : Training and test rows of the paper.

    Examples
    --------
    >>> from skksivi.datasets import fetch_{name}
    >>> X, y = fetch_{name}(return_X_y=True)  # doctest: +SKIP
    >>> X.shape  # doctest: +SKIP
    ({n_samples}, {n_features})
    """


class Fetcher(Protocol):
    """The signature of the functions made here."""

    def __call__(
        self,
        *,
        data_home: str | os.PathLike[str] | None = None,
        download_if_missing: bool = True,
        return_X_y: bool = False,
        as_frame: bool = False,
        n_retries: int = 3,
        delay: float = 1.0,
    ) -> Any: ...  # noqa: ANN401


def _fetcher(name: str, title: str) -> Fetcher:
    """Return the function that fetches the data of a recipe."""

    def fetcher(
        *,
        data_home: str | os.PathLike[str] | None = None,
        download_if_missing: bool = True,
        return_X_y: bool = False,
        as_frame: bool = False,
        n_retries: int = 3,
        delay: float = 1.0,
    ) -> Any:  # noqa: ANN401
        options = Options(data_home, download_if_missing, return_X_y, as_frame, n_retries, delay)
        return fetch(RECIPES[name], options)

    recipe = RECIPES[name]
    fetcher.__name__ = fetcher.__qualname__ = f"fetch_{name}"
    fetcher.__doc__ = _DOC.format(
        name=name,
        title=title,
        n_samples=recipe.n_samples,
        n_features=len(recipe.feature_names),
        target=recipe.target,
        originals=" or ".join(f"``{file}``" for file in recipe.originals),
        needs=" The file is one of Excel: reading it needs python-calamine." if ".xls" in recipe.files[0] else "",
    )
    return fetcher


fetch_boston = _fetcher("boston", "the Boston housing data")
fetch_concrete = _fetcher("concrete", "the compressive strength of concrete")
fetch_power = _fetcher("power", "the output of a combined cycle power plant")
fetch_wine_red = _fetcher("wine_red", "the quality of red wine")
fetch_yacht = _fetcher("yacht", "the resistance of yachts")
fetch_protein = _fetcher("protein", "the deviations of predicted protein structures")


def uci_splits(name: str, n_splits: int = 20) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return random splits of a regression data set into nine tenths for training and one for the test.

    Split i is scikit-learn's ``train_test_split(X, y, test_size=0.1, random_state=42 + i)``: the first is the
    paper's, the others repeat the experiment. The data are not needed.

    Parameters
    ----------
    name : str
        The name of the fetcher: "boston", "concrete", "power", "wine_red", "yacht" or "protein".
    n_splits : int, default=20

    Returns
    -------
    splits : list of (train, test), each an ndarray of row numbers
        scikit-learn takes it as `cv`.

    Raises
    ------
    TypeError
        `n_splits` is not an integer.
    ValueError
        `name` is none of these, or `n_splits` is less than 1.

    See Also
    --------
    fetch_boston : A small regression data set.

    References
    ----------
    Hernandez-Lobato, J. M. and Adams, R. (2015). Probabilistic backpropagation for scalable learning of Bayesian
    neural networks. https://arxiv.org/abs/1502.05336

    Examples
    --------
    >>> from skksivi.datasets import uci_splits
    >>> (train, test), *others = uci_splits("yacht")
    >>> train.shape, test.shape, len(others)
    ((277,), (31,), 19)
    """
    from sklearn.model_selection import train_test_split  # not above: it imports rich, which draws from `random`

    if not isinstance(name, str) or name not in RECIPES:
        raise ValueError(f"`name` must be one of {sorted(RECIPES)}, got {name!r}.")
    n_splits = check_integer(n_splits, "n_splits", min_val=1)
    rows = np.arange(RECIPES[name].n_samples)
    splits = []
    for seed in range(PAPER_SEED, PAPER_SEED + n_splits):
        train, test = train_test_split(rows, test_size=TEST_SIZE, random_state=seed)
        splits.append((train, test))
    return splits
