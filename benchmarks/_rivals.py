"""What a user would pick instead, mostly from other packages, fitted and sampled like the baselines of this one.

A rival is fitted to a `Watched` target; a `paper._base.Counted` will do for NUTS by nutpie and for the flow. It knows
`sample(n, random_state)`. One whose further draws cost evaluations also has `draws_` (N, d), all that it kept,
`n_effective_`, how many independent ones they are worth, and `n_sampling_calls_`, what they cost after the warm-up.

All but `NutpieNUTS`, where it is not told to, start from the Laplace approximation and run in its coordinates.

The packages are the extra `benchmarks`; `missing` names the one that a rival lacks. Torch's log-density is called
from JAX through a callback, which takes a tenth of a millisecond or so, and from nutpie as a Python function.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import time
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from paper._base import Counted
from scipy.special import logsumexp, softmax
from scipy.stats import multivariate_t
from sklearn.base import BaseEstimator

from skksivi._utils.monte_carlo import pareto_smoothed
from skksivi.baselines import Laplace

#: The largest difference of log-weights.
LARGEST = 700.0

#: Draws resampled by weights.
N_RESAMPLED = 10_000

#: Longer pauses between two calls are those in which JAX compiles, seconds.
PAUSE = 0.2


class SpentError(RuntimeError):
    """The calls that a fit was given are spent."""

    is_recoverable = True  # nutpie panics else; so every further step diverges, without a call


class Watched(Counted):
    """A counted target that takes the CPU time of its calls, and ends a fit that has spent its rows.

    Copies of it, as fits make them, share what they count.
    """

    def __init__(self, target, limit=math.inf):
        super().__init__(target)
        self.limit, self._seconds, self._times = limit, [0.0], []

    def to(self, **kwargs):
        moved = super().to(**kwargs)
        moved.target = self.target.to(**kwargs)
        return moved

    @property
    def spent(self):
        return self.n_points[0] >= self.limit

    @property
    def seconds(self):
        return self._seconds[0]

    @property
    def score_vjp(self):
        return self._product if self.target.score_vjp is not None else None

    def _product(self, x):
        return self._timed(super().score_vjp, x)

    def score_fn(self, x):
        return self._timed(super().score_fn, x)

    def value_and_score(self, x):
        return self._timed(super().value_and_score, x)

    def value(self, x):
        return self._timed(super().value, x)

    def _timed(self, evaluate, x):
        if self.spent:
            raise SpentError
        start = time.process_time()
        value = evaluate(x)
        self._times.append(time.process_time())
        self._seconds[0] += self._times[-1] - start
        return value

    def seconds_a_row(self):
        """Return the CPU time of a row, what the method does in between included, without compilation."""
        gaps = np.diff(self._times)
        return gaps[gaps < max(PAUSE, 20 * np.median(gaps))].sum() / self.n_points[0]


class InLaplace:
    """A `Watched` target in the coordinates u of its Laplace approximation, x = m + L u, found at its cost."""

    def __init__(self, target, seed):
        before = target.n_points[0]
        laplace = Laplace(random_state=seed).fit(target)
        target.n_points[0] = before + laplace.n_score_calls_ + laplace.n_products_
        self.target, self.n_features = target, target.n_features
        self.m, self.L = map(torch.from_numpy, (laplace.mean_, np.linalg.cholesky(laplace.covariance_)))

    def to_x(self, u):
        return self.m + (u if isinstance(u, torch.Tensor) else torch.from_numpy(np.array(u))) @ self.L.mT

    def score_fn(self, u):
        return self.target.score_fn(self.to_x(u)) @ self.L

    def value(self, u):
        return self.target.value(self.to_x(u))

    def value_and_score(self, u):
        log_p, s = self.target.value_and_score(self.to_x(u))
        return log_p, s @ self.L


def missing(rival):
    """Return the name of the package that a rival lacks, or None."""
    package = getattr(rival, "package", None)
    return package if package and importlib.util.find_spec(package) is None else None


def available(methods):
    """Return the names of methods, with what makes each, whose package is there; say which are left out."""
    for name, make in methods.items():
        if package := missing(make):
            print(f"{name} is left out: there is no package {package}; pip install '.[benchmarks]'.", flush=True)
        else:
            yield name


def finite(log_p, s):
    """Return them as arrays; -inf and a score of zero where either is not a number."""
    log_p, s = log_p.numpy(), s.numpy()
    good = np.isfinite(log_p) & np.isfinite(s).all(-1)
    return np.where(good, log_p, -np.inf), np.where(good[..., None], s, 0.0)


def effective_size(chains):
    """Return the least effective sample size of the coordinates of chains (n_chains, n_draws, d)."""
    from arviz_stats.base import array_stats

    sizes = [array_stats.ess(chains[..., j], chain_axis=0, draw_axis=1) for j in range(chains.shape[-1])]
    return max(1.0, float(np.nan_to_num(np.min(sizes), nan=1.0)))


def systematic(weights, n, rng):
    """Return n rows in proportion to weights of sum one, by a single uniform number (Kitagawa, 1996)."""
    levels = (np.arange(n) + rng.uniform()) / n
    return np.searchsorted(np.cumsum(weights), levels).clip(max=len(weights) - 1)


class Draws(BaseEstimator):
    """Base of those that keep draws."""

    def sample(self, n, random_state=0):
        rng = np.random.RandomState(random_state)
        return self.draws_[rng.choice(len(self.draws_), n, replace=n > len(self.draws_))]

    def _keep(self, chains, n_sampling_calls):
        self.draws_ = chains.reshape(-1, chains.shape[-1])
        self.n_effective_, self.n_sampling_calls_ = effective_size(chains), n_sampling_calls
        return self

    def _keep_weighed(self, x, weights, n_sampling_calls):
        rows = systematic(weights, N_RESAMPLED, np.random.RandomState(self.random_state))
        self.draws_, self.n_effective_ = x[rows], 1 / np.square(weights).sum()
        self.n_sampling_calls_ = n_sampling_calls
        return self


class NutpieNUTS(Draws):
    """NUTS whose metric is a diagonal and a few directions (nutpie), a chain after the other.

    It runs in x, as by default, or where it `starts_at_mode` in the coordinates of the Laplace approximation.
    """

    package: ClassVar[str] = "nutpie"

    def __init__(self, *, n_chains=4, n_warmup=300, n_draws=1000, starts_at_mode=False, random_state=0):
        self.n_chains, self.n_warmup, self.n_draws = n_chains, n_warmup, n_draws
        self.starts_at_mode, self.random_state = starts_at_mode, random_state

    def fit(self, target):
        import nutpie
        from nutpie.compiled_pyfunc import from_pyfunc

        seen = InLaplace(target, self.random_state) if self.starts_at_mode else target

        def log_prob(x):
            log_p, s = finite(*seen.value_and_score(torch.from_numpy(np.array(x))[None]))
            return float(log_p[0]), s[0]

        model = from_pyfunc(
            target.n_features, lambda: log_prob, lambda *_: lambda x: {"x": np.array(x)}, [np.dtype(float)],
            [(target.n_features,)], ["x"],
        )  # fmt: skip
        found = nutpie.sample(
            model, draws=self.n_draws, tune=self.n_warmup, chains=self.n_chains, cores=1, seed=self.random_state,
            low_rank_modified_mass_matrix=True, progress_bar=False,
        )  # fmt: skip
        if getattr(target, "spent", False):
            raise SpentError
        chains = found.posterior["x"].to_numpy()
        if self.starts_at_mode:
            chains = seen.to_x(chains).numpy()
        return self._keep(chains, int(found.sample_stats["n_steps"].sum()))


def as_jax(target):
    """Return log p of a target as a function of JAX, whose gradient comes from the same callback."""
    import jax

    jax.config.update("jax_enable_x64", True)
    logging.getLogger("jax._src.callback").setLevel(logging.CRITICAL)  # a `SpentError` is no accident

    def rows(x):
        return torch.from_numpy(np.array(x, dtype=np.float64)).reshape(-1, target.n_features)

    def value(x):
        return np.nan_to_num(target.value(rows(x)).numpy(), nan=-np.inf).reshape(x.shape[:-1])

    def value_and_score(x):
        log_p, s = finite(*target.value_and_score(rows(x)))
        return log_p.reshape(x.shape[:-1]), s.reshape(x.shape)

    def like(x):
        return jax.ShapeDtypeStruct(x.shape[:-1], x.dtype)

    @jax.custom_vjp
    def log_prob(x):
        return jax.pure_callback(value, like(x), x, vmap_method="broadcast_all")

    def forward(x):
        shapes = like(x), jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(value_and_score, shapes, x, vmap_method="broadcast_all")

    log_prob.defvjp(forward, lambda s, g: (g[..., None] * s,))
    return log_prob


class NumPyroNUTS(Draws):
    """NUTS with NumPyro's defaults, thus a diagonal metric, a chain after the other."""

    package: ClassVar[str] = "numpyro"

    def __init__(self, *, n_chains=4, n_warmup=500, n_draws=1000, random_state=0):
        self.n_chains, self.n_warmup, self.n_draws, self.random_state = n_chains, n_warmup, n_draws, random_state

    def fit(self, target):
        import jax
        from numpyro.infer import MCMC, NUTS

        in_laplace = InLaplace(target, self.random_state)
        log_prob = as_jax(in_laplace)
        mcmc = MCMC(
            NUTS(potential_fn=lambda x: -log_prob(x)), num_warmup=self.n_warmup, num_samples=self.n_draws,
            num_chains=self.n_chains, chain_method="sequential", progress_bar=False,
        )  # fmt: skip
        starts = np.random.RandomState(self.random_state).uniform(-2, 2, (self.n_chains, target.n_features))
        key = jax.random.PRNGKey(self.random_state)
        mcmc.run(key, init_params=starts if self.n_chains > 1 else starts[0], extra_fields=("num_steps",))
        chains = in_laplace.to_x(mcmc.get_samples(group_by_chain=True)).numpy()
        return self._keep(chains, int(mcmc.get_extra_fields()["num_steps"].sum()))


