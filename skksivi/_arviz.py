"""Draws of a fit, with what ArviZ needs to go on."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import count
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from skksivi._utils import __version__
from skksivi._utils.arrays import RandomState, as_array, resolve_device
from skksivi._utils.checks import warn_caller
from skksivi._utils.monte_carlo import pareto_smoothed
from skksivi.base import BaseApproximator, check_fit
from skksivi.score import resolve_score
from skksivi.targets import Target

if TYPE_CHECKING:
    from arviz import InferenceData
    from xarray import DataTree

#: Chains that independent draws are cut into, at most, and draws that each must have for the statistics of ArviZ.
N_CHAINS, N_DRAWS = 4, 4

#: The dimensions of draws, which no parameter and no other dimension can be called: `extract` joins two to the last.
OF_DRAWS = ("chain", "draw", "sample")

#: The groups beside "posterior", each with what it needs of a target.
GROUPS = {
    "sample_stats": "log_prob",
    "log_likelihood": "log_likelihood",
    "log_prior": "log_prior",
    "posterior_predictive": "predictive_draws",
    "observed_data": "observed_data",
    "constant_data": "constant_data",
}


def to_arviz(
    est: BaseApproximator,
    target: Target | None = None,
    n_samples: int = 4000,
    *,
    groups: Sequence[str] | None = None,
    coords: Mapping[str, Sequence[object]] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    random_state: RandomState = None,
) -> DataTree | InferenceData:
    """Draw from a fitted approximator, and give ArviZ the draws with all that it needs to go on.

    ``loo_approximate_posterior``, whose results ``compare`` takes, and ``psense`` of ArviZ take the result.

    Parameters
    ----------
    est : approximator
        Fitted.
    target : Target, default=None
        The target of `est`. If it has `constrain`, as targets of `skksivi.targets.from_pymc` do, the variables are in
        the space of the model, with its `coords` and `dims`. Without a target the draws are one variable "x".
    n_samples : int, default=4000
        Number of draws. They are independent, and are divided into chains of equal length, which ArviZ compares: up
        to four, as many as divide their number.
    groups : sequence of str, default=None
        Which groups to make beside "posterior", for example ``[]``; None for all that the target knows:

        - "sample_stats": ``log_p`` of the target and ``log_q`` of the fit at the draws, in its own coordinates, and
          ``log_weight``, the Pareto-smoothed ratio of both, with its k-hat in the attributes;
        - "log_likelihood" of each observation, "posterior_predictive", "observed_data" and "constant_data", which
          PyMC and NumPyro models have, and other targets with the optional methods of `skksivi.targets.Target`;
        - "log_prior": PyMC's and NumPyro's by parameter; otherwise what `log_prob` is without the likelihood, and
          without the Jacobian of `skksivi.targets.constrained`.
    coords : dict of str to sequence, default=None
        Labels along named dimensions; they take precedence over the labels of `target`.
    dims : dict of str to sequence of str, default=None
        The names of the dimensions of variables, beside chain and draw; they take precedence over the names of
        `target`.
    random_state : int, RandomState or None, default=None
        As in `est.sample`.

    Returns
    -------
    data : xarray.DataTree or arviz.InferenceData
        The format of the installed ArviZ: an InferenceData if the package ``arviz`` is installed and older than 1.
        Both have a group "posterior" of variables (chain, draw, ...), whose attributes are the certificate and the
        verdict of the fit, if it has one.

    Raises
    ------
    ImportError
        arviz-base is not installed, or arviz is too old to be imported.
    TypeError
        `est` is not an approximator, or `target` not its target, such as a number, which is `n_samples`.
    NotFittedError
        `est` is not fitted.
    ValueError
        `target` has another number of features than `est`, or does not know one of the `groups`; or one of its
        methods returns another number of rows than there are draws.

    Warns
    -----
    UserWarning
        Groups of rows with more than 2**26 numbers, and the prior then, are made only if they are among `groups`. A
        variable that is called as a dimension, such as "draw", has another name in the result, "draw_".

    See Also
    --------
    skksivi.targets.from_pymc : A target of a PyMC model.
    skksivi.targets.from_numpyro : A target of a NumPyro model.
    skksivi.targets.from_bridgestan : A target of a Stan model.

    References
    ----------
    Kumar, R. et al. (2019). ArviZ a unified library for exploratory analysis of Bayesian models in Python.
    https://doi.org/10.21105/joss.01143

    Examples
    --------
    >>> from skksivi import to_arviz
    >>> from skksivi.baselines import Laplace
    >>> from skksivi.targets import BayesianLogisticRegression
    >>> target = BayesianLogisticRegression([[-1.0], [0.5], [2.0]], [0, 1, 1], prior_precision=1.0)
    >>> data = to_arviz(Laplace(random_state=0).fit(target), target)
    >>> data.posterior["x"].shape, data.log_likelihood["y"].shape
    ((4, 1000, 1), (4, 1000, 3))
    """
    try:
        import arviz_base
    except ImportError as error:
        raise ImportError("`to_arviz` needs arviz-base; install it: pip install 'skksivi[arviz]'.") from error
    check_fit(est, target)
    if isinstance(target, Integral):
        raise TypeError(f"`target` is a number, expected a target; write n_samples={target}.")
    if not (target is None or hasattr(target, "score_fn") or callable(target)) or isinstance(target, type):
        raise TypeError(f"`target` must be a Target, the one of `est`, got a {type(target).__name__}.")
    d = getattr(target, "n_features", est.n_features_in_)
    if d != est.n_features_in_:
        raise ValueError(f"`target` has {d} features, expected {est.n_features_in_} as in `fit`.")
    if unknown := [name for name in groups or () if name not in GROUPS]:
        raise ValueError(f"`groups` has {unknown[0]!r}, expected some of {', '.join(GROUPS)}, in a list.")
    drawn = Drawn(est, target, est.sample(n_samples, random_state))
    found = {"posterior": drawn.posterior()}
    for name in drawn.small_groups() if groups is None else groups:
        if group := getattr(drawn, name)():
            found[name] = group
        elif groups is not None:
            raise ValueError(
                f"`groups` has {name!r}, for which `target` needs `{GROUPS[name]}`; see skksivi.targets.Target."
            )
    in_chains = {
        name: group if name.endswith("data") else {key: _in_chains(values) for key, values in group.items()}
        for name, group in found.items()
    }
    of_model = (_lists(getattr(target, name, {}), given) for name, given in (("coords", coords), ("dims", dims)))
    tree = arviz_base.from_dict(
        **_without_clashes(in_chains, *of_model),
        attrs={name: attributes for name, attributes in drawn.attributes().items() if name in found},
    )
    return _as_installed(tree)


@dataclass
class Drawn:
    """Draws X (n, d) of a fit to a target; a method for each group, empty if it is not known."""

    est: BaseApproximator
    target: Any
    X: np.ndarray

    def __post_init__(self) -> None:
        device = resolve_device(self.est.device_)
        self.x = torch.as_tensor(self.X, dtype=torch.float64, device=device)
        if isinstance(self.target, Target):
            self.target = self.target.to(device=device, dtype=torch.float64)

    def posterior(self) -> dict[str, np.ndarray]:
        return self.target.constrain(self.X) if hasattr(self.target, "constrain") else {"x": self.X}

    def sample_stats(self) -> dict[str, np.ndarray]:
        known = {"log_p": self.log_p, "log_q": self.log_q, "log_weight": self.weights[0]}
        return {name: values for name, values in known.items() if values is not None}

    def log_likelihood(self) -> dict[str, np.ndarray]:
        return self._rows

    def log_prior(self) -> dict[str, np.ndarray]:
        """Return the target's own, or what else is in its log-density."""
        if hasattr(self.target, "log_prior"):
            return self._of_target("log_prior")
        if self.log_p is None or not self._rows:
            return {}
        rest = self.log_p - sum(values.reshape(len(values), -1).sum(1) for values in self._rows.values())
        labels = getattr(self.target, "label_exchanges", None)
        return {"log_prior": rest - as_array(labels.log_jacobian(self.x)) if labels is not None else rest}

    def posterior_predictive(self) -> dict[str, np.ndarray]:
        seed = zlib.crc32(self.X.tobytes())  # so that the same draws have the same predictions
        return self._of_target("predictive_draws", seed)

    def observed_data(self) -> dict[str, ArrayLike]:
        return dict(getattr(self.target, "observed_data", {}))

    def constant_data(self) -> dict[str, ArrayLike]:
        return dict(getattr(self.target, "constant_data", {}))

    def attributes(self) -> dict[str, dict[str, object]]:
        """Return attributes of groups: numbers and strings, as files hold them."""
        by: dict[str, object] = {"inference_library": "skksivi", "inference_library_version": __version__}
        verdict, found = (getattr(self.est, name, None) for name in ("verdict_", "certificate_"))
        if verdict is not None:
            by["verdict"] = str(verdict)
        if verdict is not None and found is not None:
            by |= {f"certificate_{name}": float(value) for name, value in found._asdict().items()}
        return {"posterior": by, "sample_stats": {"pareto_k": self.weights[1]}}

    def small_groups(self) -> list[str]:
        """Return all groups but those that have too many numbers to be made unasked, with a warning."""
        rows = sum(np.size(values) for values in self.observed_data().values())
        n = len(self.X) * getattr(self.target, "n_rows", rows)
        by_row = ("log_likelihood", "posterior_predictive")
        large = [name for name in by_row if n > 2**26 and hasattr(self.target, GROUPS[name])]  # half a gigabyte
        if large:
            warn_caller(f"{' and '.join(large)} of {n:,} numbers: not made; set `groups`, or lower `n_samples`.")
        return [name for name in GROUPS if name not in large and not (name == "log_prior" and large)]

    @cached_property
    def log_p(self) -> np.ndarray | None:
        """The log-density (n,) of the target, None where only its score is known."""
        if getattr(self.target, "log_prob", None) is None:
            return None
        d, device = self.est.n_features_in_, self.x.device
        log_prob = resolve_score(self.target, d, dtype=torch.float64, device=device, warns=False).log_prob
        return None if log_prob is None else as_array(log_prob(self.x))

    @cached_property
    def log_q(self) -> np.ndarray | None:
        """The log-density (n,) of the fit, None if it has none."""
        with suppress(TypeError):
            return self.est.score_samples(self.X, return_std=True)[0]
        return None

    @cached_property
    def weights(self) -> tuple[np.ndarray | None, float]:
        """The logarithms (n,) of Pareto-smoothed weights that sum to one, and k-hat."""
        if self.log_p is None or self.log_q is None:
            return None, np.nan
        log_ratios = self.log_p - self.log_q
        inside, found = np.isfinite(log_ratios), np.full(len(log_ratios), -np.inf)
        if inside.sum() < 20:  # a tail of fewer has no shape
            return None, np.nan
        found[inside], k = pareto_smoothed(log_ratios[inside])
        return found - np.logaddexp.reduce(found), k

    @cached_property
    def _rows(self) -> dict[str, np.ndarray]:
        return self._of_target("log_likelihood")

    def _of_target(self, method: str, *seed: int) -> dict[str, np.ndarray]:
        """Return what a method of the target gives at the draws, arrays (n, ...) by name; nothing without it."""
        if not hasattr(self.target, method):
            return {}
        with torch.no_grad():
            values = getattr(self.target, method)(self.x, *seed)
        is_one, n = not isinstance(values, Mapping), len(self.X)
        name = "log_prior" if method == "log_prior" else "y"
        found = {name: as_array(values)} if is_one else {key: as_array(array) for key, array in values.items()}
        for array in found.values():
            if array.shape[:1] != (n,) or (is_one and array.ndim < 2 and name == "y"):
                raise ValueError(
                    f"`{method}` of `target` returned shape {array.shape}, expected ({n}, "
                    f"{'rows' if name == 'y' else ''}): a row for each draw, with a number for each observation."
                )
        return found


