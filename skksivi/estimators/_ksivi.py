"""Kernel semi-implicit variational inference, the paper's Algorithms 1 and 2."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from skksivi._utils.checks import warn_caller
from skksivi.base import Constraints, HasMethods, Integral, Interval, StrOptions
from skksivi.coordinates._whitening import Whitening
from skksivi.estimators._ksd import SteinTrained, objective_of
from skksivi.estimators._start import Start, check_points, weight_of_pilot
from skksivi.estimators._trained import temperature
from skksivi.families import Layer, SemiImplicit, covariance_kept, gaussian_layer
from skksivi.mixing import Bootstrap, Mixing, build_mixing
from skksivi.parameters import WIDTHS, Adam, Annealing, Network, Scale, checked_object
from skksivi.pilot._points import PilotPoints
from skksivi.score._domain import tail_exponent
from skksivi.score._score import DifferentiableScore, Score, Tempered, WithoutProducts
from skksivi.start._find import MAX_POINTS
from skksivi.terms import Term, WeightedTerm
from skksivi.training._guard import MomentPenalty, Steering, moments
from skksivi.training._loop import Objective, Scheduled


@dataclass(kw_only=True, eq=False, repr=False)
class KSIVIApproximator(SteinTrained[SemiImplicit]):
    r"""Fit a sampler to a posterior known by its score: a Gaussian mixture or, where needed, a trained network.

    The fitted distribution is semi-implicit,

    .. math:: x = \mu(z) + \sigma \odot \xi, \quad z \sim q(z), \quad \xi \sim N(0, I),

    with a network :math:`\mu`. A fit starts at a mixture of Gaussians that a pilot finds by importance sampling or
    chains. Training, see `method`, minimises the squared kernel Stein discrepancy, as the paper does, or descends
    KL(q || p) along a kernelised gradient, which is not the paper's:

    .. math::
        \mathrm{KSD}(q \| p)^2 = E\left[k(x, x') \left\langle s_p(x) - s_{q(\cdot|z)}(x),
        s_p(x') - s_{q(\cdot|z')}(x') \right\rangle\right].

    Examples
    --------
    >>> from skksivi import KSIVIApproximator
    >>> def score_fn(x):  # the gradient of log N(x; (1, 2), I)
    ...     return x.new_tensor([1.0, 2.0]) - x
    >>> q = KSIVIApproximator(method="ksivi", max_iter=500, random_state=0).fit(score_fn, n_features=2)
    >>> q.fitted_by_, q.n_iter_
    ('kernel Stein discrepancy', 500)
    >>> q.sample(10_000).mean(axis=0).round(1)
    array([1., 2.], dtype=float32)

    Without `method` this fit has nothing to learn: its start, found from fewer calls of the score, is exact.

    >>> KSIVIApproximator(random_state=0).fit(score_fn, n_features=2)
    KSIVIApproximator(random_state=0)  # fitted by importance sampling

    Parameters
    ----------
    method : {"auto", "ksivi", "path", "start"}, default="auto"
        How the fit is made. "ksivi": from the start the network is trained by the discrepancy, until no error
        is near its limit, see `early_stopping`. "path": by the kernelised path gradient of KL(q || p), which
        takes one score per draw and no product with its Jacobian, see `skksivi.stein`, and needs a positive
        kernel of Euclidean distances. The trained state is returned or, with a warning, the start, if that
        alone is good or its worst error is smaller beyond the noise. "start": without a training. "auto": the
        start and, if that is not known to be good, see `verdict_`, or there is no pilot, "path"; but "ksivi"
        where a training parameter is set, to whatever value. These are `kernel`, `bandwidth`,
        `gradient_estimator`, `latent_dim`, `hidden_layer_sizes`, `mixing`, `scale`, `initial_scale`,
        `batch_size`, `learning_rate`, `optimizer`, `annealing` and `terms`.
    whiten : {"auto", "bam", "laplace", "diagonal"}, Pilot, (m, L) or None, default="auto"
        The affine map x = m + L u in whose coordinates u the family is trained, found from scores alone. "laplace"
        uses a mode and the curvature there; "bam" then fits a Gaussian by batch and match. "auto" searches for modes
        and uses the mean and covariance of points near the target, by importance sampling or short chains around each
        mode (the pilot). Beyond 1,000 features ("auto" beyond 4,000) all of these use the curvature at the mode, as a
        diagonal and a few directions. "diagonal", for many parameters and for posteriors far from any Gaussian, takes
        one scale per coordinate from long chains that start at each row of `init`. `skksivi.parameters.Pilot` says
        how much "auto" and "diagonal" may spend, and sets the weight of the moment penalty. A pair (m, L) of a vector
        and a lower triangular matrix is used as it is; None trains in x, as in the paper. Up to 200 features and
        without minibatches, a Gaussian is first fitted by batch and match from "laplace", "bam" or a pair, and its
        coordinates replace them if the target has one mode nearby; the mean of the fit is corrected at the end.
    init : array-like of shape (n_features,) or (k, n_features), default=None
        Where the search for modes starts; only whiten="auto" and "diagonal" use more than the first row. None means
        the origin and, with whiten="auto", points scattered around it on scales from 1 to 100. With "diagonal",
        chains start at the rows themselves or, for a single row, around the mode found from it.
    latent_dim : int, default=None
        Dimension of z; None means the dimension of x, but at most 100 with normal mixing.
    hidden_layer_sizes : int, sequence of int, Network or "auto", default="auto"
        Widths of the hidden layers of the network, without input and output; "auto" is (100, 100).
        `skksivi.parameters.Network` also says whether the network is added to a linear map or is the whole mean.
    mixing : {"auto", "normal", "pilot"}, object of `skksivi.mixing` or callable, default="auto"
        The mixing distribution q(z). "normal" is the standard normal. "pilot" is a Gaussian mixture fitted to the
        points near the target that whiten="auto" has found, or, with "diagonal", these points themselves, so that
        training starts from their tails and modes. "auto" is "pilot" if there are such points, `latent_dim` is None
        and the network is added to a linear map, otherwise "normal". `skksivi.mixing.StudentT` gives heavy tails. A
        function of the number of draws n and a torch.Generator must return n rows of `latent_dim` entries.
    scale : {"auto", "constant", "network"} or Scale, default="auto"
        Whether :math:`\sigma` is one vector, as in the paper's experiments and with "auto", or a network of z.
        `skksivi.parameters.Scale` also sets the floor of :math:`\sigma`.
    initial_scale : float or "auto", default="auto"
        Initial :math:`\sigma` (not its logarithm), in whitened units; with several modes, in units of one mode; with
        whiten="diagonal", in units of :math:`1/\sqrt{E s_i^2}`, the conditional width of a coordinate given the
        others. "auto" is 0.8 for the discrepancy, whose gradient has the noise of :math:`\xi / \sigma`, 0.25 along
        the path and with "diagonal".
    kernel : {"auto", "gaussian", "imq", "laplace", "riesz"} or Kernel, default="auto"
        The kernel k, by name or as an object of `skksivi.kernels`; "auto" is "gaussian".
    bandwidth : float, "median", "auto" or None, default="auto"
        Width of the kernel in whitened units. Along the path, if `kernel` is a name, "auto" is 0.35 times the
        root of the summed variances of the draws. Otherwise, and with None, `kernel` sets its own width, by default
        by the median heuristic, as in the paper.
    gradient_estimator : {"auto", "normalized", "u-statistic", "vanilla"}, default="auto"
        How "ksivi" estimates the discrepancy: "u-statistic" with all pairs within one batch (Algorithm 2), "vanilla"
        with the pairs between two batches (Algorithm 1), which takes twice as many draws and score evaluations per
        iteration, "normalized", which is "auto", as the first, with a kernel that gives tails more weight, see
        :doc:`/ksivi`, unless it grows with the distance. With minibatches of the data, all use the pairs between two
        halves of the batch.
    batch_size : int or "auto", default="auto"
        The N of the estimator, at least 2; "auto" is 128 for the discrepancy, and 32 along the path, whose local
        averages are over the draws of the last 20 iterations.
    max_iter : int, default=2000
        Largest number of iterations of the optimiser.
    learning_rate : float or "auto", default="auto"
        Step size of Adam; "auto" is 5e-3.
    optimizer : {"auto", "adam"} or Adam, default="auto"
        Decay of the learning rate, Adam's betas, moving average, clipping and what to do about a loss that is not
        finite, see `skksivi.parameters.Adam`. "auto" and "adam" are Adam(warm_up=200).
    annealing : {"linear"}, callable or None, default=None
        Inverse temperature by which the score is multiplied, as a function of progress in [0, 1];
        "linear" is `skksivi.annealing.Linear()`.
    terms : sequence of Term or None, default=None
        Further terms of the objective, see `skksivi.terms`.
    early_stopping : "auto", bool, float or None, default="auto"
        What ends a training before `max_iter`. "auto": no error is near its limit (see `verdict_`), by a check every
        500 iterations, unless `annealing` or `terms` are set. A number: the discrepancy under one fixed kernel in u
        has not fallen by this share for 2,000 iterations, as many as a default training has; True is 0.01. False and
        None: nothing, and the last state is returned, whatever it is worth.
    certify : bool, default=True
        Whether to spend calls on a verdict. Without, as for a candidate of a search by `Replicates`, `verdict_` is
        what the start has found by itself, None after a training.
    checkpoint : path-like, Checkpoint or None, default=None
        A file in which the training is saved every 1,000 iterations, or as often as `skksivi.parameters.Checkpoint`
        says; what comes before it is in a second file, score by score, if `random_state` is an integer. If either
        exists, from an unfinished fit with the same settings, seed and score, `fit` resumes; on a CPU with the same
        number of threads the result is the same as without interruption. Both are removed when the fit ends. In
        an existing folder each fit has its own.
    warm_start : bool, default=False
        Whether `fit` continues from the family and the whitening of the last fit, regardless of the parameters that
        define them; the optimiser restarts, without the moment penalty of the pilot.
    device : str or torch.device, default="auto"
        Where to compute; "auto" is the device of the target's tensors, or the CPU.
    dtype : {"float32", "float64"}, default="float32"
        Precision of the training and of the draws.
    random_state : int, RandomState or None, default=None
        Seeds initial weights, training draws and samples. Equal integers give equal results.
    verbose : int, default=0
        1 logs a line per stage and every 500 iterations to the logger "skksivi", which writes to the standard error
        unless it has a handler; 2 every 100. In a terminal or a notebook with tqdm, a stage of known length has a
        bar. With 0 there is a line only after five seconds, unless logging is configured or the fit is one of a
        search, a cross-validation or a joblib worker; with -1 none.

    Attributes
    ----------
    sampler_ : Sampler
        The sampler in x: ``sampler_.sample(n, generator)`` and ``sampler_.log_density(x)``, on tensors.
    family_ : Module
        The fitted family, in the whitened coordinates u.
    whitening_ : Whitening
        The map x = m + L u and how it was found: ``m``, ``L``, ``condition``, ``modes``, ``weights``,
        ``n_score_calls``, ``converged``, and the pilot's ``mean``, ``mean_se`` (standard errors) and ``sd``.
    loss_curve_ : ndarray of shape (`n_iter_`,)
        At each iteration an estimate of KSD^2 under the training kernel or, with the path gradient, of the rate at
        which KL(q || p) falls. Both are noise around zero if q = p.
    ksd_curve_ : ndarray of shape (n_looks, 2)
        Pairs of an iteration and the squared discrepancy under one fixed kernel in u after it, every 500 iterations;
        if the fit starts at a pilot, also at the start. Empty without a converged pilot and `early_stopping`.
    fitted_by_ : str
        What made the draws: "path gradient" or "kernel Stein discrepancy" after a training, otherwise what found the
        start, such as "importance sampling" or "short chains".
    best_iter_ : int
        The iteration whose state was kept: zero if the start is returned, because it is better than the trained state
        beyond the noise. If the fit starts at a pilot, the trained state has the smallest fixed-kernel discrepancy
        among those whose moments stayed near the start's; otherwise it is the last.
    weighted_draws_ : WeightedDraws or None
        Draws of the fit and of wider Gaussians with importance weights, on which the verdict rests: 256 or, if the
        target has no `log_prob`, 128 by three or more scores each, and up to 32 times as many where these leave a
        doubt. ``skksivi.summary(q)`` and ``skksivi.evidence(q)`` read them, at no call. None if `mixing` has no
        density, log p is not available that cheaply, or there are more than 1,000 features.
    certificate_ : Certificate or None
        How far the draws are from the target, by these: a tuple ``divergence``, ``se``, ``se_below``, ``k``,
        ``share``, ``trusted``.
    verdict_ : Verdict or None
        How far means, standard deviations and 5% and 95% quantiles may be from the posterior's, by the same draws;
        where their weights are not reliable, by the chains of the pilot, lines along directions and Stein's
        identities. ``good`` if every error plus two standard errors is within 0.2 sd, or 0.2 of the logarithm of an
        sd; ``within`` is the largest, ``reason`` names it, and ``errors`` has them all. It does not know of modes
        that no draw has reached.
    kernel_, gradient_estimator_, mixing_, scale_, optimizer_ : object
        These parameters as the training had them or, without one, as it would have had them: none is "auto". Along
        the path there is no gradient estimator, None.
    batch_size_, learning_rate_, initial_scale_, hidden_layer_sizes_, latent_dim_ : float, int or tuple of int
        The same for these.
    bandwidth_ : float or None
        The width of the kernel at the end of the training, in whitened units; None without one.
    weights_, means_, covariances_ : ndarray of shape (k,), (k, n_features), (k, n_features, n_features)
        The Gaussians of a fit that is a mixture of them in x, as in `sklearn.mixture.GaussianMixture`. There are
        none, as `hasattr` says, if the fit is trained, or in coordinates that are warped to follow curves and tails.
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
    HKSIVIApproximator : A hierarchy of layers, for distant modes.
    diagnose : A report on a fit.
    skksivi.baselines.Laplace : Gaussian at the mode, the quickest thing to try.

    References
    ----------
    Yu, L., Cheng, Z., Zhang, S. and Zhang, C. A kernel approach for semi-implicit variational inference. "The paper"
    throughout.

    Bénard, C., Staber, B. and Da Veiga, S. (2023). Kernel Stein discrepancy thinning: a theoretical perspective of
    pathologies and a practical fix with regularization. https://arxiv.org/abs/2301.13528

    Cheng, Z., Yu, L., Xie, T., Zhang, S. and Zhang, C. (2024). Kernel semi-implicit variational inference.
    https://arxiv.org/abs/2405.18997
    """

    _parameter_constraints: ClassVar[Constraints] = {
        "latent_dim": [Interval(Integral, 1, None, closed="left"), None],
        "hidden_layer_sizes": [StrOptions({"auto"}), *WIDTHS, Network],
        "mixing": [StrOptions({"auto", "normal", "pilot"}), HasMethods("build"), callable],
        "scale": [StrOptions({"auto", "constant", "network"}), Scale],
        "terms": [tuple, list, None],
        "annealing": [StrOptions({"linear"}), callable, None],
    }

    _forms_of_scale: ClassVar[set[str]] = {"constant", "network"}
    _adam: ClassVar[Adam] = Adam(warm_up=200)
    _training: ClassVar[dict[str, object]] = {
        "kernel": "gaussian",
        "bandwidth": "auto",
        "gradient_estimator": "normalized",
        "latent_dim": None,
        "hidden_layer_sizes": (100, 100),
        "mixing": "auto",
        "scale": "constant",
        "initial_scale": "auto",
        "batch_size": "auto",
        "learning_rate": 5e-3,
        "optimizer": "adam",
        "annealing": None,
        "terms": (),
    }

    # `benchmarks/training.py`: local averages are over twenty iterations, a discrepancy over one, whose noise is
    # xi / sigma
    _by_method: ClassVar[dict[str, tuple[float, float]]] = {"initial_scale": (0.25, 0.8), "batch_size": (32, 128)}
    _trains_by: ClassVar[str] = "path"

    latent_dim: int | None = None
    hidden_layer_sizes: str | int | Sequence[int] | Network = "auto"
    annealing: Annealing = None
    terms: Sequence[Term] | None = None

    def _check_parameters(self, n_features: int) -> None:
        super()._check_parameters(n_features)
        needed = "" if self._takes_points() else "latent_dim=None, a Network with linear_skip=True and "
        check_points(self.mixing, self.whiten, self._n_latent(n_features), n_features, needed)
        if self.annealing is not None:
            temperature(self.annealing, torch.zeros(())).check()
        for term in self.terms or ():
            if not (isinstance(term, Term) and hasattr(term, "weight")):
                raise TypeError(f"`terms` must hold objects of skksivi.terms, each with a `weight`, got {term!r}.")
            _weight_of(term, torch.zeros(())).check()

    def _check_target(self, score_fn: Score) -> None:
        if self.annealing is not None:
            warn_of_improper(self.annealing, score_fn)

    def _sampler_of(self, score: Score, start: Start[SemiImplicit]) -> Callable[[SemiImplicit], Layer]:
        return lambda family: Layer(family, start.whitening, start.seed)

    def _guards(self, start: Start[SemiImplicit]) -> bool:
        return self._is_at_pilot(start) and not start.whitening.is_rough

    def _objective(
        self,
        score_u: DifferentiableScore,
        family: SemiImplicit,
        start: Start[SemiImplicit],
        generator: torch.Generator,
    ) -> Objective:
        """Return the discrepancy and the further terms."""
        like = next(family.parameters())
        terms: list[Steering] = [] if start.penalty is None else [start.penalty]
        schedules = []
        tempered: DifferentiableScore = score_u
        tempers = None
        if self.annealing is not None:
            tempers = temperature(self.annealing, like)
            tempered = Tempered(score_u, tempers.value)
            schedules.append(tempers)
        for term in self.terms or ():
            weight = _weight_of(term, like)
            terms.append(WeightedTerm(term, weight, None if tempers is None else tempers.value))
            schedules.append(weight)
        if start.memory is not None:
            tempered = WithoutProducts(tempered)
        estimate = self._estimate(tempered, family.n_features, start.memory)
        return objective_of(estimate, tempered, family, generator, terms=terms, schedules=schedules)

    def _family(
        self, score_y: Score, whitening: Whitening, pilot: PilotPoints | None, generator: torch.Generator
    ) -> tuple[SemiImplicit, MomentPenalty | None]:
        d = score_y.n_features
        sigma = torch.full((d,), float(self.initial_scale), dtype=score_y.dtype, device=score_y.device)
        if pilot is not None and self._takes_points():
            return self._family_at(pilot, whitening, score_y, generator)
        mixing = build_mixing(self.mixing, self._n_latent(d)).to(score_y.device)
        skips = self._network().linear_skip
        if skips and self.whiten is not None:  # directions that z does not reach also start at N(0, 1)
            sigma[mixing.latent_dim :] = 1.0
        skip = covariance_kept(sigma, mixing.latent_dim) if skips else None
        return self._layers(generator)(sigma, mixing=mixing, skip=skip), None

    def _family_at(
        self, pilot: PilotPoints, whitening: Whitening, score_y: Score, generator: torch.Generator
    ) -> tuple[SemiImplicit, MomentPenalty | None]:
        """Return a new family that starts at the points of a pilot, and the penalty that ties it to them.

        With mass between the points it starts as a Gaussian mixture: z has the part of the covariances that sigma has
        not.
        """
        points, least = pilot.whitened(whitening.map, score_y.dtype), 2 * self._floor()
        if pilot.dense:
            mixture = pilot.mixture_in(whitening.map, generator)
            sigma = (float(self.initial_scale) * mixture.common_variances().sqrt()).clamp_min(least).to(points.x)
            mixing: Mixing = mixture.draws(score_y.dtype, noise=sigma.square())
            family = self._layers(generator)(sigma, mixing=mixing, skip=torch.eye(len(sigma)))
        else:
            unit = pilot.conditional_sd(score_y.double, whitening.map)
            sigma = (self._scale_at_points() * unit).clamp_min(least).to(points.x)
            mixing = Bootstrap(points.thinned(MAX_POINTS // points.x.shape[1]).x)
            family = self._layers(generator)(sigma, mixing=mixing, residual=True)
        weight = weight_of_pilot(self.whiten, pilot)
        return family, MomentPenalty(moments(points.x), weight) if weight else None

    def _scale_at_points(self) -> float:
        """Return the initial scale around points, whose spread it adds to."""
        return (
            float(self.initial_scale)
            if "initial_scale" in self._is_set
            else float(self._by_method["initial_scale"][0])
        )

    def _layers(self, generator: torch.Generator) -> Callable[..., SemiImplicit]:
        """Return `gaussian_layer` with the widths and the form that the parameters specify."""
        scale, widths = checked_object(Scale, self.scale), self._widths()
        return partial(gaussian_layer, scale=scale, hidden_layer_sizes=widths, generator=generator)

    def _warps(self, score_fn: Score) -> bool:
        """Tell whether a new fit may be in warped coordinates: from points of chains, if no parameter forbids it."""
        return self._takes_points() and self._is_plain() and score_fn.minibatch is None

    def _is_plain(self) -> bool:
        return self.annealing is None and not self.terms

    def _takes_points(self) -> bool:
        return super()._takes_points() and self.latent_dim is None and self._network().linear_skip


def _weight_of(term: Term, like: Tensor) -> Scheduled:
    """Return the weight of a term as a schedule over the training."""
    return Scheduled(f"weight of {type(term).__name__}", term.weight, like)


def warn_of_improper(annealing: Annealing, score_fn: Score) -> None:
    """Warn if the tails of the target fall as powers so slowly that tempering makes them improper."""
    tempers, d = temperature(annealing, torch.zeros(())), score_fn.n_features
    exponent, coldest = tail_exponent(score_fn.double, d), math.inf
    for i in range(51):
        tempers.advance(i / 50)
        coldest = min(coldest, tempers.value.item())
    if exponent is not None and coldest * exponent <= d:
        warn_caller(
            f"`annealing` starts at the inverse temperature {coldest:.3g}, but the tails of the target fall as "
            f"|x|^-{exponent:.3g} in {d} dimensions, so the tempered target has infinite mass below "
            f"{d / exponent:.3g}, and draws diverge. Start above that, or do not anneal."
        )
