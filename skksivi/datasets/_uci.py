"""The regression data of the paper's Bayesian neural networks, and their splits, and the waveform data.

A data set is one entry of `RECIPES`, one line ``fetch_<name> = _fetcher("<name>", ...)`` and its description in
``descr/<name>.rst``.
"""

from __future__ import annotations

import os
from importlib import resources
from typing import Any, Protocol

import numpy as np
from sklearn.utils import Bunch, check_random_state, check_scalar

from skksivi._utils.checks import check_integer
from skksivi.datasets._base import OLD_UCI, UCI, Options, Recipe, fetch, load_descr

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


# The waveform data


_POSITIONS = np.arange(1, 22)
_WAVES = np.stack([np.maximum(6 - np.abs(_POSITIONS - peak), 0) for peak in (11, 15, 7)])
#: The pair of waves that each class mixes.
_PAIRS = np.array([(1, 2), (0, 2), (0, 1)])
_FEATURE_NAMES = tuple(f"x{j}" for j in _POSITIONS)
_BINARY_NAMES = ("class 1", "class 0 or 2")

WAVEFORM = Recipe(
    name="waveform_uci",
    urls=(f"{UCI}/107/waveform+database+generator+version+1.zip", f"{OLD_UCI}/waveform/waveform.data.Z"),
    files=("waveform.data", "waveform.data.Z"),
    sha256="95787ff661449abb5877e393d8cb367a8074d58530919a302854b0d6564b4407",
    n_samples=5000,
    feature_names=_FEATURE_NAMES,
    target="class",
)


def make_waveform(
    n_samples: int = 5000, *, random_state: int | np.random.RandomState | None = None
) -> tuple[np.ndarray, np.ndarray]:
    r"""Generate the three-class waveform problem.

    Each sample mixes two of three triangular waves h at 21 positions,

    .. math:: x_j = u h_a(j) + (1 - u) h_b(j) + \varepsilon_j, \quad u \sim U(0, 1), \quad \varepsilon_j \sim N(0, 1)

    and its class, drawn with equal probabilities, is the pair (a, b).

    Parameters
    ----------
    n_samples : int, default=5000
    random_state : int, RandomState or None, default=None

    Returns
    -------
    X : ndarray of shape (n_samples, 21)
    y : ndarray of shape (n_samples,)
        Classes 0, 1, 2.

    See Also
    --------
    load_waveform : The training set, without a download.
    fetch_waveform : The waveform data of the UCI repository.

    References
    ----------
    Breiman, L., Friedman, J., Olshen, R. and Stone, C. (1984). Classification and Regression Trees, section 2.6.1.

    Examples
    --------
    >>> from skksivi.datasets import make_waveform
    >>> X, y = make_waveform(100, random_state=0)
    >>> X.shape, y.shape
    ((100, 21), (100,))
    """
    n_samples = check_integer(n_samples, "n_samples", min_val=0)
    rng = check_random_state(random_state)
    y = rng.randint(3, size=n_samples)
    u = rng.uniform(size=(n_samples, 1))
    a, b = _PAIRS[y].T
    return u * _WAVES[a] + (1 - u) * _WAVES[b] + rng.normal(size=(n_samples, 21)), y


def load_waveform(*, return_X_y: bool = False) -> Any:  # noqa: ANN401
    """Return the training set of the waveform benchmark: binary, standardised, 400 rows.

    5,000 rows of `make_waveform` with a fixed seed, prepared as the paper prepares the UCI file: columns
    standardised over all rows (n - 1 in the variance), class 1 against the two others, the first 400 rows kept.

    Parameters
    ----------
    return_X_y : bool, default=False
        Whether to return (data, target) instead of a Bunch.

    Returns
    -------
    data : Bunch
        With `data` (400, 21), `target` (400,) of 0 and 1, `feature_names`, `target_names` and `DESCR`.
    (data, target) : tuple of ndarray
        With `return_X_y`.

    See Also
    --------
    load_waveform_posterior : Exact draws of its posterior.
    make_waveform : The generator of such data.
    fetch_waveform : The waveform data of the UCI repository.

    Examples
    --------
    >>> from skksivi.datasets import load_waveform
    >>> X, y = load_waveform(return_X_y=True)
    >>> X.shape, float(y.mean())
    ((400, 21), 0.6625)
    """
    check_scalar(return_X_y, "return_X_y", (bool, np.bool_))
    X, y = _standardised(*make_waveform(5000, random_state=1984))
    X, y = X[:400], y[:400]
    if return_X_y:
        return X, y
    return Bunch(
        data=X,
        target=y,
        feature_names=list(_FEATURE_NAMES),
        target_names=list(_BINARY_NAMES),
        DESCR=load_descr("waveform"),
    )


