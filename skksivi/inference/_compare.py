"""Models of the same data, compared by their evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from skksivi._utils.arrays import RandomState, make_rng, make_seed
from skksivi.base import BaseApproximator, check_fit
from skksivi.inference._importance import evidence
from skksivi.inference._summary import Table
from skksivi.targets._base import Target


@dataclass(frozen=True, repr=False)
class Comparison(Table):
    """The log evidence of models, from the highest to the lowest.

    Attributes
    ----------
    names : tuple of str
        Of the k models; those whose weights are not reliable come last.
    log_z, log_z_se : ndarray of shape (k,)
        Natural logarithms of the evidence, and standard errors; infinite where the weights are not reliable.
    difference, difference_se : ndarray of shape (k,)
        What they are above the first, and standard errors.
    notes : tuple of str
        Empty, or why a standard error is not known.
    source : str
        What the numbers come from.
    """

    names: tuple[str, ...]
    log_z: np.ndarray = field(compare=False)
    log_z_se: np.ndarray = field(compare=False)
    difference: np.ndarray = field(compare=False)
    difference_se: np.ndarray = field(compare=False)
    notes: tuple[str, ...]
    source: str
    warning = ""

    def _columns(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        return {"log_z": (self.log_z, self.log_z_se), "difference": (self.difference, self.difference_se)}


def compare(
    fits: Mapping[str, tuple[BaseApproximator, Target]], *, n_samples: int = 2000, random_state: RandomState = None
) -> Comparison:
    r"""Tabulate the log evidence of several models of the same data, and the differences, with standard errors.

    A difference of :math:`\log Z` is the logarithm of a Bayes factor. It depends on the priors, which must be proper,
    and `log_prob` must have all of its constants: models in PyMC, NumPyro and Stan have them, and for your own only
    you can tell. What cannot be compared is refused: a target known by its score alone, one that leaves constants out
    and says so, by ``up_to_constant = True``, and targets with other data, by their `observed_data` or `n_rows`.

    Parameters
    ----------
    fits : dict of str to (approximator, Target)
        A fit with a density by the name of each model, and the target whose evidence is asked for.
    n_samples : int, default=2000
        How many draws of each fit, at least 100.
    random_state : int, RandomState or None, default=None

    Returns
    -------
    comparison : Comparison
        Prints as a table, the best model first; ``to_frame()`` is a data frame with the columns "log_z", "log_z_se",
        "difference", "difference_se" and "note". ``names``, ``log_z`` and so on are its attributes.

    Raises
    ------
    NotFittedError
        Before `fit`.
    TypeError
        `fits` is not a dict of pairs, or a fit has no density.
    ValueError
        The evidences cannot be compared.

    See Also
    --------
    evidence : Of one model, with bounds.
    to_arviz : For leave-one-out, which depends less on the priors.

    References
    ----------
    Kass, R. E. and Raftery, A. E. (1995). Bayes factors. JASA 90(430).

    Examples
    --------
    >>> import torch
    >>> from skksivi import compare
    >>> from skksivi.baselines import Laplace
    >>> from skksivi.targets import from_log_prob
    >>> def model(sd):  # 1.5 ~ N(x, 1), x ~ N(0, sd^2)
    ...     prior, noise = torch.distributions.Normal(0, sd), torch.distributions.Normal(1.5, 1)
    ...     return from_log_prob(lambda x: (prior.log_prob(x) + noise.log_prob(x)).sum(-1), n_features=1)
    >>> models = {f"sd = {sd}": model(sd) for sd in (1, 10)}
    >>> table = compare({name: (Laplace().fit(target), target) for name, target in models.items()}, random_state=0)
    >>> table.names, table.difference.round(2)
    (('sd = 1', 'sd = 10'), array([ 0.  , -1.41]))
    """
    pairs = fits.values() if isinstance(fits, Mapping) else ()
    if not pairs or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise TypeError("`fits` must be a dict of pairs of a fit and its target such as {'name': (est, target)}.")
    for name, (est, target) in fits.items():
        check_fit(est, target, f"fits[{name!r}][0]")
        _check_constants(name, not getattr(getattr(target, "target", target), "up_to_constant", False))
    for (a, (_, one)), (b, (_, other)) in combinations(fits.items(), 2):
        if not _may_have_same_data(one, other):
            raise ValueError(
                f"`fits`: the targets of {a!r} and {b!r} have other data (`observed_data` or `n_rows`), so that "
                "their evidences cannot be compared; fit both to the same data."
            )
    rng = make_rng(random_state)
    found = [evidence(*pair, n_samples=n_samples, random_state=make_seed(rng)) for pair in pairs]
    for name, one in zip(fits, found, strict=True):
        _check_constants(name, one.reference is None)
    z, se = np.array([one.log_z for one in found]).T
    order = np.lexsort([-z, np.isinf(se)])
    best, z, se = order[0], z[order], se[order]
    notes = tuple("" if found[i].trusted else f"weights not reliable, k-hat {found[i].k:.2f}" for i in order)
    difference_se = np.where(order == best, 0.0, np.hypot(se, se[0]))
    source = f"{n_samples:,} weighted draws for each model; ± one standard error"
    return Comparison(tuple(list(fits)[i] for i in order), z, se, z - z[0], difference_se, notes, source)


def _check_constants(name: str, known: bool) -> None:
    if not known:
        raise ValueError(
            f"`fits[{name!r}]`: the target has an unknown constant, which its evidence would need; pass one whose "
            "`log_prob` has all of its constants."
        )


def _may_have_same_data(a: object, b: object) -> bool:
    """Tell whether targets do not say that they have other data; their names, shapes and order do not matter."""
    observed = [getattr(target, "observed_data", None) or {} for target in (a, b)]
    y, z = (np.sort(np.concatenate([[], *map(np.ravel, data.values())])) for data in observed)
    n_rows = {getattr(target, "n_rows", None) for target in (a, b)} - {None}
    return len(n_rows) < 2 and (not len(y) or not len(z) or np.array_equal(y, z, equal_nan=True))