class MicrocanonicalLangevin(Draws):
    """One unadjusted chain at constant energy (blackjax), tuned for a third as many steps."""

    package: ClassVar[str] = "blackjax"

    def __init__(self, *, n_draws=10_000, random_state=0):
        self.n_draws, self.random_state = n_draws, random_state

    def fit(self, target):
        import blackjax
        import jax

        in_laplace = InLaplace(target, self.random_state)
        log_prob = as_jax(in_laplace)
        start, tuning, running = jax.random.split(jax.random.PRNGKey(self.random_state), 3)
        kernel = blackjax.mclmc.build_kernel()
        state = blackjax.mclmc.init(jax.random.normal(start, (target.n_features,)), log_prob, start)
        state, tuned, _ = blackjax.mclmc_find_L_and_step_size(
            kernel, num_steps=self.n_draws, state=state, rng_key=tuning, logdensity_fn=log_prob
        )
        jax.block_until_ready(state)
        before = target.n_points[0]

        def step(state, key):
            state, _ = kernel(key, state, log_prob, tuned.inverse_mass_matrix, tuned.L, tuned.step_size)
            return state, state.position

        _, chain = jax.jit(lambda state, keys: jax.lax.scan(step, state, keys))(
            state, jax.random.split(running, self.n_draws)
        )
        return self._keep(in_laplace.to_x(chain).numpy()[None], target.n_points[0] - before)


