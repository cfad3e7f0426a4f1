"""Kernel semi-implicit variational inference, the paper's Algorithms 1 and 2."""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor, nn

from skksivi._affine import WhitenedScore
from skksivi._checkpoint import Checkpoint
from skksivi._families import Bootstrap, Mixing, Normal, SemiImplicit, gaussian_layer
from skksivi._fused import value_and_gradients
from skksivi._moments import Departure, MomentPenalty, departure, moments, stein_variances
from skksivi._pilot import Pilot
from skksivi._score import PRODUCTS, Halves, Score
from skksivi._stein import GRADIENT_ESTIMATORS
from skksivi._training import Watch, minimise
from skksivi._whitening import MAX_FEATURES, MAX_POINTS, WHITENINGS, Whitening, find_whitening, pulled_back
from skksivi.annealing import Linear
from skksivi.base import CHUNK, BaseApproximator, Integral, Interval, Real, StrOptions
from skksivi.kernels import Kernel, resolve_kernel
from skksivi.metrics import Judge

#: Largest latent dimension chosen by default.
MAX_LATENT_DIM = 100

#: Mixing draws behind `score_samples`.
N_MIXING_DRAWS = 10_000

#: Draws whose moments are compared with the start's, and those of them whose discrepancy is computed.
N_MONITOR_DRAWS, N_JUDGED_DRAWS = 4000, 1000

#: What may end a training that leaves the estimator fitted, in the state that was reached.
KEEPING = (KeyboardInterrupt, FloatingPointError)

#: Bounds of the variances of the draws by Stein's identity, one if they are right, beyond which a fit has failed.
STEIN_VARIANCES = (0.25, 4.0)

#: Iterations between two comparisons.
LOOK_EVERY = 500

#: Width of a kernel in whitened coordinates, in units of the square root of the dimension.
WHITENED_BANDWIDTH = 0.5


class Start(NamedTuple):
    """Where a training starts: coordinates, a family in them, what ties it to a pilot, and the seed of its noise."""

    whitening: Whitening
    family: SemiImplicit
    penalty: MomentPenalty | None
    seed: int


