"""Make exact reference draws of a posterior.

python benchmarks/reference.py waveform                 the draws that ship with the package
python benchmarks/reference.py targets [NAME ...]       those of skksivi.targets, in build/reference
python benchmarks/reference.py posteriors [NAME ...]    those of benchmarks/posteriors.py and _expensive.py, there too

The first come from long preconditioned MALA chains, each draw the last state of its own chain, started from the
Laplace approximation, so that the draws are independent. Those of `targets` and `posteriors` come from the exact
sampler where there is one, else from a thousand chains of Hamiltonian Monte Carlo, a few states of each, far apart;
where these do not reach the mass, from NUTS. (Twelve of them were compared with Pyro's NUTS, which agrees and mostly
takes several times as long: a step of one chain costs nearly what a step of a thousand does.) What is in the cache is
not made again.

Printed: acceptance, the split-half R-hat over chains, the effective sample size, and the Stein identities E[s] = 0,
E[s_i x_j] = -delta_ij and E[s_i f(x_j)] = -E[f'(x_j)] delta_ij with f the hyperbolic tangent of the standardised
coordinate, which holds for heavy tails too: the largest of each in standard errors. The largest of many such numbers
is large by chance; `targets` and `posteriors` print beside them the value that exact draws exceed in one case of a
hundred, and with --check fail where one exceeds it, where R-hat is above 1.01 or where fewer than half of the draws
are effective. The table of the manual is that of `targets --show benchmarks/references.json --manual doc`.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
from _expensive import EXPENSIVE
from _harness import VERSIONS, read, rst, save, show_tables
from _shapes import CATALOGUE, LARGE, SHAPES
from paper.public_code import BoundedDiffusion
from posteriors import POSTERIORS, waveform_target
from scipy.stats import norm
from sklearn.datasets import load_diabetes

from skksivi.baselines import MALA
from skksivi.coordinates._affine import Affine
from skksivi.pilot._newton import saddle_free_newton
from skksivi.score._probe import in_double
from skksivi.targets import (
    Banana,
    BayesianNeuralNetwork,
    ConditionedDiffusion,
    EightGaussians,
    Multimodal,
    StudentT,
    XShaped,
)

#: Where `targets` and `posteriors` put their draws.
DIRECTORY = Path(__file__).parents[1] / "build" / "reference"


def network_target(**settings):
    """Return three hidden units that tell the course of diabetes of twenty patients from their body mass index.

    The network is small, for the modes of a larger one are many more than chains can visit.
    """
    X, y = load_diabetes(return_X_y=True, scaled=False)
    return BayesianNeuralNetwork(X[:20, [2]], y[:20], n_hidden=3, **settings)


#: The targets of the package, with the settings of the paper and of the benchmarks.
TARGETS = {
    "banana": Banana,
    "multimodal": Multimodal,
    "x_shaped": XShaped,
    "student": StudentT,
    "ring": EightGaussians,
    "ring_shifted": lambda: EightGaussians(shift=5.0),
    "ring_far": lambda: EightGaussians(shift=10.0),
    "ring_unequal": lambda: EightGaussians(weights=[0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05]),
    "waveform": waveform_target,
    **{f"diffusion_{d}": lambda d=d: ConditionedDiffusion(d) for d in (50, 100, 200)},
    **{f"bounded_{d}": lambda d=d: BoundedDiffusion(d) for d in (50, 100, 200)},
    "network": lambda: network_target(noise_precision=1 / 55**2),
    "network_gamma": lambda: network_target(hyperprior=(2.0, 1.0)),
}

#: What makes a target, by name.
MAKE = {
    **{name: posterior.make for name, posterior in POSTERIORS.items()},
    **EXPENSIVE,
    **SHAPES,
    **LARGE,
    **CATALOGUE,
    **TARGETS,
}


def mala(target, n_draws, *, n_steps=1000, seed=0):
    """Return (n_draws, d) last states of independent chains, preconditioned by the curvature at the mode."""
    q = MALA(n_chains=n_draws, n_warmup=n_steps // 2, n_draws=n_steps // 20, random_state=seed).fit(target)
    chains = torch.as_tensor(q.chains_).transpose(0, 1)
    x = chains[-1]
    return x, {"acceptance": q.acceptance_rate_, "R-hat": r_hat(chains), **stein_identities(target, x)}


def hmc(
    target, n_draws, *, n_chains=1000, n_warmup=40, n_rounds=40, n_trajectories=10, dense=True, adapts=True, seed=0
):
    """Return (n_draws, d) states of `n_chains` chains of Hamiltonian Monte Carlo, those of a chain far apart.

    A round is `n_trajectories`. Those of the warm-up adapt the step to an acceptance of .9, and the metric to the
    covariance of the chains, or where that is not `dense` to their variances; unless it `adapts`, it is the curvature
    at the mode.
    """
    generator = torch.Generator().manual_seed(seed)
    d = target.n_features
    map_, _ = saddle_free_newton(in_double(target.score_fn, d), torch.zeros(d, dtype=torch.float64))
    u = torch.randn(n_chains, d, generator=generator, dtype=torch.float64) / 2
    step = d**-0.25
    for _ in range(n_warmup):
        u, acceptance = trajectories(target, map_, u, step, n_trajectories, generator)
        step = min(step * math.exp(acceptance - 0.9), 1.5)
        if not adapts:
            continue
        x = map_.unwhiten(u)
        map_ = Affine(x.mean(0), torch.linalg.cholesky(x.mT.cov()) if dense else x.std(0).diag())
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


def nuts(target, n_draws, *, n_chains=4, n_warmup=500, seed=0):
    """Return (n_draws, d) states of chains of NUTS by nutpie."""
    from _rivals import NutpieNUTS, Watched  # which are judged by references

    n = -(-n_draws // n_chains)
    found = NutpieNUTS(n_chains=n_chains, n_warmup=n_warmup, n_draws=n, random_state=seed).fit(Watched(target))
    chains = torch.as_tensor(found.draws_).view(n_chains, n, -1).transpose(0, 1)
    return chains.flatten(0, 1)[:n_draws], {"R-hat": r_hat(chains), "ESS": found.n_effective_}


def trajectories(target, map_, u, step, n_trajectories, generator):
    """Return the chains u (n, d) after some trajectories of length 0 to 2, and the share that was accepted."""

    def log_prob(u):
        return target.log_prob(map_.unwhiten(u)).nan_to_num(nan=-math.inf)

    def score_fn(u):
        return map_.whiten_score(target.score_fn(map_.unwhiten(u)))

    log_p, s = log_prob(u), score_fn(u)
    accepted = 0.0
    for _ in range(n_trajectories):
        h = step * torch.rand(len(u), 1, generator=generator, dtype=u.dtype)
        p = torch.randn(u.shape, generator=generator, dtype=u.dtype)
        v, s_v, q = u, s, p
        for _ in range(math.ceil(2 / step)):
            q = q + h / 2 * s_v
            v = v + h * q
            s_v = score_fn(v)
            q = q + h / 2 * s_v
        log_p_v = log_prob(v)
        log_ratio = (log_p_v - q.square().sum(-1) / 2) - (log_p - p.square().sum(-1) / 2)
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
    """Return the largest violations of Stein's identities by x (n, d), in standard errors."""
    s, n = target.score_fn(x), len(x)
    quartiles = x.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=x.dtype), 0)
    f = ((x - quartiles[1]) / (quartiles[2] - quartiles[0])).tanh()
    slope = (1 - f.square()) / (quartiles[2] - quartiles[0])

    def violation(f, slope):
        """Return that of E[s_i f_j + slope_j delta_ij] = 0, from the first two moments of the products."""
        mean, square = s.mT @ f / n, s.square().mT @ f.square() / n
        cross, squares = (s * f * slope).mean(0), slope.square().mean(0)
        square += torch.diag(2 * cross + squares)
        mean += torch.diag(slope.mean(0))
        return (mean / (square - mean.square()).sqrt()).abs().max().item() * n**0.5

    return {
        "E[s], se": (s.mean(0) / s.std(0)).abs().max().item() * n**0.5,
        "E[s x] + I, se": violation(x - x.mean(0), torch.ones_like(x)),
        "E[s f] + E[f'], se": violation(f, slope),
    }


