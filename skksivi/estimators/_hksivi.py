"""Hierarchical kernel semi-implicit variational inference, the paper's multi-layer extension."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted

from skksivi._utils.checks import check_integer, shown
from skksivi.annealing import bridge_levels
from skksivi.base import Constraints, HasMethods, Integral, Interval, Real, StrOptions
from skksivi.coordinates._whitening import Whitening
from skksivi.estimators._ksd import SteinTrained, objective_of
from skksivi.estimators._start import Start, check_points, weight_of_pilot
from skksivi.estimators._trained import langevin_scale
from skksivi.families import Hierarchy, Layers
from skksivi.mixing import Bootstrap, build_mixing
from skksivi.parameters import BRIDGES, Bridge, Scale, checked_object
from skksivi.pilot._points import PilotPoints
from skksivi.score._score import DifferentiableScore, Score, WithoutProducts
from skksivi.start._find import MAX_POINTS
from skksivi.training._guard import MomentPenalty, Moments, moments
from skksivi.training._loop import Objective
from skksivi.training._run import Fit


@dataclass(kw_only=True, eq=False, repr=False)
class HKSIVIApproximator(SteinTrained[Hierarchy]):
    r"""Fit a hierarchy of Gaussian layers to a posterior known by its score.

    From a base :math:`x_T \sim q_T` the layers t = T-1, ..., 0 draw

    .. math::
        x_t = \mu_t(x_{t+1}) + \sigma_t \odot \xi_t, \qquad
        \mu_t(x) = x + \bar\mu_t(x) + \tfrac12 \sigma_{\mathrm{ini}}^2 \odot s_t(x),

    with networks :math:`\bar\mu_t` that start at zero, so that training starts at a Langevin chain along the bridge
    :math:`s_t = (1 - \lambda_t) s_{\mathrm{base}} + \lambda_t s_p`. Each layer is trained by its own term of Eq. (36)
    of the paper (Cheng et al., 2024),

    .. math:: \sum_t \beta(t)\, \mathrm{KSD}(q_t \| p_t)^2, \quad \nabla \log p_t = s_t.

    It keeps distant modes and long tails that one layer loses. Draws of the last layer are the draws of the fit.
    Because the score is part of the sampler, `sample` calls it; a fitted estimator can be pickled if the score can,
    and files of `skksivi.save` are loaded with ``load(path, score_fn=...)``.

    Parameters
    ----------
    method : {"auto", "ksivi", "path", "start"}, default="auto"
        How the fit is made. "ksivi": the layers are trained by the discrepancies. "path": by the kernelised path
        gradient of :math:`\mathrm{KL}(q_t \| p_t)`, by a positive kernel of Euclidean distances, without a product
        with the Jacobian. The trained state is returned or, with a warning, the start, if that alone is good or its
        worst error is smaller beyond the noise. "start": without a training. "auto" is "ksivi", or "start" where no
        training parameter is set and weighted draws tell that the start is good: untrained layers move the points of
        the pilot, and weights are mostly too expensive before a training.
    whiten : {"auto", "bam", "laplace", "diagonal"}, Pilot, (m, L) or None, default="auto"
        The affine map x = m + L u in whose coordinates u the layers are trained. "auto" searches for modes and takes
        the mean and covariance of points near the target, the pilot, which is then the base; "laplace" uses a mode
        and the curvature there, "bam" a Gaussian fitted to the scores, and "diagonal" one scale per coordinate, from
        long chains. A pair of a vector and a lower triangular matrix is used as it is; None trains in x, as in the
        paper; other coordinates without a pilot are first moved to the target, as by `KSIVIApproximator`.
        `skksivi.parameters.Pilot` says how much "auto" and "diagonal" may spend. If all layers should be at
        the target, the moment penalty applies to each of them.
    init : array-like of shape (n_features,) or (k, n_features), default=None
        Where the search for modes starts. None means the origin and, with whiten="auto", points scattered around it
        on scales from 1 to 100. "laplace" and "bam" use only the first row.
    n_layers : int or "auto", default="auto"
        The T of the formula; "auto" is 5.
    bridge : {"auto", "linear", "quadratic", "cosine", "geometric", "none"}, callable or Bridge, default="auto"
        The :math:`\lambda_t` as a function of u = t / T in [0, 1), one at zero: 1 - u, (1 - u)^2, half a cosine,
        100^-u, or one for every layer. "auto" is "none" if the base is the pilot, which is already at the target,
        otherwise "linear". `skksivi.parameters.Bridge` also sets the weights :math:`\beta(t)` of the layers.
    hidden_layer_sizes : int, sequence of int or "auto", default="auto"
        Widths of the hidden layers of each network, without input and output; "auto" is (50, 50).
    mixing : {"auto", "normal", "pilot"}, object of `skksivi.mixing` or callable, default="auto"
        The base :math:`q_T` in whitened coordinates u. "normal" is the standard normal. "pilot" is a Gaussian mixture
        fitted to the points of the pilot or, with whiten="diagonal", these points themselves. "auto" is "pilot" if
        there are such points, otherwise "normal". It can also be a distribution of `skksivi.mixing`, or a function of
        the number of draws n and a torch.Generator that returns n rows. The bridge starts at the score of the base if
        it has one (normal, Student t), otherwise at the score of N(0, I).
    scale : {"auto", "constant"} or Scale, default="auto"
        Each :math:`\sigma_t` is one vector; `skksivi.parameters.Scale` sets its floor.
    initial_scale : float or "auto", default="auto"
        The :math:`\sigma_{\mathrm{ini}}`, half of whose square is the step of the Langevin drift. With a pilot its
        unit is the width of the target's narrowest mode or, if less, the conditional width of a coordinate given the
        others, :math:`1/\sqrt{E s_i^2}`; otherwise it is one in u. "auto" is 0.5 if the base is the pilot, which is
        close to the target, otherwise 1.
    kernel : {"auto", "gaussian", "imq", "laplace", "riesz"} or Kernel, default="auto"
        The kernel k, by name or as an object of `skksivi.kernels`; its median width is set layer by layer.
    bandwidth : float, "median", "auto" or None, default="auto"
        Width of the kernel in whitened units: a number, or the median heuristic on the draws of each layer. None and
        "auto" leave it to `kernel`, whose own rule is by default the median heuristic, or along the path to
        the variances of the draws, see `KSIVIApproximator`.
    gradient_estimator : {"auto", "normalized", "u-statistic", "vanilla"}, default="auto"
        "u-statistic", which is "auto": all pairs within one batch of each layer (Algorithm 2). "vanilla": pairs
        between two batches (Algorithm 1), with twice as many draws and scores. "normalized": as the first, with a
        kernel that gives tails more weight, see :doc:`/ksivi`.
    batch_size : int or "auto", default="auto"
        Draws of each layer per iteration, at least 2; "auto" is 256. Minibatches of data are not used: the chain
        needs the score of all of the data.
    max_iter : int, default=3000
        Largest number of iterations of the optimiser.
    learning_rate : float or "auto", default="auto"
        Step size of Adam; "auto" is 1e-3.
    optimizer : {"auto", "adam"} or Adam, default="auto"
        Decay of the learning rate, Adam's betas, moving average, clipping and what to do about a loss that is not
        finite, see `skksivi.parameters.Adam`.
    early_stopping : "auto", bool, float or None, default="auto"
        What ends a training before `max_iter`. A number: the discrepancy of the last layer under one fixed kernel in
        u has not fallen by this share for 2,000 iterations; True is 0.01. "auto": nothing. False and None: nothing,
        and the last state is returned, whatever it is worth.
    certify : bool, default=True
        Whether to spend calls on a verdict. Without, as for a candidate of a search by `Replicates`, `verdict_` is
        what the start has found by itself, None after a training.
    checkpoint : path-like, Checkpoint or None, default=None
        A file in which the fit is saved every 1,000 iterations, or as often as `skksivi.parameters.Checkpoint` says.
        After an interruption the same call of `fit` resumes from it, on a CPU with the same result; it is removed
        when the fit ends.
    warm_start : bool, default=False
        Whether `fit` continues from the layers and the whitening of the last fit; the optimiser restarts.
    device : str or torch.device, default="auto"
        Where to compute; "auto" is the device of the target's tensors, or the CPU.
    dtype : {"float32", "float64"}, default="float32"
        Precision of the training and of the draws.
    random_state : int, RandomState or None, default=None
        Seeds initial weights, training draws and samples. Equal integers give equal results.
    verbose : int, default=0
        1 logs a line per stage and every 500 iterations to the logger "skksivi", 2 every 100; -1 nothing, not even
        that a fit takes more than five seconds. See `KSIVIApproximator`.

    Attributes
    ----------
    sampler_ : Sampler
        The sampler in x: ``sampler_.sample(n, generator)`` and ``sampler_.log_density(x)``, on tensors.
    family_ : Module
        The fitted layers, in the whitened coordinates u.
    whitening_ : Whitening
        The map x = m + L u and how it was found, see `KSIVIApproximator`.
    loss_curve_ : ndarray of shape (`n_iter_`,)
        The weighted sum of the estimates of KSD^2 at each iteration.
    ksd_curve_ : ndarray of shape (n_looks, 2)
        Pairs of an iteration and the squared discrepancy of the last layer under one fixed kernel after it, every 500
        iterations; empty without `early_stopping` if there is no moment penalty.
    best_iter_ : int
        The iteration whose state was kept: zero if the start is returned.
    fitted_by_ : str
        What made the draws: "kernel Stein discrepancy" or "path gradient" after a training, otherwise what found the
        start, such as "importance sampling".
    weighted_draws_ : WeightedDraws or None
        Draws with importance weights, see `KSIVIApproximator`. The density takes 20,000 further values of the score
        per layer, so that there are none if the training took fewer than a million.
    certificate_ : Certificate or None
        How far the draws are from the target, by these.
    verdict_ : Verdict or None
        How far means, standard deviations and quantiles may be from the posterior's, see `KSIVIApproximator`; without
        a certificate by Stein's identities.
    kernel_, gradient_estimator_, mixing_, scale_, optimizer_ : object
        These parameters as the training had them or, without one, as it would have had them: none is "auto".
    batch_size_, learning_rate_, initial_scale_, hidden_layer_sizes_, n_layers_ : float, int or tuple of int
        The same for these.
    bridge_ : tuple of float
        The :math:`\lambda_t` of the layers, t = 0 first.
    bandwidth_ : float, ndarray of shape (`n_layers_`,) or None
        The width of the kernel, in whitened units: `bandwidth` if that is a number or, with the path gradient, of
        each layer at the end of the training; otherwise None.
    engine_ : {"eager", "cuda graph"}
        Whether training steps ran operation by operation, or on a GPU as one recorded graph.
    score_checksum_ : str
        Checksum of values of the score near the fit, by which a warm start detects a changed target.
    n_iter_ : int
        Number of iterations, zero without training.
    n_features_in_ : int
        Dimension d of the target.
    feature_names_in_ : ndarray of shape (n_features,)
        Names of the coordinates; only of a target with `names`.
    supports_ : dict
        Where the parameters live; only of a target of `skksivi.targets.constrained`, which takes it again.
    n_score_calls_, n_products_ : int
        Points at which `fit` evaluated the score or log p, and products with the Jacobian of the score.
    stages_ : list of Stage
        The cost of each stage of `fit`: ``name``, ``n_calls`` (scores and products) and ``seconds``.

    See Also
    --------
    KSIVIApproximator : One semi-implicit layer, the first choice.
    skksivi.baselines.HSIVISM : A hierarchy by score matching.
    diagnose : A report on a fit.

    References
    ----------
    Cheng, Z., Yu, L., Xie, T., Zhang, S. and Zhang, C. (2024). Kernel semi-implicit variational inference.
    https://arxiv.org/abs/2405.18997

    Yu, L., Cheng, Z., Zhang, S. and Zhang, C. A kernel approach for semi-implicit variational inference, section on
    hierarchical KSIVI.

    Yu, L., Xie, T., Zhu, Y., Yang, T., Zhang, X. and Zhang, C. (2023). Hierarchical semi-implicit variational
    inference with application to diffusion model acceleration. https://arxiv.org/abs/2310.17153

    Examples
    --------
    >>> from skksivi import HKSIVIApproximator
    >>> from skksivi.targets import EightGaussians
    >>> q = HKSIVIApproximator(n_layers=3, max_iter=200, random_state=0).fit(EightGaussians())
    >>> q.sample(4).shape, q.sample(4, layer=2).shape
    ((4, 2), (4, 2))
    """

    _parameter_constraints: ClassVar[Constraints] = {
        "n_layers": [StrOptions({"auto"}), Interval(Integral, 1, None, closed="left")],
        "bridge": [StrOptions(set(BRIDGES)), callable, Bridge],
        "scale": [StrOptions({"auto", "constant"}), Scale],
        "mixing": [StrOptions({"auto", "normal", "pilot"}), HasMethods("build"), callable],
    }

    _takes_minibatches: ClassVar[bool] = False
    _training: ClassVar[dict[str, object]] = {
        "n_layers": 5,
        "bridge": "auto",
        "mixing": "auto",
        "kernel": "gaussian",
        "bandwidth": "auto",
        "gradient_estimator": "u-statistic",
        "hidden_layer_sizes": (50, 50),
        "initial_scale": "auto",
        "scale": "constant",
        "batch_size": 256,
        "learning_rate": 1e-3,
        "optimizer": "adam",
    }

    n_layers: str | int = "auto"
    bridge: str | Callable[[float], float] | Bridge = "auto"
    max_iter: int = 3000

    def sample(
        self, n_samples: int = 1, random_state: int | np.random.RandomState | None = None, *, layer: int = 0
    ) -> np.ndarray:
        """Draw independent samples of the fitted distribution, or of a layer on the way to it.

        Parameters
        ----------
        n_samples : int, default=1
            How many, zero allowed.
        random_state : int, RandomState or None, default=None
            Makes the call repeatable; None continues the estimator's own stream.
        layer : int, default=0
            The index t of the layer: 0 is the fit, `n_layers` the base.

        Returns
        -------
        X : ndarray of shape (n_samples, n_features)
            Of type `dtype`.

        Raises
        ------
        NotFittedError
            Before `fit`.
        TypeError, ValueError
            `n_samples` or `layer` is not an integer, or out of its range.
        """
        check_is_fitted(self)
        check_integer(layer, "layer", min_val=0, max_val=self.family_.n_layers)
        if layer == 0:
            return super().sample(n_samples, random_state)
        return self._sample(n_samples, random_state, layer=layer)

    def _check_parameters(self, n_features: int) -> None:
        super()._check_parameters(n_features)
        check_points(self.mixing, self.whiten, n_features, n_features)
        levels = checked_object(Bridge, self.bridge).levels
        if not (isinstance(levels, str) and levels == "auto"):
            bridge_levels(levels, int(self.n_layers))
        self._layer_weights(int(self.n_layers))

    def _sampler_of(self, score: Score, start: Start[Hierarchy]) -> Callable[[Hierarchy], Layers]:
        return lambda family: Layers(family, start.whitening, score.double, start.seed)

    def _guards(self, start: Start[Hierarchy]) -> bool:
        return start.penalty is not None

    def _objective(
        self, score_u: DifferentiableScore, family: Hierarchy, start: Start[Hierarchy], generator: torch.Generator
    ) -> Objective:
        """Return the weighted sum of the discrepancies over the layers."""
        terms = [] if start.penalty is None else [start.penalty]
        weights = self._layer_weights(family.n_layers)
        if start.memory is not None:
            score_u = WithoutProducts(score_u)
        estimate = self._estimate(score_u, family.n_features, start.memory)
        return objective_of(estimate, score_u, family, generator, terms=terms, weights=weights)

    def _layer_weights(self, T: int) -> list[float]:
        """Return the beta(t) of T layers, checked."""
        beta = checked_object(Bridge, self.bridge).weights
        weights = [1.0] * T if beta is None else list(beta)
        numbers = all(isinstance(b, Real | np.number) and 0 <= float(b) < math.inf for b in weights)
        if len(weights) != T or not numbers or not any(weights):
            raise ValueError(
                f"`weights` of the bridge must be {T} numbers of zero or more, one per layer, not all zero, got "
                f"{shown(weights)}."
            )
        return [float(b) for b in weights]

    def _first_scale(self, at_target: bool) -> float:
        own = self.initial_scale
        return float(own) if not isinstance(own, str) else 0.5 if at_target else 1.0

    def _made_with(self, fit: Fit) -> dict[str, object]:
        found = super()._made_with(fit)
        scale = self._first_scale(found["mixing_"] == "pilot")
        return found | {"initial_scale_": scale, "bridge_": tuple(cast("Layers", fit.sampler).family.levels)}

    def _family(
        self, score_y: Score, whitening: Whitening, pilot: PilotPoints | None, generator: torch.Generator
    ) -> tuple[Hierarchy, MomentPenalty | None]:
        """Return new layers and, if all of them must stay at the target, the penalty that ties them to the pilot."""
        d, penalty = score_y.n_features, None
        at_target = pilot is not None and self._takes_points()
        sigma = langevin_scale(self._first_scale(at_target), self._floor(), score_y, whitening, pilot)
        mixing = build_mixing(self.mixing, d).to(score_y.device)
        bridge = checked_object(Bridge, self.bridge).levels
        if isinstance(bridge, str) and bridge == "auto":
            bridge = "none" if at_target else "linear"
        levels = bridge_levels(bridge, int(self.n_layers))
        if pilot is not None and at_target:
            points = pilot.whitened(whitening.map, score_y.dtype)
            if pilot.dense:
                mixing = pilot.mixture_in(whitening.map, generator).draws(score_y.dtype)
            else:
                mixing = Bootstrap(points.thinned(MAX_POINTS // d).x)
            weight = weight_of_pilot(self.whiten, pilot)
            if weight and min(levels) == 1:
                target = (a.expand(len(levels), *a.shape) for a in moments(points.x))
                penalty = MomentPenalty(Moments(*target), weight)
        family = Hierarchy.langevin(
            levels,
            mixing=mixing,
            hidden_layer_sizes=self._widths(),
            initial_scale=sigma,
            min_scale=self._floor(),
            generator=generator,
        )
        return family, penalty