class Pathfinder(Draws):
    """The best Gaussians along the ways of L-BFGS to modes (blackjax), draws resampled by Pareto-smoothed weights."""

    package: ClassVar[str] = "blackjax"

    def __init__(self, *, n_paths=4, n_draws=250, n_elbo=10, max_iter=100, random_state=0):
        self.n_paths, self.n_draws, self.n_elbo = n_paths, n_draws, n_elbo
        self.max_iter, self.random_state = max_iter, random_state

    def fit(self, target):
        import jax
        from blackjax.vi import multipathfinder, pathfinder

        in_laplace = InLaplace(target, self.random_state)
        log_prob = as_jax(in_laplace)

        def approximate(key, x):
            return pathfinder.approximate(key, log_prob, x, self.n_elbo, maxiter=self.max_iter)[0]

        approximate = jax.jit(approximate)
        key = jax.random.PRNGKey(self.random_state)
        paths = []
        for k in jax.random.split(key, self.n_paths):
            start, search, draw = jax.random.split(k, 3)
            state = approximate(search, jax.random.uniform(start, (target.n_features,), minval=-2.0, maxval=2.0))
            x, log_q = pathfinder.sample(draw, state, self.n_draws)
            paths.append((x, jax.vmap(log_prob)(x), log_q))
        paths = multipathfinder.MultipathfinderState(None, *map(jax.numpy.stack, zip(*paths, strict=True)))
        weights = np.nan_to_num(np.exp(np.asarray(multipathfinder.psis_weights(paths)[0])))
        x = in_laplace.to_x(paths.samples).reshape(len(weights), -1).numpy()
        return self._keep_weighed(x, weights / weights.sum(), len(weights))