def largest_by_chance(d):
    """Return what the largest of the d + 2 d^2 numbers behind `stein_identities` exceeds in one case of a hundred."""
    return norm.isf(0.01 / 2 / (d + 2 * d**2))


def reference(name, directory=DIRECTORY, n_draws=4000):
    """Return the draws (n_draws, d) of a target of `MAKE`, float64, made where there is no file."""
    path = Path(directory) / f"{name}.npz"
    if not path.exists():
        start = time.perf_counter()
        x, diagnostics = exact_draws(MAKE[name](), n_draws)
        diagnostics["seconds"] = time.perf_counter() - start
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, draws=x.numpy(), **diagnostics)
    return np.load(path)["draws"]


def exact_draws(target, n_draws):
    """Return draws of the target, in the way that suits it best, and their diagnostics."""
    if hasattr(target, "easier"):
        x, diagnostics = exact_draws(target.easier, n_draws)
        x = target.from_easier(x)
    elif hasattr(target, "sample"):
        x = target.sample(n_draws, torch.Generator().manual_seed(1))
        diagnostics = {"R-hat": 1.0, "ESS": float(n_draws)}
    elif hasattr(target, "nuts"):
        x, diagnostics = nuts(target, n_draws, **target.nuts)
    else:
        tries = [target.hmc] if hasattr(target, "hmc") else [{"n_trajectories": n} for n in (10, 30, 100)]
        for settings in tries:
            x, diagnostics = hmc(target, n_draws, **settings)
            if diagnostics["R-hat"] < 1.01 and diagnostics["ESS"] > n_draws / 2:
                break
    return x, diagnostics


