"""Make exact reference draws of a posterior by long preconditioned MALA chains.

python benchmarks/reference.py waveform            the draws that ship with the package
python benchmarks/reference.py mat FILE OUT.npz    those of a split in a .mat file (X_train with ones, y_train)

Each draw is the last state of its own chain, started from the Laplace approximation, so that the draws are
independent. Printed: acceptance, the split-half R-hat over chains, and the Stein identities E[s] = 0 and
E[s_i x_j] = -delta_ij in standard errors.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from skksivi._whitening import saddle_free_newton
from skksivi.datasets import load_waveform
from skksivi.targets import BayesianLogisticRegression


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


def r_hat(chains):
    """Return the largest split R-hat over coordinates of (steps, chains, d)."""
    halves = torch.cat(chains.chunk(2), 1)[: len(chains) // 2]
    within, between = halves.var(0).mean(0), len(halves) * halves.mean(0).var(0)
    n = len(halves)
    return ((n - 1) / n + between / within / n).sqrt().max().item()


def stein_identities(target, x):
    """Return the largest violations of E[s] = 0 and E[s_i x_j] = -delta_ij, in standard errors."""
    s, centred = target.score_fn(x), x - x.mean(0)
    products = s[:, :, None] * centred[:, None, :] + torch.eye(x.shape[1], dtype=x.dtype)
    z = [(v.mean(0) / v.std(0) * len(v) ** 0.5).abs().max().item() for v in (s, products)]
    return {"E[s], se": z[0], "E[s x] + I, se": z[1]}


def waveform_target():
    X, y = load_waveform(return_X_y=True)
    return BayesianLogisticRegression(X, y, prior_precision=0.01, fit_intercept=True)


def mat_target(path):
    from scipy.io import loadmat

    data = loadmat(path)
    return BayesianLogisticRegression(data["X_train"], data["y_train"].ravel(), prior_precision=0.01)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("target", choices=["waveform", "mat"])
    parser.add_argument("paths", nargs="*")
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    if args.target == "waveform":
        import skksivi.datasets

        target = waveform_target()
        out = args.paths[0] if args.paths else None
        out = out or Path(skksivi.datasets.__file__).parent / "data" / "waveform_posterior.npz"
    else:
        source, out = args.paths
        target = mat_target(source)
    x, diagnostics = mala(target, 2000, n_steps=args.steps)
    np.savez_compressed(out, draws=x.numpy().astype(np.float32))
    print(*(f"{name}: {value:.3f}" for name, value in diagnostics.items()), sep="\n")
    print(f"{len(x)} draws in {out}")


if __name__ == "__main__":
    main()
