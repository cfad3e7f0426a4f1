"""Parameters that mean nothing apart, as objects; a string or a number is their shorthand.

Each is cloned, shown and searched as an estimator is: ``KSIVIApproximator().set_params(whiten__budget=100_000)``, or
``{"optimizer__ema": [None, 0.999]}`` in a grid, whether the parameter is the object or its shorthand.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, Self, TypeVar

from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, clone
from sklearn.utils._param_validation import Interval as _Interval
from sklearn.utils._param_validation import InvalidParameterError, StrOptions

from skksivi._utils.checks import is_number, plain, shown

__all__ = ["Adam", "Bridge", "Checkpoint", "Network", "Pilot", "Scale"]
__dir__ = __all__.copy

#: Bridges of a hierarchy, by name.
BRIDGES = ("auto", "cosine", "geometric", "linear", "none", "quadratic")

#: What scikit-learn's validation allows, by the name of a parameter.
Constraints = dict[str, list[object] | str]

#: How a learning rate falls: (factor, every), "cosine" or not at all.
Decay = tuple[float, int] | str | None


class Interval(_Interval):
    """The numbers of a type in an interval, except True and False."""

    def is_satisfied_by(self, val: object) -> bool:
        """Tell whether this is such a number."""
        return is_number(val) and super().is_satisfied_by(val)


class Constrained:
    """Lets a class give constraints of its own parameters alone; the constraints of its bases hold, too."""

    _parameter_constraints: ClassVar[Constraints]

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        merged: Constraints = {}
        for part in reversed(cls.__mro__):
            merged |= vars(part).get("_parameter_constraints", {})
        cls._parameter_constraints = merged

    def _validate_params(self) -> None:
        try:
            super()._validate_params()  # type: ignore[misc]
        except InvalidParameterError as error:
            raise InvalidParameterError(plain(str(error))) from None


#: Allows the widths of layers, or the width of one.
WIDTHS = (Interval(Integral, 1, None, closed="left"), "array-like")


class Nested(Constrained, BaseEstimator):
    """Base of estimators with parameters that are objects or shorthands for them."""

    def set_params(self, **params: object) -> Self:
        """Set parameters, also of an object that is given by its shorthand.

        Parameters
        ----------
        **params : dict
            As for scikit-learn's estimators, such as ``whiten__budget=100_000``, also where `whiten` is "auto".

        Returns
        -------
        self : object

        Raises
        ------
        ValueError
            There is no such parameter, or it is a part of a parameter that is neither an object nor a shorthand for
            one. In that case nothing is changed.
        """
        known, whole = self.get_params(deep=False), {k: v for k, v in params.items() if "__" not in k}
        changed = copy.copy(self)  # what a shorthand means may depend on other parameters
        changed.__dict__.update({k: v for k, v in whole.items() if k in known})
        for name in {name.partition("__")[0] for name in params.keys() - whole.keys()} & known.keys():
            value = whole.get(name, known[name])
            found = value if hasattr(value, "set_params") else changed._expanded(name, value)  # noqa: SLF001
            if found is None:
                raise ValueError(
                    f"`{name}` is {shown(value)}, which has no parameters of its own; set `{name}` of "
                    f"{type(self).__name__} to an object first."
                )
            parts = {k.partition("__")[2]: v for k, v in params.items() if k.startswith(f"{name}__")}
            whole[name] = clone(found).set_params(**parts)
        unknown = {k: v for k, v in params.items() if k.partition("__")[0] not in known}
        return super().set_params(**whole | unknown)

    def _expanded(self, name: str, value: object) -> BaseEstimator | None:
        """Return the object that a value of a parameter abbreviates, None if it abbreviates none."""
        return None


class ParameterObject(Constrained, BaseEstimator):
    """Base of the parameter objects."""

    def check(self) -> None:
        """Raise unless each parameter is of its type and in its range.

        Raises
        ------
        InvalidParameterError
            A ValueError that names the parameter, what it must be and what it is.
        """
        self._validate_params()


@dataclass(kw_only=True, eq=False, repr=False)
class Adam(ParameterObject):
    """Settings of Adam: step sizes, averaging and clipping; `learning_rate` is a parameter of the estimator.

    Parameters
    ----------
    betas : (float, float), default=(0.9, 0.99)
        Decay rates of the first and second moment, in [0, 1).
    decay : (factor, every), "cosine" or None, default="cosine"
        Multiply the rate by `factor` after every `every` iterations, or lower it to zero along a cosine.
    warm_up : int, default=0
        Iterations over which the rate rises from zero.
    ema : float or None, default=0.999
        The fitted parameters are an exponential moving average with this decay, or over a tenth of the iterations so
        far if that is shorter; None takes the last ones.
    max_norm : float or None, default=None
        Clip the gradient to this Euclidean norm.
    nonfinite : {"raise", "skip"}, default="raise"
        What to do about an iteration whose loss or gradient is NaN or infinite; its step is never taken. "raise" ends
        the fit with an error; "skip" continues and reports how many there were, unless there are a hundred in a row.

    See Also
    --------
    Checkpoint : The file from which an interrupted fit resumes.

    References
    ----------
    Kingma, D. and Ba, J. (2015). Adam: a method for stochastic optimization. https://arxiv.org/abs/1412.6980

    Examples
    --------
    >>> from skksivi import KSIVIApproximator
    >>> from skksivi.parameters import Adam
    >>> KSIVIApproximator(optimizer=Adam(decay=(0.9, 3000), ema=None))
    KSIVIApproximator(optimizer=Adam(decay=(0.9, 3000), ema=None))
    """

    _parameter_constraints: ClassVar[Constraints] = {
        "betas": [tuple, list],
        "decay": [StrOptions({"cosine"}), tuple, list, None],
        "warm_up": [Interval(Integral, 0, None, closed="left")],
        "ema": [Interval(Real, 0, 1, closed="left"), None],
        "max_norm": [Interval(Real, 0, None, closed="neither"), None],
        "nonfinite": [StrOptions({"raise", "skip"})],
    }

    betas: tuple[float, float] = (0.9, 0.99)
    decay: Decay = "cosine"
    warm_up: int = 0
    ema: float | None = 0.999
    max_norm: float | None = None
    nonfinite: str = "raise"

    def check(self) -> None:
        """Raise unless each parameter is of its type and in its range."""
        super().check()
        if len(self.betas) != 2 or not all(isinstance(b, Real) and 0 <= float(b) < 1 for b in self.betas):
            raise ValueError(f"`betas` of Adam must be two numbers in [0, 1), got {shown(self.betas)}.")
        if self.decay is None or isinstance(self.decay, str):
            return
        pair = self.decay
        if len(pair) != 2 or not all(isinstance(a, Real) for a in pair) or not 0 < pair[0] <= 1 <= pair[1]:
            raise ValueError(
                "`decay` of Adam must be 'cosine', None or a pair (factor in (0, 1], iterations >= 1), got "
                f"{shown(self.decay)}."
            )


@dataclass(eq=False, repr=False)
class Network(ParameterObject):
    r"""The network in the mean of a semi-implicit layer.

    Parameters
    ----------
    hidden_layer_sizes : int or sequence of int, default=(100, 100)
        Widths of the hidden layers, without input and output.
    linear_skip : bool, default=True
        Whether :math:`\mu(z) = A z + \mathrm{NN}(z)` with a network that starts at zero, so that training starts at
        the pilot's points or at N(0, I) in u. Otherwise the network is the whole mean, as in the paper, and starts at
        random.

    See Also
    --------
    skksivi.KSIVIApproximator : One semi-implicit layer, the first choice.

    Examples
    --------
    >>> from skksivi import KSIVIApproximator
    >>> from skksivi.parameters import Network
    >>> KSIVIApproximator(hidden_layer_sizes=Network((50, 50), linear_skip=False))
    KSIVIApproximator(hidden_layer_sizes=Network(hidden_layer_sizes=(50, 50),
                                                 linear_skip=False))
    """

    _parameter_constraints: ClassVar[Constraints] = {"hidden_layer_sizes": [*WIDTHS], "linear_skip": ["boolean"]}

    hidden_layer_sizes: int | Sequence[int] = (100, 100)
    _: KW_ONLY
    linear_skip: bool = True

    def check(self) -> None:
        """Raise unless each parameter is of its type and in its range."""
        super().check()
        self.widths()

    def widths(self) -> tuple[int, ...]:
        """Return the widths of the layers; a number is the width of one."""
        return check_widths(self.hidden_layer_sizes, "hidden_layer_sizes")


@dataclass(eq=False, repr=False)
class Pilot(ParameterObject):
    """Exploration of the target before training, by whiten="auto" or "diagonal".

    Parameters
    ----------
    rule : {"auto", "diagonal"}, default="auto"
        "auto" searches for modes, runs chains around each and takes their mean and covariance as m and L L^T.
        "diagonal" is for many parameters and for posteriors far from any Gaussian: chains of underdamped Langevin
        dynamics, and one scale per coordinate.
    effort : {"frugal", "low", "auto", "high"}, default="auto"
        How much "auto" spends. "frugal" is for scores that take long: at most 1,000 calls in a `fit`, unless
        `max_score_calls` says otherwise, without training. Checks and searches take fewer points, and a surrogate of
        log p, a Gaussian process given some 100 to 400 scores, is explored in the place of the target. It suits
        posteriors of up to about 20 features with one mode or a few near each other. In one to five dimensions narrow
        other modes are not looked for, so that the verdict is not good unless `init` or `skip` says that there is one
        mode. "low": shorter chains, whether or not the start is then good, and no training by `method="auto"`.
        "auto": where a call takes more than 0.05 seconds for one point, and nothing asks for a training, it is
        "frugal" from the search for modes on, as the logger "skksivi" and `stages_` say. "high": narrow modes are
        looked for at 32 times as many points.
    budget : int, default=400_000
        About the most evaluations that are made before the training begins; most fits take far less. With "diagonal"
        it sets the number of steps of each chain, 200 to 20,000.
    max_score_calls : int or None, default=None
        Upper limit for all evaluations of the score and of log p, and products with the Jacobian of the score, in a
        `fit`, including training and checks. When it is reached, `fit` returns its best result, with a warning; at
        worst these are the Gaussians at the modes. With "diagonal" an error says if the limit is too small. None
        means the `budget` until the training begins, which takes `max_iter` steps, and 1,000 if `effort` is
        "frugal".
    skip : sequence of str, default=()
        Names of sources of "auto" to leave out, as `whitening_.report()` shows them. Without "other modes" a fit of a
        target that is known to have one mode saves their search; without others it may be worse.
    weight : float, default=1.0
        Weight of the penalty on differences of the first three moments of the draws from the pilot's, to which the
        discrepancy is hardly sensitive in the tails; zero for none. Only KSIVI and HKSIVI have this penalty.

    See Also
    --------
    skksivi.KSIVIApproximator : One semi-implicit layer, the first choice.

    Examples
    --------
    >>> from skksivi import KSIVIApproximator
    >>> from skksivi.parameters import Pilot
    >>> KSIVIApproximator(whiten=Pilot(budget=100_000))
    KSIVIApproximator(whiten=Pilot(budget=100000))
    """

    _parameter_constraints: ClassVar[Constraints] = {
        "rule": [StrOptions({"auto", "diagonal"})],
        "effort": [StrOptions({"frugal", "low", "auto", "high"})],
        "budget": [Interval(Integral, 0, None, closed="left")],
        "max_score_calls": [Interval(Integral, 1, None, closed="left"), None],
        "skip": ["array-like"],
        "weight": [Interval(Real, 0, None, closed="left")],
    }

    rule: str = "auto"
    _: KW_ONLY
    effort: str = "auto"
    budget: int = 400_000
    max_score_calls: int | None = None
    skip: Sequence[str] = ()
    weight: float = 1.0


@dataclass(eq=False, repr=False)
class Scale(ParameterObject):
    r"""The standard deviations of a Gaussian layer, :math:`\sigma^2 = e^a + \text{floor}^2`.

    Parameters
    ----------
    form : {"constant", "network"}, default="constant"
        Whether a is one vector, as in the paper's experiments, or a network of z.
    floor : float, default=1e-3
        In whitened units.

    See Also
    --------
    skksivi.KSIVIApproximator : One semi-implicit layer, the first choice.
    skksivi.HKSIVIApproximator : A hierarchy of layers, for distant modes.

    Examples
    --------
    >>> from skksivi import KSIVIApproximator
    >>> from skksivi.parameters import Scale
    >>> KSIVIApproximator(scale=Scale(floor=0.01))
    KSIVIApproximator(scale=Scale(floor=0.01))
    """

    _parameter_constraints: ClassVar[Constraints] = {
        "form": [StrOptions({"constant", "network"})],
        "floor": [Interval(Real, 0, None, closed="left")],
    }

    form: str = "constant"
    _: KW_ONLY
    floor: float = 1e-3


@dataclass(eq=False, repr=False)
class Checkpoint(ParameterObject):
    """A file in which a training is saved periodically, and before it, in one beside it, each score.

    Parameters
    ----------
    path : path-like
        The file, for one fit at a time; or an existing folder, in which each fit has its own file, as the fits of a
        search require.
    every : int, default=1000
        Iterations between saves.

    See Also
    --------
    skksivi.save : Writes a fit to a file.

    Examples
    --------
    >>> from skksivi import KSIVIApproximator
    >>> from skksivi.parameters import Checkpoint
    >>> KSIVIApproximator(checkpoint=Checkpoint("fit.ckpt", every=500))
    KSIVIApproximator(checkpoint=Checkpoint(every=500, path='fit.ckpt'))
    """

    _parameter_constraints: ClassVar[Constraints] = {
        "path": [str, os.PathLike],
        "every": [Interval(Integral, 1, None, closed="left")],
    }

    path: str | os.PathLike[str]
    _: KW_ONLY
    every: int = 1000


@dataclass(eq=False, repr=False)
class Bridge(ParameterObject):
    r"""The path of a hierarchy from its base to the target, and the weights of its layers.

    Parameters
    ----------
    levels : {"auto", "linear", "quadratic", "cosine", "geometric", "none"} or callable, default="auto"
        The :math:`\lambda_t` as a function of u = t / T in [0, 1), one at zero: 1 - u, (1 - u)^2, half a cosine,
        100^-u, or one for every layer. "auto" is "none" if the base is the pilot, which is already at the target,
        otherwise "linear".
    weights : array-like of shape (n_layers,), default=None
        The :math:`\beta(t)`, the last layer (t = 0) first; None means equal weights. Each layer has its own network
        and gradient, so that Adam's steps depend on them only through `max_norm`.

    See Also
    --------
    skksivi.HKSIVIApproximator : A hierarchy of layers, for distant modes.
    skksivi.annealing.Linear : A linear schedule, as in the paper.

    Examples
    --------
    >>> from skksivi import HKSIVIApproximator
    >>> from skksivi.parameters import Bridge
    >>> HKSIVIApproximator(bridge=Bridge("linear", weights=[1, 1, 0.5, 0.5, 0.5]))
    HKSIVIApproximator(bridge=Bridge(levels='linear',
                                     weights=[1, 1, 0.5, 0.5, 0.5]))
    """

    _parameter_constraints: ClassVar[Constraints] = {
        "levels": [StrOptions(set(BRIDGES)), callable],
        "weights": ["array-like", None],
    }

    levels: str | Callable[[float], float] = "auto"
    _: KW_ONLY
    weights: Sequence[float] | None = None


#: The types of parameters that several estimators have.
Whiten = str | Pilot | tuple[ArrayLike, ArrayLike] | None
Init = ArrayLike | None
Schedule = float | Callable[[float], float]
Annealing = str | Callable[[float], float] | None


def chains_of(whiten: Whiten) -> Pilot | None:
    """Return the chains that a parameter `whiten` asks for, None if for none."""
    if isinstance(whiten, str):
        return Pilot(whiten) if whiten in ("auto", "diagonal") else None
    return whiten if isinstance(whiten, Pilot) else None


def expanded(name: str, value: object) -> ParameterObject | None:
    """Return the object that a value of a parameter abbreviates, None if it abbreviates none."""
    if name == "whiten" and isinstance(value, str):
        return chains_of(value)
    if name == "checkpoint" and isinstance(value, str | os.PathLike):
        return Checkpoint(value)
    if name == "scale" and isinstance(value, str):
        return Scale(value)
    if name == "hidden_layer_sizes" and not hasattr(value, "get_params"):
        return Network(value)
    if name == "bridge" and (isinstance(value, str) or callable(value)):
        return Bridge(value)
    return None


def check_widths(widths: Any, name: str) -> tuple[int, ...]:  # noqa: ANN401
    """Return widths of layers, where a number is the width of one; raise ValueError unless they are valid."""
    widths = (widths,) if isinstance(widths, Integral) else tuple(widths)
    if not all(isinstance(n, Integral) and is_number(n) and int(n) >= 1 for n in widths):
        raise ValueError(f"`{name}` must hold positive integers, got {shown(widths)}.")
    return tuple(map(int, widths))


P = TypeVar("P", bound=ParameterObject)


def checked_object(cls: type[P], value: object) -> P:
    """Return the object of a class that a parameter is or abbreviates, checked."""
    found = value if isinstance(value, cls) else cls(value)
    found.check()
    return found