def _in_chains(values: np.ndarray) -> np.ndarray:
    """Cut independent draws (n, ...) into chains of equal length (n_chains, n / n_chains, ...)."""
    n = len(values)
    n_chains = next((k for k in range(N_CHAINS, 1, -1) if n % k == 0 and n >= k * N_DRAWS), 1)
    return values.reshape(n_chains, n // n_chains, *values.shape[1:])


def _as_installed(tree: DataTree) -> DataTree | InferenceData:
    """Return an InferenceData for ArviZ 0, whose functions take no tree; those of ArviZ 1 take both."""
    if find_spec("arviz") is None:
        return tree
    try:
        import arviz
    except Exception as error:  # versions before 0.22 fail in many ways beside newer libraries
        raise ImportError(
            f"arviz is installed, but its import raised {type(error).__name__}: {error}; it may be too old. Upgrade "
            "it: pip install --upgrade 'skksivi[arviz]'."
        ) from error
    if int(arviz.__version__.partition(".")[0]) >= 1:
        return tree
    groups: dict[str, Any] = {name: group.to_dataset() for name, group in tree.children.items()}
    return arviz.InferenceData(**groups)


def _lists(own: Mapping[str, Sequence[Any]], given: Mapping[str, Sequence[Any]] | None) -> dict[str, list[Any]]:
    """Return what is given and, by other names, what a target has."""
    return {name: list(values) for name, values in {**own, **(given or {})}.items()}


def _without_clashes(groups: dict[str, Any], coords: dict[str, Any], dims: dict[str, Any]) -> dict[str, Any]:
    """Return data, coords and dims, with other names for what xarray would lose, of which a warning tells.

    It makes a variable that is called as a dimension its index, without a word.
    """
    names = dict.fromkeys(name for group in groups.values() for name in group)
    own = dict.fromkeys(dim for some in dims.values() for dim in some)
    unnamed = {f"{name}_dim_{k}" for group in groups.values() for name in group for k in range(np.ndim(group[name]))}
    used, new = {*names, *own, *unnamed, *OF_DRAWS}, list[dict[str, str]]()
    for each, clashing in ((names, {*own, *unnamed, *OF_DRAWS}), (own, OF_DRAWS)):
        new.append({})
        for name in (name for name in each if name in clashing):
            new[-1][name] = next(other for k in count(1) if (other := name + "_" * k) not in used)
            used.add(new[-1][name])
    if any(new):
        changed = ", ".join(f"`{name}` is `{other}`" for name, other in [*new[0].items(), *new[1].items()])
        warn_caller(f"In the result {changed}, because ArviZ needs the name for a dimension.")
    variable, dim = (lambda name, of=of: of.get(name, name) for of in new)
    return {
        "data": {key: {variable(name): a for name, a in group.items()} for key, group in groups.items()},
        "coords": {dim(name): labels for name, labels in coords.items()},
        "dims": {variable(name): [dim(each) for each in some] for name, some in dims.items()},
    }