def checked(name, directory, n_draws):
    """Return the row of a reference: its size, its diagnostics, its violations and the value that these may reach."""
    x = torch.as_tensor(reference(name, directory, n_draws))
    kept = np.load(directory / f"{name}.npz")
    R, ess, seconds = (float(kept.get(key, math.nan)) for key in ("R-hat", "ESS", "seconds"))
    violations = list(stein_identities(MAKE[name](), x).values())
    bound = largest_by_chance(x.shape[1])
    print(f"{name}: {seconds:.1f} s", file=sys.stderr, flush=True)
    return {
        "case": name,
        "d": x.shape[1],
        "draws": len(x),
        "R-hat": R,
        "ESS": ess,
        "violations": violations,
        "bound": bound,
        "seconds": seconds,
        "trusted": bool(max(violations) < bound and R < 1.01 and ess > len(x) / 2),
    }


def table(rows):
    lines = []
    for row in rows:
        r_hat = f"{row['R-hat']:.3f}" if row["R-hat"] != 1 else ""
        numbers = (f"{value:.2f}" for value in (*row["violations"], row["bound"]))
        lines.append((row["case"], row["d"], r_hat, f"{row['ESS']:.0f}", *numbers))
    return rst(("Target", "d", "R-hat", "ESS", "s", "s x", "s f", "1%"), lines)


def show_checked(args):
    """Make, check and show the references, or show the results of a file."""
    if args.show:
        document = read(args.show)
    else:
        rows = [checked(name, args.out, args.draws) for name in args.names or args.table]
        document = {"settings": {"draws": args.draws}, "rows": rows, "versions": VERSIONS}
        save(args.json, document)
    show_tables(args, {"references": table(document["rows"])})
    suspects = [row["case"] for row in document["rows"] if not row["trusted"]]
    if args.check and suspects:
        raise SystemExit(f"Not to be trusted: {', '.join(suspects)}.")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    waveform, targets, posteriors = map(commands.add_parser, ("waveform", "targets", "posteriors"))
    waveform.add_argument("out", type=Path, nargs="?")
    waveform.add_argument("--steps", type=int, default=1000)
    for command, table in (targets, TARGETS), (posteriors, {**POSTERIORS, **EXPENSIVE, **SHAPES, **LARGE}):
        command.add_argument("names", nargs="*", metavar="NAME", help="all of them by default: " + ", ".join(table))
        command.add_argument("--out", type=Path, default=DIRECTORY)
        command.add_argument("--draws", type=int, default=4000)
        command.add_argument("--check", action="store_true", help="fail where draws are not to be trusted")
        command.add_argument("--json", type=Path, help="keep the checks in this file")
        command.add_argument(
            "--show", type=Path, metavar="FILE", help="show the checks of this file, and run nothing"
        )
        command.add_argument("--manual", type=Path, metavar="FOLDER", help="write the table where the manual has it")
        command.set_defaults(table=table)
    args = parser.parse_args()
    if "table" in args:
        show_checked(args)
        return
    import skksivi.datasets

    out = args.out or Path(skksivi.datasets.__file__).parent / "data" / "waveform_posterior.npz"
    x, diagnostics = mala(waveform_target(), 2000, n_steps=args.steps)
    np.savez_compressed(out, draws=x.numpy().astype(np.float32))
    print(f"{len(x)} draws in {out}:", ", ".join(f"{key} {value:.4g}" for key, value in diagnostics.items()))


if __name__ == "__main__":
    main()