def fetch_waveform(
    *,
    subset: str = "all",
    data_home: str | os.PathLike[str] | None = None,
    download_if_missing: bool = True,
    return_X_y: bool = False,
    as_frame: bool = False,
    n_retries: int = 3,
    delay: float = 1.0,
) -> Any:  # noqa: ANN401
    """Fetch the waveform data of the UCI repository: 5,000 samples, 21 features, three classes.

    The original file is searched for in `data_home`, where it may be placed by hand (``waveform.data``,
    ``waveform.data.Z`` or the archive), and otherwise downloaded to there. The sha256 of its numbers is verified.
    A file in ``.Z``, which the archive holds, is unpacked by the program gzip.

    Parameters
    ----------
    subset : {"all", "train", "test"}, default="all"
        "all" is the file as it is. "train" and "test" are the paper's benchmark, ready for a logistic regression: the
        columns standardised over all rows (n - 1 in the variance), class 1 against the two others, and the rows
        split into 400, in the order of the benchmark, and the other 4,600, in the order of the file.
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

        - `data`, n x 21: float64;
        - `target`, n: the integers 0, 1 and 2, or with a split 0 and 1, the second for classes 0 and 2;
        - `frame`: a DataFrame of both with `as_frame`, else None;
        - `feature_names` and `target_names`, the names of the classes;
        - `DESCR`: what the columns are, source and licence;
        - `data_filename`: the original file.
    (data, target) : tuple of ndarray or of pandas objects
        With `return_X_y`.

    Raises
    ------
    OSError
        The data are not in `data_home` and cannot be downloaded; the message says which file to put where.
    ValueError
        `subset` is none of the three, the file in `data_home` is damaged or of more than 32 MiB, or an option is
        out of its range.
    ImportError
        pandas, for `as_frame`, or gzip is needed, and it is not installed.

    See Also
    --------
    load_waveform : A generated set like "train", which needs no download.

    Examples
    --------
    >>> from skksivi.datasets import fetch_waveform
    >>> X, y = fetch_waveform(subset="train", return_X_y=True)  # doctest: +SKIP
    >>> X.shape  # doctest: +SKIP
    (400, 21)
    """
    if not isinstance(subset, str) or subset not in ("all", "train", "test"):
        raise ValueError(f'`subset` must be "all", "train" or "test", got {subset!r}.')

    def prepare(X: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if subset == "all":
            return X, y.astype(int)
        X, y = _standardised(X, y)
        train = _train_rows()
        rows = train if subset == "train" else np.setdiff1d(np.arange(len(X)), train)
        return X[rows], y[rows]

    names = ("class 0", "class 1", "class 2") if subset == "all" else _BINARY_NAMES
    options = Options(data_home, download_if_missing, return_X_y, as_frame, n_retries, delay)
    return fetch(WAVEFORM, options, prepare=prepare, target_names=names)


def _standardised(X: np.ndarray, classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the benchmark's features and its target, 0 for class 1 and 1 for the two others."""
    return (X - X.mean(axis=0)) / X.std(axis=0, ddof=1), (classes != 1).astype(int)


def _train_rows() -> np.ndarray:
    """Return the rows (400,) of the UCI file that the benchmark trains on, from zero and in its order."""
    text = resources.files("skksivi.datasets").joinpath("data", "waveform_train_rows.txt").read_text("ascii")
    return np.array(text.split(), dtype=int)


def load_waveform_posterior() -> np.ndarray:
    r"""Return exact draws of the posterior of a logistic regression on `load_waveform`.

    The posterior is ``BayesianLogisticRegression(X, y, prior_precision=0.01, fit_intercept=True)``. The draws are
    the last states of 2,000 independent, long, preconditioned Metropolis-adjusted Langevin chains; the command
    ``python benchmarks/reference.py waveform`` makes the file again and prints its diagnostics.

    Returns
    -------
    X : ndarray of shape (2000, 22)
        The intercept first. Two halves of 1,000 give the noise floor of a comparison.

    See Also
    --------
    load_waveform : The training set, without a download.
    skksivi.targets.BayesianLogisticRegression : The posterior of a logistic regression.

    Examples
    --------
    >>> from skksivi.datasets import load_waveform_posterior
    >>> load_waveform_posterior().shape
    (2000, 22)
    """
    path = resources.files("skksivi.datasets").joinpath("data", "waveform_posterior.npz")
    with resources.as_file(path) as file, np.load(file) as archive:
        return archive["draws"]