class TemperedSMC(Draws):
    """Sequential Monte Carlo (blackjax) from a Gaussian `scale` times as wide as the Laplace approximation.

    Each temperature halves the effective size. Particles move by `n_moves` Hamiltonian trajectories of four steps,
    whose length follows the acceptance, with the variances of the particles as metric; once more at the end.
    """

    package: ClassVar[str] = "blackjax"

    def __init__(self, *, n_particles=1000, n_moves=2, scale=2.0, random_state=0):
        self.n_particles, self.n_moves, self.scale, self.random_state = n_particles, n_moves, scale, random_state

    def fit(self, target):
        import blackjax
        import jax
        from blackjax.smc import adaptive_tempered, ess, resampling, solver
        from jax import numpy as jnp

        in_laplace, d = InLaplace(target, self.random_state), target.n_features
        log_prob = as_jax(in_laplace)

        def log_start(u):
            return jax.scipy.stats.norm.logpdf(u, scale=self.scale).sum(-1)

        def log_ratio(u):
            return jnp.maximum(log_prob(u) - log_start(u), -1e30)  # zero times -inf is not a number

        kernel = adaptive_tempered.build_kernel(
            log_start, log_ratio, blackjax.hmc.build_kernel(), blackjax.hmc.init, resampling.systematic, 0.5
        )
        move = jax.jit(kernel, static_argnums=2)
        key, step = jax.random.PRNGKey(self.random_state), d**-0.25
        state = adaptive_tempered.init(self.scale * jax.random.normal(key, (self.n_particles, d)))
        ratios = jax.vmap(log_ratio)(state.particles)  # the first temperature, without moves of exact draws before it
        first = jnp.clip(ess.ess_solver(lambda _: ratios, state.particles, 0.5, 1.0, solver.dichotomy), 0.0, 1.0)
        state = state._replace(weights=jax.nn.softmax(first * ratios), tempering_param=first)
        ends = False
        while not ends:
            ends = state.tempering_param >= 1
            centred = state.particles - state.weights @ state.particles
            settings = {
                "step_size": jnp.array([step]), "num_integration_steps": jnp.array([4]),
                "inverse_mass_matrix": (state.weights @ centred**2)[None],
            }  # fmt: skip
            key, own = jax.random.split(key)
            state, info = move(own, state, self.n_moves, settings)
            step *= float(jnp.exp(info.update_info.acceptance_rate.mean() - 0.8))
        x = in_laplace.to_x(state.particles).numpy()
        return self._keep_weighed(x, np.full(len(x), 1 / len(x)), target.n_points[0])


class StudentMixture(NamedTuple):
    """Mixture of Student t distributions: their shares (K,), means (K, d) and scale matrices (K, d, d)."""

    shares: Any
    means: Any
    scales: Any

    @property
    def df(self):
        return max(5, len(self.means[0]))  # so that in many dimensions lengths vary little more than a Gaussian's

    @property
    def parts(self):
        return [multivariate_t(m, C, self.df) for m, C in zip(self.means, self.scales, strict=True)]

    def log_joint(self, U):
        return np.stack([np.log(a) + q.logpdf(U) for a, q in zip(self.shares, self.parts, strict=True)])

    def log_prob(self, U):
        return logsumexp(self.log_joint(U), 0)

    def sample(self, n, rng):
        sizes = rng.multinomial(n, self.shares)
        return np.vstack(
            [q.rvs(k, random_state=rng).reshape(k, -1) for q, k in zip(self.parts, sizes, strict=True) if k]
        )

    def adapted(self, U, weights):
        """Return the mixture after a step of EM on weighted U (n, d), each scale drawn to the former by d draws."""
        d, joint = U.shape[1], weights * softmax(self.log_joint(U), 0) + 1e-300
        means, scales = [], []
        for r, m, C in zip(joint / joint.sum(1, keepdims=True), self.means, self.scales, strict=True):
            z = np.linalg.solve(np.linalg.cholesky(C), (U - m).T)
            pull = r * (self.df + d) / (self.df + np.square(z).sum(0))
            means.append(pull @ U / pull.sum())
            centred, n = U - means[-1], 1 / np.square(r).sum()
            scales.append((n * (centred.T * pull) @ centred + d * C) / (n + d))
        shares = joint.sum(1) + 0.1 / len(joint)
        return StudentMixture(shares / shares.sum(), means, scales)


