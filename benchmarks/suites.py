"""The targets of the public suites: distances, bounds and second moments of the defaults, their rivals and NUTS.

python benchmarks/suites.py [--names ...] [--methods ...] [--seeds 3] [--out FILE.json]
python benchmarks/suites.py --show benchmarks/suites.json --manual doc      the tables of the manual

Reference draws are exact where there is a sampler, else those of many chains of Hamiltonian Monte Carlo
(benchmarks/reference.py) or a few long ones of NUTS, in build/reference/suites; their R-hat is in the tables. Shown
are, for each target and method,

- the sliced Wasserstein distance W2 of 2,000 draws to as many reference draws, over its floor between two sets of
  reference draws;
- b^2, the mean over coordinates of (E_q x_i^2 - E_p x_i^2)^2 / Var_p x_i^2 by 10,000 draws, which is about 1 / n_eff
  of n_eff independent draws;
- EUBO - ELBO = KL(p || q) + KL(q || p) in nats, by 400 draws of each, for fits with a density and 40 features or
  fewer; the json has both bounds;
- the points at which the score was evaluated, and seconds of one thread.

Defaults everywhere; methods that are slow have the iterations of benchmarks/comparison.py. The four logistic
regressions and the returns have generated data, in the shapes of the originals.
"""

from __future__ import annotations

import math
from functools import cache, partial

import numpy as np
import torch
from _harness import OURS, command, load, rst, run_missing, select, show_tables, shown, watched
from _rivals import NutpieNUTS, Watched, missing
from _suites import (
    BrownianBridge,
    ManyWell,
    Rosenbrock,
    SeedGermination,
    SparseLogisticRegression,
    StochasticVolatility,
)
from comparison import FEWER
from paper._base import few
from reference import DIRECTORY, exact_draws, nuts

from skksivi import KSIVIApproximator, baselines, targets
from skksivi.metrics import noise_floor, sliced_wasserstein

N_REFERENCE, N_DISTANCE, N_MOMENTS, N_BOUND, MAX_BOUND = 8000, 2000, 10_000, 400, 40

#: Chains of the references without an exact sampler.
HMC = {"n_chains": 400, "n_warmup": 30, "n_rounds": 40, "n_trajectories": 20}

#: Those on which such chains do not agree, whose references are by NUTS.
STIFF = {"Brownian bridge", "sparse German credit", "volatility"}

#: Evaluations after which NUTS is stopped.
LIMIT = 300_000


# Data


#: The shapes of X of UCI's tables.
SHAPES = {"german": (1000, 24), "ionosphere": (351, 34), "sonar": (208, 60)}


def design(name):
    """Return correlated columns of that shape, standardised, below a column of ones, and y; beta ~ N(0, 1 / 4)."""
    n, p = SHAPES[name]
    rng = np.random.RandomState(p)
    X = rng.standard_normal((n, p)) @ (np.eye(p) + 0.2 * rng.standard_normal((p, p)))
    eta = X @ rng.normal(0, 0.5, p)
    y = rng.uniform(size=n) < 1 / (1 + np.exp(-eta))
    return np.column_stack([np.ones(n), (X - X.mean(0)) / X.std(0)]), y


# Targets


def logistic(name):
    return targets.BayesianLogisticRegression(*design(name), prior_precision=1.0)


def forty():
    """Forty Gaussians in the square [-40, 40]^2, at the points of the public suites."""
    means = 80 * (torch.rand(40, 2, generator=torch.Generator().manual_seed(0)) - 0.5)
    return targets.GaussianMixture(means.numpy(), math.log1p(math.e) ** 2)


def volatility():
    """A hundred returns."""
    rng = np.random.RandomState(2)
    h = [0.0]
    for z in rng.standard_normal(99):
        h.append(0.95 * h[-1] + 0.25 * z)
    return StochasticVolatility(np.exp(np.array(h) / 2 - 4.5) * rng.standard_normal(100))


CASES = {
    "funnel": targets.Funnel,
    "many wells": ManyWell,
    "forty Gaussians": forty,
    "Rosenbrock": Rosenbrock,
    "Brownian bridge": BrownianBridge,
    "seeds": SeedGermination,
    "German credit": partial(logistic, "german"),
    "sparse German credit": lambda: SparseLogisticRegression(*design("german")),
    "ionosphere": partial(logistic, "ionosphere"),
    "sonar": partial(logistic, "sonar"),
    "volatility": volatility,
}
#: Those whose second moments are those of a few draws.
WITHOUT_MOMENTS = {"funnel"}


# Methods


def baseline(name, **settings):
    return partial(getattr(baselines, name), **settings, **({"max_iter": FEWER[name]} if name in FEWER else {}))


METHODS = {
    OURS: KSIVIApproximator,
    **{name: baseline(name) for name in ("SIVI", "SIVISM", "UIVI", "KPG", "AISIVI", "PVI", "SIFG")},
    "KPG-IS": baseline("KPG", importance_sampling=True),
    "NUTS": NutpieNUTS,
}


# Runs


def reference(name, n_draws=N_REFERENCE):
    """Return reference draws (n_draws, d), made where there is no file, and their R-hat."""
    path = DIRECTORY / "suites" / f"{name.replace(' ', '_')}_generated_{n_draws}.npz"
    if not path.exists():
        target = CASES[name]()
        target.hmc = getattr(target, "hmc", HMC)
        x, diagnostics = nuts(target, n_draws, n_chains=8) if name in STIFF else exact_draws(target, n_draws)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, draws=x.numpy(), **diagnostics)
    kept = np.load(path)
    return kept["draws"], float(kept["R-hat"])