class KSIVIApproximator(BaseApproximator):
    r"""Fit a sampler to a posterior known by its score, by kernel semi-implicit variational inference.

    The fitted distribution is semi-implicit,

    .. math:: x = \mu(z) + \sigma \odot \xi, \quad z \sim q(z), \quad \xi \sim N(0, I),

    with a network :math:`\mu`, trained to minimise the squared kernel Stein discrepancy

    .. math::
        \mathrm{KSD}(q \| p)^2 = E\left[k(x, x') \left\langle s_p(x) - s_{q(\cdot|z)}(x),
        s_p(x') - s_{q(\cdot|z')}(x') \right\rangle\right].

    Parameters
    ----------
    kernel : {"gaussian", "imq", "laplace", "riesz"} or Kernel, default="gaussian"
        The kernel k, by name or as an object of `skksivi.kernels`.
    bandwidth : float, "median", "auto" or None, default="auto"
        Width of the kernel in whitened units. "auto" is :math:`\sqrt{d} / 2` where `kernel` is a name and coordinates
        are whitened; else, and with None, it is left to `kernel`, whose default is the median heuristic.
    gradient_estimator : {"u-statistic", "vanilla"}, default="u-statistic"
        All pairs within one batch (Algorithm 2), or between two batches (Algorithm 1), which takes twice as many
        draws and score evaluations an iteration. Where the target draws minibatches of its data, all pairs between
        two halves of the batch in the place of the former.
    latent_dim : int, default=None
        Dimension of z; None means that of x, with normal mixing up to 100.
    hidden_layer_sizes : sequence of int, default=(100, 100)
        Widths of the hidden layers of the network, without input and output.
    mixing : {"auto", "normal", "pilot"}, default="auto"
        The mixing distribution q(z): the standard normal, or a smoothed bootstrap of the points that whiten="auto"
        has left near the target, so that training starts from their tails and modes. "auto" takes the latter where
        there are such points, `latent_dim` is None and `linear_skip` is set.
    linear_skip : bool, default=True
        Whether :math:`\mu(z) = A z + \mathrm{NN}(z)` with a network that starts at zero, so that training starts at
        the pilot's points or at N(0, I) in u. Without it the network starts at random.
    scale : {"constant", "network"}, default="constant"
        Whether :math:`\sigma` is one vector, as in the paper's experiments, or a network of z.
    initial_scale : float, default=0.25
        Start of :math:`\sigma` (not of its logarithm), in whitened units; of several modes, in units of one mode.
    min_scale : float, default=1e-3
        Floor of :math:`\sigma`, in whitened units: :math:`\sigma^2 = e^a + \text{min\_scale}^2`.
    whiten : {"auto", "bam", "laplace"}, (m, L) or None, default="auto"
        The affine map x = m + L u in whose coordinates u the family is trained, found from scores alone. "laplace"
        takes the mode above the origin and the curvature there; "bam" goes on from it with a Gaussian fitted by
        batch and match; "auto" searches for modes, runs short Langevin chains around each (the pilot) and takes
        their mean and covariance. A pair of a vector and a lower triangular matrix is used as it is; None trains in
        x, as in the paper. Beyond 1,000 features all three names mean the curvature at the mode as a diagonal and a
        few directions.
    init : array-like of shape (n_features,) or (k, n_features), default=None
        Where the search for modes starts; of several rows only whiten="auto" takes more than the first. None means
        the origin and, with whiten="auto", points scattered around it on scales from 1 to 100.
    whiten_budget : int, default=400_000
        Points at which whiten="auto" is to evaluate the score, about; it sets the number of chains, of which there
        are 128 at least. Chains that do not settle, or mix slowly, take up to three times as many.
    pilot_weight : float, default=1.0
        Weight of the penalty that holds the first three moments of the draws to the pilot's, which the discrepancy
        hardly sees in the tails; zero for none.
    batch_size : int, default=128
        The N of the estimator, at least 2.
    max_iter : int, default=2000
        Iterations of the optimiser.
    learning_rate : float, default=2e-3
        Step size of Adam.
    learning_rate_decay : (factor, every), "cosine" or None, default="cosine"
        Multiply the rate by `factor` after each `every` iterations, or lower it to zero along a cosine.
    betas : (float, float), default=(0.9, 0.99)
        Adam's decay rates of the first and second moment.
    annealing : {"linear"}, callable or None, default=None
        Inverse temperature by which the score is multiplied, as a function of progress in [0, 1];
        "linear" is `skksivi.annealing.Linear()`.
    ema_decay : float or None, default=0.999
        The fitted parameters are an exponential moving average with this decay, or over a tenth of the iterations so
        far where that is less; None takes the last ones.
    max_grad_norm : float or None, default=None
        Clip the gradient to this Euclidean norm.
    tol : float or None, default=None
        Stop when the discrepancy under one fixed kernel in u has not fallen by this share for `n_iter_no_change`
        iterations. None runs all `max_iter` iterations.
    n_iter_no_change : int, default=2000
        Patience of early stopping, in iterations.
    hvp : {"auto", "autograd", "finite-difference"}, default="auto"
        How the products of the score's Jacobian with vectors are formed, of which the gradient is made. "autograd"
        differentiates the score and refuses one of which that is wrong; "finite-difference" takes central
        differences of the score along the vector, two more evaluations, which supposes that it is a gradient; "auto"
        takes the target's own `score_vjp`, else the former where it agrees with the latter at a few points.
    nonfinite : {"raise", "skip"}, default="raise"
        What to do about an iteration whose loss or gradient is NaN or infinite; its step is never taken. "raise" ends
        the fit with an error; "skip" goes on and tells how many there were, unless a hundred follow each other.
    checkpoint : path-like or None, default=None
        A file in which the fit is saved now and then. If `fit` finds one there, of a fit with the same settings and
        score that did not end, it goes on from it; on a CPU with the same number of threads the result is that of a
        fit that was never interrupted. It is removed when the fit ends.
    checkpoint_every : int, default=1000
        Iterations from one save to the next.
    warm_start : bool, default=False
        Whether `fit` continues from the family and the whitening of the last fit, whatever the parameters of their
        construction say now; the optimiser starts anew, and without the penalty of `pilot_weight`.
    device : str or torch.device, default="auto"
        Where to compute; "auto" takes a GPU where there is one.
    dtype : {"float32", "float64"}, default="float32"
        Precision of the training and of the draws.
    random_state : int, RandomState or None, default=None
        Seeds initial weights, training draws and samples. Equal integers give equal results.

    Attributes
    ----------
    family_ : Module
        The fitted family, in the whitened coordinates u.
    whitening_ : Whitening
        The map x = m + L u and how it was found: `m`, `L`, `condition`, `modes`, `weights`, `n_score_calls`,
        `settled`, and the pilot's `mean`, `mean_se` (standard errors) and `sd`.
    loss_curve_ : ndarray of shape (`n_iter_`,)
        The estimate of KSD^2 at each iteration, under the training kernel.
    ksd_curve_ : ndarray
        The squared discrepancy under one fixed kernel in u, each 500 iterations; of a fit that starts at a pilot the
        start too. Empty without a pilot and `tol`.
    best_iter_ : int
        The iteration whose state was kept: of a fit that starts at a pilot that with the smallest fixed-kernel
        discrepancy of those whose moments stayed near the start's, zero if training has not improved on the start;
        else the last.
    engine_ : {"eager", "cuda graph"}
        Whether training steps ran operation by operation, or on a GPU as one recorded graph.
    n_iter_ : int
        Iterations done.
    n_features_in_ : int
        Dimension d of the target.

    See Also
    --------
    skksivi.baselines.Laplace : Gaussian at the mode, the quickest thing to try.

    References
    ----------
    Yu, L., Cheng, Z., Zhang, S. and Zhang, C. A kernel approach for semi-implicit variational inference. "The paper"
    throughout.

    Cheng, Z., Yu, L., Xie, T., Zhang, S. and Zhang, C. (2024). Kernel semi-implicit variational inference.
    https://arxiv.org/abs/2405.18997

    Examples
    --------
    >>> from skksivi import KSIVIApproximator
    >>> def score_fn(x):  # the gradient of log N(x; (1, 2), I)
    ...     return x.new_tensor([1.0, 2.0]) - x
    >>> q = KSIVIApproximator(max_iter=1000, random_state=0).fit(score_fn, n_features=2)
    >>> q.sample(10_000).mean(axis=0).round(1)
    array([1., 2.], dtype=float32)
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **BaseApproximator._parameter_constraints,
        "kernel": [str, Kernel],
        "bandwidth": [Interval(Real, 0, None, closed="neither"), StrOptions({"auto", "median"}), None],
        "gradient_estimator": [StrOptions(set(GRADIENT_ESTIMATORS))],
        "latent_dim": [Interval(Integral, 1, None, closed="left"), None],
        "hidden_layer_sizes": ["array-like"],
        "mixing": [StrOptions({"auto", "normal", "pilot"})],
        "linear_skip": ["boolean"],
        "scale": [StrOptions({"constant", "network"})],
        "initial_scale": [Interval(Real, 0, None, closed="neither")],
        "min_scale": [Interval(Real, 0, None, closed="left")],
        "whiten": [StrOptions(set(WHITENINGS)), "array-like", None],
        "init": ["array-like", None],
        "whiten_budget": [Interval(Integral, 0, None, closed="left")],
        "pilot_weight": [Interval(Real, 0, None, closed="left")],
        "batch_size": [Interval(Integral, 2, None, closed="left")],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "learning_rate": [Interval(Real, 0, None, closed="neither")],
        "learning_rate_decay": [StrOptions({"cosine"}), "array-like", None],
        "betas": ["array-like"],
        "annealing": [StrOptions({"linear"}), callable, None],
        "ema_decay": [Interval(Real, 0, 1, closed="left"), None],
        "max_grad_norm": [Interval(Real, 0, None, closed="neither"), None],
        "tol": [Interval(Real, 0, None, closed="left"), None],
        "n_iter_no_change": [Interval(Integral, 1, None, closed="left")],
        "hvp": [StrOptions(set(PRODUCTS))],
        "nonfinite": [StrOptions({"raise", "skip"})],
        "checkpoint": [str, os.PathLike, None],
        "checkpoint_every": [Interval(Integral, 1, None, closed="left")],
        "warm_start": ["boolean"],
    }

    family_: SemiImplicit
    whitening_: Whitening
    loss_curve_: np.ndarray
    ksd_curve_: np.ndarray

    def __init__(
        self,
        *,
        kernel: str | Kernel = "gaussian",
        bandwidth: float | str | None = "auto",
        gradient_estimator: str = "u-statistic",
        latent_dim: int | None = None,
        hidden_layer_sizes: Sequence[int] = (100, 100),
        mixing: str = "auto",
        linear_skip: bool = True,
        scale: str = "constant",
        initial_scale: float = 0.25,
        min_scale: float = 1e-3,
        whiten: str | tuple[Any, Any] | None = "auto",
        init: Any = None,
        whiten_budget: int = 400_000,
        pilot_weight: float = 1.0,
        batch_size: int = 128,
        max_iter: int = 2000,
        learning_rate: float = 2e-3,
        learning_rate_decay: tuple[float, int] | str | None = "cosine",
        betas: tuple[float, float] = (0.9, 0.99),
        annealing: Callable[[float], float] | str | None = None,
        ema_decay: float | None = 0.999,
        max_grad_norm: float | None = None,
        tol: float | None = None,
        n_iter_no_change: int = 2000,
        hvp: str = "auto",
        nonfinite: str = "raise",
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 1000,
        warm_start: bool = False,
        device: str | torch.device = "auto",
        dtype: str = "float32",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.kernel = kernel
        self.bandwidth = bandwidth
        self.gradient_estimator = gradient_estimator
        self.latent_dim = latent_dim
        self.hidden_layer_sizes = hidden_layer_sizes
        self.mixing = mixing
        self.linear_skip = linear_skip
        self.scale = scale
        self.initial_scale = initial_scale
        self.min_scale = min_scale
        self.whiten = whiten
        self.init = init
        self.whiten_budget = whiten_budget
        self.pilot_weight = pilot_weight
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.learning_rate = learning_rate
        self.learning_rate_decay = learning_rate_decay
        self.betas = betas
        self.annealing = annealing
        self.ema_decay = ema_decay
        self.max_grad_norm = max_grad_norm
        self.tol = tol
        self.n_iter_no_change = n_iter_no_change
        self.hvp = hvp
        self.nonfinite = nonfinite
        self.checkpoint = checkpoint
        self.checkpoint_every = checkpoint_every
        self.warm_start = warm_start
        self.device = device
        self.dtype = dtype
        self.random_state = random_state

    def score_samples(self, X: Any) -> np.ndarray:
        r"""Estimate the log-density of the fitted distribution.

        .. math:: \log \frac{1}{K} \sum_{k=1}^{K} q(x | z_k), \quad z_k \sim q(z), \quad K = 10{,}000.

        The sum under the logarithm is unbiased for q(x), so that its logarithm is too small on average, by about
        :math:`\mathrm{Var}[q(x|z)] / (2 K q(x)^2)`: little in few dimensions, much where :math:`\sigma` is small
        against the spread of :math:`\mu(z)` in many. The same z serve every call.

        Parameters
        ----------
        X : array-like of shape (n, n_features)

        Returns
        -------
        log_density : ndarray of shape (n,)
            In nats, float64.

        Raises
        ------
        NotFittedError
            Before `fit`.
        ValueError
            X has another number of columns than the target had, or holds non-finite values.
        """
        return super().score_samples(X)

    def _points_near_target(self) -> Any:
        if self.init is None and self.whiten is not None and not isinstance(self.whiten, str):
            return self.whiten[0] if len(self.whiten) else None
        return self.init

    def _fit(self, score_fn: Score, generator: torch.Generator) -> BaseException | None:
        self._check_parameters(score_fn.n_features)
        checkpoint = self._checkpoint(score_fn)
        start, resume = self._start(score_fn, generator, checkpoint)
        whitening, family = start.whitening, copy.deepcopy(start.family)
        watch = self._watch(score_fn, whitening, family, generator)
        annealing: Any = Linear() if self.annealing == "linear" else self.annealing
        run = minimise(
            self._gradient_fn(pulled_back(score_fn, whitening, generator), family, start.penalty, generator),
            family,
            generator=generator,
            max_iter=self.max_iter,
            learning_rate=self.learning_rate,
            learning_rate_decay=self.learning_rate_decay,
            betas=self.betas,
            max_grad_norm=self.max_grad_norm,
            ema_decay=self.ema_decay,
            annealing=annealing,
            watch=watch,
            nonfinite=self.nonfinite,
            save=None if checkpoint is None else lambda state: checkpoint.save({**start._asdict(), "state": state}),
            save_every=self.checkpoint_every,
            resume=resume,
        )
        if not (run.ended_by is None or self.warm_start or isinstance(run.ended_by, KEEPING)):
            raise run.ended_by
        losses, monitored = (self.loss_curve_, self.ksd_curve_) if self._continues() else ([], [])
        self.loss_curve_ = np.concatenate([losses, run.losses])
        self.ksd_curve_ = np.concatenate([monitored, run.monitored])
        self.engine_ = run.engine
        self.n_iter_ = len(self.loss_curve_)
        self.best_iter_ = self.n_iter_ if watch is None else self.n_iter_ - len(run.losses) + watch.restore(family)
        self.family_ = family.requires_grad_(False)
        self.whitening_ = whitening
        if isinstance(run.ended_by, FloatingPointError):
            return self._explained(run.ended_by, score_fn, generator)
        if run.ended_by is None:
            if checkpoint is not None:
                checkpoint.path.unlink(missing_ok=True)
            self._warn(score_fn, None if watch is None or not watch.keeps_best else watch.last, generator)
        return run.ended_by

    def _gradient_fn(
        self,
        score_u: Score | WhitenedScore | Halves,
        family: SemiImplicit,
        penalty: MomentPenalty | None,
        generator: torch.Generator,
    ) -> Callable[[Tensor | None], Tensor]:
        """Return the function that sets the gradient of the parameters and returns the estimate of KSD^2."""
        kernel = self._resolve_kernel(family.n_features)
        estimator = GRADIENT_ESTIMATORS[self.gradient_estimator]
        n_draws = estimator.n_batches * self.batch_size
        if isinstance(score_u, Halves):  # whose pairs within a half are biased
            estimator, n_draws = GRADIENT_ESTIMATORS["vanilla"], n_draws + n_draws % 2

        def gradient_fn(inverse_temperature: Tensor | None) -> Tensor:
            (u, conditional_score), pull_draw = family.draw_with_pullback(n_draws, generator)
            s_p, pull_score = score_u.with_pullback(u)
            if inverse_temperature is not None:
                s_p = inverse_temperature * s_p
            ksd, du, df = value_and_gradients(u, s_p - conditional_score, kernel, estimator)
            ds = df if inverse_temperature is None else inverse_temperature * df
            du.add_(pull_score(ds))
            if penalty is not None:
                du.add_(penalty.gradient(u))
            pull_draw(du, -df)
            return ksd

        return gradient_fn

    def _sample(self, n: int, generator: torch.Generator) -> Tensor:
        return self.whitening_.map.unwhiten(self.family_.draw(n, generator).x.double())

    def _log_density(self, x: Tensor) -> Tensor:
        family = copy.deepcopy(self.family_).double()
        z = family.draw_latent(N_MIXING_DRAWS, torch.Generator(x.device).manual_seed(self._seed))
        tiles = self.whitening_.map.whiten(x).split(max(1, CHUNK // N_MIXING_DRAWS))
        log_sums = torch.cat([family.log_prob(tile, z).logsumexp(-1) for tile in tiles])
        return log_sums - math.log(len(z)) - self.whitening_.map.log_determinant()

    def _checkpoint(self, score_fn: Score) -> Checkpoint | None:
        """Return where this fit is saved, its settings and the score at two points being the mark of it."""
        if self.checkpoint is None:
            return None
        if self.warm_start:
            raise ValueError("`checkpoint` continues a fit by itself; set warm_start=False.")
        ends = torch.tensor([[-0.5], [0.5]], dtype=torch.float64).expand(2, score_fn.n_features)
        score = score_fn.double(ends.to(score_fn.device)).sum(1).tolist()
        elsewhere = {"checkpoint", "checkpoint_every", "device", "random_state"}
        settings = {k: v for k, v in self.get_params().items() if k not in elsewhere and not callable(v)}
        return Checkpoint(
            self.checkpoint,
            {**settings, "n_features": score_fn.n_features, "score_fn at -1/2 and 1/2": [f"{s:.6g}" for s in score]},
        )

    def _resolve_kernel(self, d: int) -> Kernel:
        """Return the kernel; "auto" is a fixed width in whitened coordinates, else the kernel's own rule."""
        if self.bandwidth != "auto":
            return resolve_kernel(self.kernel, self.bandwidth)
        fixed = isinstance(self.kernel, str) and self.whiten is not None
        return resolve_kernel(self.kernel, WHITENED_BANDWIDTH * math.sqrt(d) if fixed else None)

    def _start(
        self, score_fn: Score, generator: torch.Generator, checkpoint: Checkpoint | None
    ) -> tuple[Start, dict[str, Any] | None]:
        """Return where the training starts and, from a checkpoint, the state in which it goes on."""
        if checkpoint is not None and checkpoint.found is not None:
            start = Start(*(checkpoint.found[name] for name in Start._fields))
            generator.manual_seed(start.seed)
            return start, checkpoint.found["state"]
        seed = generator.initial_seed()
        if not self._continues():
            whitening, pilot = find_whitening(
                self.whiten, score_fn, generator, init=self.init, budget=self.whiten_budget
            )
            return Start(whitening, *self._build(score_fn, whitening, pilot, generator), seed), None
        if self.n_features_in_ != score_fn.n_features:
            raise ValueError(
                f"`warm_start` continues a fit of {self.n_features_in_} features, but the target has "
                f"{score_fn.n_features}; set warm_start=False."
            )
        family = self.family_.to(score_fn.device, score_fn.dtype)
        return Start(self.whitening_, copy.deepcopy(family).requires_grad_(), None, seed), None

    def _build(
        self, score_fn: Score, whitening: Whitening, pilot: Pilot | None, generator: torch.Generator
    ) -> tuple[SemiImplicit, MomentPenalty | None]:
        """Return a new family and what ties it to the pilot."""
        d, penalty = score_fn.n_features, None
        sigma: Any = self.initial_scale
        mixing: Mixing = Normal(self.latent_dim or min(d, MAX_LATENT_DIM))
        if pilot is not None and self._bootstraps():
            u = whitening.map.whiten(pilot.x).to(score_fn.dtype)
            points = Pilot(u, *pilot[1:]).thinned(MAX_POINTS // d)
            mixing = Bootstrap(points.x, points.n_of_mode)
            sigma = (sigma * points.sd_within()).clamp_min(2 * self.min_scale)
            if pilot.settled and self.pilot_weight > 0:
                penalty = MomentPenalty(moments(u), self.pilot_weight)
        elif self.linear_skip and self.whiten is not None:  # what z does not reach starts at N(0, 1) too
            sigma = torch.ones(d, device=score_fn.device)
            sigma[: mixing.latent_dim] = self.initial_scale
        family = gaussian_layer(
            d,
            mixing=mixing,
            hidden_layer_sizes=self.hidden_layer_sizes,
            linear_skip=self.linear_skip,
            scale=self.scale,
            initial_scale=sigma,
            min_scale=self.min_scale,
            generator=generator,
            dtype=score_fn.dtype,
        )
        return family, penalty

    def _bootstraps(self) -> bool:
        """Tell whether the points of a pilot are to be the mixing distribution."""
        return self.mixing != "normal" and self.latent_dim is None and self.linear_skip

    def _continues(self) -> bool:
        return self.warm_start and hasattr(self, "family_")

    def _watch(
        self, score_fn: Score, whitening: Whitening, family: SemiImplicit, generator: torch.Generator
    ) -> Watch | None:
        """Return the rule by which states are compared, every one by draws from the same noise.

        A state is kept if it has the smallest discrepancy of those whose moments stay near the start's; only a fit
        that starts at a pilot has a start worth keeping.
        """
        starts_at_pilot = isinstance(family.mixing, Bootstrap)
        guards = starts_at_pilot and whitening.settled
        if self.tol is None and not guards:
            return None
        judge = Judge(score_fn.double, score_fn.n_features, score_fn.device, whitening.map)
        seed = generator.initial_seed()

        @torch.no_grad()
        def draw(family: Any) -> Tensor:
            return family.draw(N_MONITOR_DRAWS, torch.Generator(score_fn.device).manual_seed(seed)).x.double()

        start = draw(family)

        def look(family: nn.Module) -> tuple[float, Departure]:
            u = draw(family)
            try:
                value = judge(whitening.map.unwhiten(u[:N_JUDGED_DRAWS]))
            except ValueError:  # the score is not finite there
                value = math.inf
            return value, departure(u, start)

        watch = Watch(look, self.tol, self.n_iter_no_change, every=LOOK_EVERY, keeps_best=guards)
        if guards:
            watch.look(family, 0)
        return watch

    def _explained(self, error: BaseException, score_fn: Score, generator: torch.Generator) -> FloatingPointError:
        """Return the error with what fresh draws of the last finite state tell of its cause."""
        x = self._sample(N_MONITOR_DRAWS, generator)
        bad = (~score_fn(x).isfinite().all(1)).nonzero().flatten().tolist()
        cause = f"the score is finite at {N_MONITOR_DRAWS} fresh draws, so that it is a rare one"
        if bad:
            row = ", ".join(f"{value:.4g}" for value in x[bad[0]][:5].tolist())
            cause = (
                f"the score is not finite at {len(bad)} of {N_MONITOR_DRAWS} fresh draws, rows {bad[:3]} and so on, "
                f"the first at x = [{row}{', ...' if x.shape[1] > 5 else ''}]"
            )
        return FloatingPointError(
            f"{error}: {cause}. The state after the last finite step is kept. `score_fn` may be undefined or huge "
            "there, or have the wrong sign. Use dtype='float64', a smaller `learning_rate` or `initial_scale`, "
            "rescale the parameters or, where this is rare, set nonfinite='skip'."
        )

    def _warn(self, score_fn: Score, last: Departure | None, generator: torch.Generator) -> None:
        """Say what is wrong with a fit that has come to its end: the first of five things."""
        x = self._sample(N_JUDGED_DRAWS, generator).double()
        variances, se = stein_variances(x, score_fn.double(x))
        low, high = STEIN_VARIANCES
        wrong = (variances + 5 * se < low) | (variances - 5 * se > high)
        n_skipped = int((~np.isfinite(self.loss_curve_)).sum())
        message = None
        if n_skipped:
            message = (
                f"{n_skipped} of {self.n_iter_} iterations were skipped, their loss or gradient not being finite: "
                "`score_fn` may be undefined or huge somewhere. Use dtype='float64' or rescale the parameters."
            )
        elif not self.whitening_.settled:
            message = (
                "The chains that explore the target have not settled, so that the fit may be off: raise "
                "`whiten_budget`, start near a mode by `init`, or give the parameters a form without funnels and "
                "spikes."
            )
        elif last is not None and not last.accepted:
            worst = int(last.excess.argmax())
            message = (
                f"The training ended with coordinate {worst} of the whitened draws at {last.sd_ratio[worst]:.2f} "
                f"times its standard deviation and its third moment changed by {last.third[worst]:+.2f}; the "
                f"state of iteration {self.best_iter_} is kept. Raise `pilot_weight` or `batch_size`, or lower "
                "`learning_rate`."
            )
        elif wrong.any():
            worst = int((variances.clamp_min(1e-12).log().abs() * wrong).argmax())
            way = "narrow" if variances[worst] < 1 else "wide"
            message = (
                f"The draws are too {way} in coordinate {worst}: -E[s_i (x_i - E x_i)] is {variances[worst]:.2g} "
                f"there, where it should be 1; {int(wrong.sum())} of {len(wrong)} coordinates are off by more than "
                "a factor of 4. Use whiten='auto', more `max_iter`, a smaller `initial_scale` or rescale the "
                "parameters."
            )
        if message is not None:
            warnings.warn(message, ConvergenceWarning, stacklevel=4)

    def _check_parameters(self, d: int) -> None:
        """Check what scikit-learn's parameter constraints cannot express."""
        if self.mixing == "pilot" and not (self._bootstraps() and self.whiten == "auto" and d <= MAX_FEATURES):
            raise ValueError(
                "`mixing` is 'pilot', which needs whiten='auto', latent_dim=None, linear_skip=True and at most "
                f"{MAX_FEATURES} features; change them, or set mixing='normal'."
            )
        if not all(isinstance(n, Integral) and n >= 1 for n in self.hidden_layer_sizes):
            raise ValueError(f"`hidden_layer_sizes` must hold positive integers, got {self.hidden_layer_sizes!r}.")
        if len(self.betas) != 2 or not all(isinstance(b, Real) and 0 <= b < 1 for b in self.betas):
            raise ValueError(f"`betas` must be two numbers in [0, 1), got {self.betas!r}.")
        if self.initial_scale <= self.min_scale:
            raise ValueError(
                f"`initial_scale` must exceed `min_scale`, got {self.initial_scale!r} and {self.min_scale!r}."
            )
        decay: Any = self.learning_rate_decay
        is_pair = decay is not None and not isinstance(decay, str)
        if is_pair and (
            len(decay) != 2 or not all(isinstance(a, Real) for a in decay) or not 0 < decay[0] <= 1 <= decay[1]
        ):
            raise ValueError(
                "`learning_rate_decay` must be 'cosine', None or a pair (factor in (0, 1], iterations >= 1), "
                f"got {decay!r}."
            )
