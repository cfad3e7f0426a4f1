"""Make exact reference draws of a posterior.

python benchmarks/reference.py waveform                 the draws that ship with the package
python benchmarks/reference.py mat FILE OUT.npz         those of a split in a .mat file (X_train with ones, y_train)
python benchmarks/reference.py posteriors [NAME ...]    those of benchmarks/posteriors.py, in build/reference

The first two come from long preconditioned MALA chains, each draw the last state of its own chain, started from
the Laplace approximation, so that the draws are independent. Those of `posteriors` come from the exact sampler where
there is one, else from a thousand chains of Hamiltonian Monte Carlo, a few states of each, far apart. (Twelve of them
were compared with Pyro's NUTS, which agrees and mostly takes several times as long: a step of one chain costs nearly
what a step of a thousand does.)

Printed: acceptance, the split-half R-hat over chains, the effective sample size, and the Stein identities E[s] = 0
and E[s_i x_j] = -delta_ij in standard errors.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from posteriors import POSTERIORS, waveform_target

from skksivi._affine import Affine
from skksivi._newton import saddle_free_newton
from skksivi.targets import BayesianLogisticRegression

#: Where `posteriors` puts its draws.
DIRECTORY = Path(__file__).parents[1] / "build" / "reference"


def mala(target, n_draws, *, n_steps=1000, step=None, seed=0):
    """Return (n_draws, d) last states of independent chains, preconditioned by the curvature at the mode."""
    generator = torch.Generator().manual_seed(seed)
    d = target.n_features
    h = 1.8 / d ** (1 / 3) if step is None else step
    map_ = saddle_free_newton(target.score_fn, torch.zeros(d, dtype=torch.float64))

    def log_prob_and_score(u):
        x = map_.unwhiten(u)
        return target.log_prob(x), map_.whiten_score(target.score_fn(x))

    def log_proposal(u_to, u_from, s_from):
        return -(u_to - u_from - h / 2 * s_from).square().sum(-1) / (2 * h)

    u = torch.randn(n_draws, d, generator=generator, dtype=torch.float64)
    log_p, s = log_prob_and_score(u)
    accepted, kept = 0.0, []
    for t in range(n_steps):
        v = u + h / 2 * s + h**0.5 * torch.randn(u.shape, generator=generator, dtype=u.dtype)
        log_p_v, s_v = log_prob_and_score(v)
        log_ratio = log_p_v - log_p + log_proposal(u, v, s_v) - log_proposal(v, u, s)
        accept = torch.rand(n_draws, generator=generator, dtype=u.dtype).log() < log_ratio
        u, s = (torch.where(accept[:, None], new, old) for new, old in ((v, u), (s_v, s)))
        log_p = torch.where(accept, log_p_v, log_p)
        accepted += accept.double().mean().item() / n_steps
        if t >= n_steps // 2 and t % 10 == 0:
            kept.append(u.clone())
    x = map_.unwhiten(u)
    return x, {"acceptance": accepted, "R-hat": r_hat(torch.stack(kept)), **stein_identities(target, x)}


def hmc(target, n_draws, *, n_chains=1000, n_warmup=40, n_rounds=40, n_trajectories=10, seed=0):
    """Return (n_draws, d) states of `n_chains` chains of Hamiltonian Monte Carlo, those of a chain far apart.

    A round is `n_trajectories`. Those of the warm-up adapt the step to an acceptance of .9, and the metric to the
    covariance of the chains.
    """
    generator = torch.Generator().manual_seed(seed)
    d = target.n_features
    map_ = saddle_free_newton(target.score_fn, torch.zeros(d, dtype=torch.float64))
    u = torch.randn(n_chains, d, generator=generator, dtype=torch.float64) / 2
    step = d**-0.25
    for _ in range(n_warmup):
        u, acceptance = trajectories(target, map_, u, step, n_trajectories, generator)
        step = min(step * math.exp(acceptance - 0.9), 1.5)
        x = map_.unwhiten(u)
        map_ = Affine(x.mean(0), torch.linalg.cholesky(x.mT.cov()))
        u = map_.whiten(x)
    kept, accepted = [], 0.0
    for _ in range(n_rounds):
        u, acceptance = trajectories(target, map_, u, step, n_trajectories, generator)
        accepted += acceptance / n_rounds
        kept.append(map_.unwhiten(u))
    kept = torch.stack(kept)
    n_states = math.ceil(n_draws / n_chains)
    every = n_rounds // n_states
    draws = kept[every - 1 :: every][:n_states]
    diagnostics = {"step": step, "acceptance": accepted, "R-hat": r_hat(kept), "ESS": effective_sample_size(draws)}
    return draws.flatten(0, 1)[:n_draws], diagnostics


def trajectories(target, map_, u, step, n_trajectories, generator):
    """Return the chains u (n, d) after some trajectories of length 0 to 2, and the share that was accepted."""

    def log_prob_and_score(u):
        x = map_.unwhiten(u)
        return target.log_prob(x).nan_to_num(nan=-math.inf), map_.whiten_score(target.score_fn(x))

    def energy(log_p, p):
        return p.square().sum(-1) / 2 - log_p

    log_p, s = log_prob_and_score(u)
    accepted = 0.0
    for _ in range(n_trajectories):
        h = step * torch.rand(len(u), 1, generator=generator, dtype=u.dtype)
        p = torch.randn(u.shape, generator=generator, dtype=u.dtype)
        v, log_p_v, s_v, q = u, log_p, s, p
        for _ in range(math.ceil(2 / step)):
            q = q + h / 2 * s_v
            v = v + h * q
            log_p_v, s_v = log_prob_and_score(v)
            q = q + h / 2 * s_v
        log_ratio = energy(log_p, p) - energy(log_p_v, q)
        accept = torch.rand(len(u), generator=generator, dtype=u.dtype).log() < log_ratio
        u, s = (torch.where(accept[:, None], new, old) for new, old in ((v, u), (s_v, s)))
        log_p = torch.where(accept, log_p_v, log_p)
        accepted += accept.double().mean().item() / n_trajectories
    return u, accepted


def effective_sample_size(draws):
    """Return the smallest over coordinates of (steps, chains, d), from the variance of the means of the chains."""
    return (draws.shape[1] * draws.flatten(0, 1).var(0) / draws.mean(0).var(0)).min().item()


def r_hat(chains):
    """Return the largest split R-hat over coordinates of (steps, chains, d)."""
    half = len(chains) // 2
    halves = torch.cat([chains[:half], chains[half : 2 * half]], 1)
    within, between = halves.var(0).mean(0), len(halves) * halves.mean(0).var(0)
    n = len(halves)
    return ((n - 1) / n + between / within / n).sqrt().max().item()


def stein_identities(target, x):
    """Return the largest violations of E[s] = 0 and E[s_i x_j] = -delta_ij, in standard errors."""
    s, centred, n = target.score_fn(x), x - x.mean(0), len(x)
    mean, square = s.mT @ centred / n, s.square().mT @ centred.square() / n
    first = s.mean(0) / s.std(0)
    second = (mean + torch.eye(x.shape[1], dtype=x.dtype)) / (square - mean.square()).sqrt()
    z = [(v.abs().max() * n**0.5).item() for v in (first, second)]
    return {"E[s], se": z[0], "E[s x] + I, se": z[1]}


def mat_target(path):
    from scipy.io import loadmat

    data = loadmat(path)
    return BayesianLogisticRegression(data["X_train"], data["y_train"].ravel(), prior_precision=0.01)


def reference(name, directory=DIRECTORY, n_draws=4000):
    """Return the draws (n_draws, d) of a posterior of `POSTERIORS`, float64, made where there is no file."""
    path = Path(directory) / f"{name}.npz"
    if not path.exists():
        start = time.perf_counter()
        x, diagnostics = exact_draws(POSTERIORS[name].make(), n_draws)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, draws=x.numpy())
        print_diagnostics(name, {**diagnostics, "seconds": time.perf_counter() - start})
    return np.load(path)["draws"]


def exact_draws(target, n_draws):
    """Return draws of the target, in the way that suits it best, and their diagnostics."""
    if hasattr(target, "easier"):
        x, diagnostics = exact_draws(target.easier, n_draws)
        x = target.from_easier(x)
    elif hasattr(target, "sample"):
        x, diagnostics = target.sample(n_draws, torch.Generator().manual_seed(1)), {}
    else:
        for n_trajectories in (10, 30, 100):
            x, diagnostics = hmc(target, n_draws, n_trajectories=n_trajectories)
            if diagnostics["R-hat"] < 1.01 and diagnostics["ESS"] > n_draws / 2:
                break
    return x, {**diagnostics, **stein_identities(target, x)}


def print_diagnostics(name, diagnostics):
    print(f"{name}:", ", ".join(f"{key} {value:.4g}" for key, value in diagnostics.items()), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    waveform, mat, posteriors = (commands.add_parser(name) for name in ("waveform", "mat", "posteriors"))
    waveform.add_argument("out", type=Path, nargs="?")
    mat.add_argument("source", type=Path)
    mat.add_argument("out", type=Path)
    for command in waveform, mat:
        command.add_argument("--steps", type=int, default=1000)
    posteriors.add_argument("names", nargs="*", metavar="NAME", help="all of them by default")
    posteriors.add_argument("--out", type=Path, default=DIRECTORY)
    posteriors.add_argument("--draws", type=int, default=4000)
    args = parser.parse_args()
    if args.command == "posteriors":
        for name in args.names or POSTERIORS:
            reference(name, args.out, args.draws)
        return
    import skksivi.datasets

    target = waveform_target() if args.command == "waveform" else mat_target(args.source)
    out = args.out or Path(skksivi.datasets.__file__).parent / "data" / "waveform_posterior.npz"
    x, diagnostics = mala(target, 2000, n_steps=args.steps)
    np.savez_compressed(out, draws=x.numpy().astype(np.float32))
    print_diagnostics(f"{len(x)} draws in {out}", diagnostics)


if __name__ == "__main__":
    main()