@cache
def case(name, n_draws):
    """Return the target, its reference draws and their R-hat."""
    return CASES[name](), *reference(name, n_draws)


def distance(X, Y):
    return sliced_wasserstein(X[:N_DISTANCE], Y[:N_DISTANCE], random_state=0)


def squared_bias(X, Y):
    """Return the mean over coordinates of b^2, and the largest."""
    b2 = ((X**2).mean(0) - (Y**2).mean(0)) ** 2 / (Y**2).var(0)
    return {"b2": float(b2.mean()), "b2_max": float(b2.max())}


def bounds(q, target, X, Y):
    """Return ELBO and EUBO with standard errors, in nats, up to the constant of log p."""
    found = {}
    for key, x in (("elbo", X[:N_BOUND]), ("eubo", Y[:N_BOUND])):
        with torch.no_grad():
            log_p = target.log_prob(torch.as_tensor(x)).numpy()
        differences = log_p - q.score_samples(x, return_std=True)[0]
        found |= {key: float(differences.mean()), f"{key}_se": float(differences.std() / len(x) ** 0.5)}
    return found


def run(name, method, seed, args):
    torch.set_num_threads(1)
    target, Y, _ = case(name, 200 if args.quick else N_REFERENCE)
    q = METHODS[method](random_state=seed)
    q.set_params(**few(q, args))
    counted = Watched(target, LIMIT if method == "NUTS" else math.inf)
    try:
        with watched() as costs:
            q.fit(counted)
    except (FloatingPointError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not counted.spent:  # nutpie's, of what the model raised
            raise
        return {"failed": type(error).__name__}
    row = {**costs, "calls": counted.n_points[0]}
    X = q.sample(N_MOMENTS, random_state=seed).astype(float)
    rng = np.random.RandomState(seed)
    row["w2"] = distance(X, rng.permutation(Y))
    row |= {} if name in WITHOUT_MOMENTS else squared_bias(X, Y)
    knows = hasattr(q, "score_samples") and target.n_features <= MAX_BOUND
    return row | (bounds(q, target, X, Y) if knows else {})


def study(args):
    """Run what is not in the file yet; return the document of the results, with the floors."""
    document = load(args.out, {"quick": args.quick})
    floors = document.setdefault("floors", {})
    methods = [name for name in args.methods if missing(METHODS[name]) is None]
    for name in args.names:
        _, Y, r_hat = case(name, 200 if args.quick else N_REFERENCE)
        n = min(N_DISTANCE, len(Y) // 2)
        floor = noise_floor(partial(sliced_wasserstein, random_state=0), Y, n, n_repeats=5, random_state=0)._asdict()
        floors[name] = floor | {"d": Y.shape[1], "r_hat": r_hat}
        jobs = [(name, method, seed) for seed in range(args.seeds) for method in methods]
        run_missing(document, args.out, jobs, partial(run, args=args))
    return document


# Tables


def told(values, digits=1):
    """Return the mean of some numbers as a cell."""
    mean = float(np.mean(values)) if values else math.nan
    if not math.isfinite(mean):
        return "\\-"
    return f"{mean:.{digits}f}" if mean < 1000 else ">1000"


def table(document, cell):
    """Return a table of targets by methods."""
    rows = document["rows"]
    methods = [name for name in METHODS if any(row["method"] == name for row in rows)]
    lines = []
    for name, floor in document["floors"].items():
        own = [select(rows, case=name, method=method) for method in methods]
        lines.append((name, floor["d"], f"{floor['r_hat']:.2f}", *(cell(found, floor) for found in own)))
    return rst(("Target", "d", "R-hat", *methods), lines)


def by_distance(found, floor):
    """Return W2 over its floor, with a star where a fit has warned."""
    values = [r["w2"] / floor["mean"] for r in found if "w2" in r]
    star = "\\*" if any(r.get("warned") for r in found) else ""
    return told(values) + star if values else ("failed" if found else "\\-")


def by_moments(found, _):
    values = [r["b2"] for r in found if "b2" in r]
    return f"{np.mean(values):.0e}" if values else "\\-"


def by_bounds(found, _):
    return told([r["eubo"] - r["elbo"] for r in found if "elbo" in r], 2)


def by_calls(found, _):
    values = [r["calls"] for r in found if "calls" in r]
    return f"{np.median(values) / 1e3:,.0f}k" if values else "\\-"


def by_seconds(found, _):
    return told([r["seconds"] for r in found if "seconds" in r], 0)


TABLES_OF = {
    "distances": by_distance,
    "bounds": by_bounds,
    "moments": by_moments,
    "calls": by_calls,
    "seconds": by_seconds,
}


def main():
    args = command(__doc__, names=CASES, methods=METHODS).parse_args()
    if args.quick and args.names == list(CASES):
        args.names, args.methods, args.seeds = ["seeds", "forty Gaussians"], [OURS, "KPG", "PVI"], 1
    document = shown(args) or study(args)
    show_tables(args, {f"suites_{name}": table(document, cell) for name, cell in TABLES_OF.items()})


if __name__ == "__main__":
    main()