class AdaptiveImportance(Draws):
    """Importance sampling from mixtures of Student t distributions, each adapted by the weights of all draws so far.

    A weight has the mixture of all proposals below it, and is Pareto-smoothed. The first proposal is at the mode, of
    the scale of the Laplace approximation, its other components at draws of the first one.

    References
    ----------
    Cornuet, J.-M. et al. (2012). Adaptive multiple importance sampling. Scandinavian Journal of Statistics 39(4).

    Cappé, O. et al. (2008). Adaptive importance sampling in general mixture classes. Statistics and Computing 18(4).
    """

    def __init__(self, *, n_draws=500, n_rounds=4, n_components=1, random_state=0):
        self.n_draws, self.n_rounds, self.n_components = n_draws, n_rounds, n_components
        self.random_state = random_state

    def fit(self, target):
        in_laplace, rng = InLaplace(target, self.random_state), np.random.RandomState(self.random_state)
        K, d = self.n_components, target.n_features
        means = np.vstack([np.zeros(d), rng.standard_normal((K - 1, d))])
        proposals = [StudentMixture(np.full(K, 1 / K), means, [np.eye(d)] * K)]
        U, log_p, log_q = np.empty((0, d)), np.empty(0), np.empty(0)
        for _ in range(self.n_rounds):
            new = proposals[-1].sample(self.n_draws, rng)
            older = np.logaddexp(log_q, proposals[-1].log_prob(U)) if len(U) else log_q
            log_q = np.append(older, logsumexp([q.log_prob(new) for q in proposals], 0))
            U, log_p = np.vstack([U, new]), np.append(log_p, in_laplace.value(new).numpy())
            log_ratios = np.nan_to_num(log_p - log_q, nan=-np.inf)
            smoothed, _ = pareto_smoothed(log_ratios.clip(min=log_ratios.max() - LARGEST))
            weights = softmax(smoothed)
            proposals.append(proposals[-1].adapted(U, weights))
        return self._keep_weighed(in_laplace.to_x(U).numpy(), weights, len(U))


class Flow(BaseEstimator):
    """Six affine coupling layers (zuko) by the evidence lower bound, in coordinates of the Laplace approximation."""

    package: ClassVar[str] = "zuko"

    def __init__(self, *, max_iter=1000, batch_size=64, learning_rate=3e-3, random_state=0):
        self.max_iter, self.batch_size = max_iter, batch_size
        self.learning_rate, self.random_state = learning_rate, random_state

    def fit(self, target):
        import zuko

        self.in_laplace_ = InLaplace(target, self.random_state)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.random_state)
            flow = zuko.flows.MAF(target.n_features, transforms=6, hidden_features=(32, 32), passes=2).double()
            optimizer = torch.optim.Adam(flow.parameters(), self.learning_rate)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.max_iter)
            for _ in range(self.max_iter):
                u, log_q = flow().rsample_and_log_prob((self.batch_size,))
                s = self.in_laplace_.score_fn(u.detach()).nan_to_num(0.0, 0.0, 0.0)
                optimizer.zero_grad()
                (log_q - (s * u).sum(-1)).mean().backward()
                torch.nn.utils.clip_grad_norm_(flow.parameters(), 100.0)
                optimizer.step()
                schedule.step()
        self.flow_ = flow
        return self

    def sample(self, n, random_state=0):
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(random_state)
            return self.in_laplace_.to_x(self.flow_().sample((n,))).numpy()
