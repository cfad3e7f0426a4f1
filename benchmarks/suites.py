"""The targets of the public suites: distances, bounds and second moments of the defaults, their rivals and NUTS.

python benchmarks/suites.py [--names ...] [--methods ...] [--seeds 3] [--data FOLDER] [--out FILE.json]
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

Defaults everywhere; methods that are slow have the iterations of benchmarks/comparison.py. --data names a folder with
the files ionosphere.data, sonar.all-data and german.data-numeric of the UCI repository; without it the four logistic
regressions, as the items, the returns and the counts, have generated data of the same shape.
"""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from _harness import command, load, of, pairs, read, rst, run_missing, write_tables
from _rivals import NutpieNUTS, SpentError, Watched, missing
from comparison import FEWER
from paper._base import few
from reference import DIRECTORY, exact_draws, nuts

from skksivi import KSIVIApproximator, baselines, targets
from skksivi.metrics import noise_floor, sliced_wasserstein

N_REFERENCE, N_DISTANCE, N_MOMENTS, N_BOUND, MAX_BOUND = 8000, 2000, 10_000, 400, 40

#: Chains of the references without an exact sampler.
HMC = {"n_chains": 400, "n_warmup": 30, "n_rounds": 40, "n_trajectories": 5}

#: Those on which such chains do not agree, whose references are by NUTS.
STIFF = {"Brownian bridge", "sparse German credit", "volatility"}

#: Evaluations after which NUTS is stopped.
LIMIT = 300_000


# Data


class Table(NamedTuple):
    """A file of the UCI repository: its name, the shape of X, and the label that counts as one."""

    file: str
    shape: tuple[int, int]
    one: str


TABLES = {
    "german": Table("german.data-numeric", (1000, 24), "1"),
    "ionosphere": Table("ionosphere.data", (351, 34), "g"),
    "sonar": Table("sonar.all-data", (208, 60), "M"),
}


def read_table(path, table):
    """Return X and y of an original file; stop where it is another."""
    rows = [line.replace(",", " ").split() for line in path.read_text().splitlines() if line.strip()]
    labels = {row[-1] for row in rows}
    if {len(row) for row in rows} != {table.shape[1] + 1} or len(rows) != table.shape[0] or len(labels) != 2:
        raise SystemExit(f"{path} is no table of {table.shape[0]} rows with {table.shape[1]} numbers and a label.")
    return np.array([row[:-1] for row in rows], dtype=float), np.array([row[-1] == table.one for row in rows])


def generated(table):
    """Return X and y of the same shape, with coefficients from N(0, 1 / 4)."""
    rng = np.random.RandomState(table.shape[1])
    X = rng.standard_normal(table.shape) @ (np.eye(table.shape[1]) + 0.2 * rng.standard_normal(2 * table.shape[1:]))
    eta = X @ rng.normal(0, 0.5, table.shape[1])
    return X, rng.uniform(size=len(X)) < 1 / (1 + np.exp(-eta))


def design(name, folder):
    """Return the standardised table with a column of ones before it, and y."""
    table = TABLES[name]
    X, y = generated(table) if folder is None else read_table(folder / table.file, table)
    sd = X.std(0)
    return np.column_stack([np.ones(len(X)), (X - X.mean(0)) / np.where(sd > 0, sd, 1)]), y


def sources(folder):
    """Return where the tables come from: the sha256 of each, or that they are generated."""
    if folder is None:
        return dict.fromkeys(TABLES, "generated")
    return {name: hashlib.sha256((folder / table.file).read_bytes()).hexdigest() for name, table in TABLES.items()}


# Targets


def logistic(name, folder):
    return targets.BayesianLogisticRegression(*design(name, folder), prior_precision=1.0)


def sparse(name, folder):
    return targets.SparseLogisticRegression(*design(name, folder))


def forty(_):
    """Forty Gaussians in the square [-40, 40]^2, at the points of the public suites."""
    means = 80 * (torch.rand(40, 2, generator=torch.Generator().manual_seed(0)) - 0.5)
    return targets.GaussianMixture(means.numpy(), math.log1p(math.e) ** 2)


def items(_):
    """Four hundred students and a hundred questions, 30,012 answers."""
    rng = np.random.RandomState(1)
    a, b = rng.standard_normal((400, 1)), rng.standard_normal(100)
    Y = (rng.uniform(size=(400, 100)) < 1 / (1 + np.exp(b - a - 0.75))).astype(float)
    Y.ravel()[rng.permutation(Y.size)[30_012:]] = np.nan
    target = targets.ItemResponse(Y)
    target.hmc = {"dense": False, "n_chains": 100, "n_warmup": 10, "n_rounds": 80, "n_trajectories": 3}
    return target


def volatility(_):
    """A hundred returns."""
    rng = np.random.RandomState(2)
    h = [0.0]
    for z in rng.standard_normal(99):
        h.append(0.95 * h[-1] + 0.25 * z)
    return targets.StochasticVolatility(np.exp(np.array(h) / 2 - 4.5) * rng.standard_normal(100))


def pines(_):
    """About 126 points in 1,600 cells, with the covariance of the Finnish pines."""
    rng, M = np.random.RandomState(3), 40
    r = np.stack(np.meshgrid(np.arange(M), np.arange(M), indexing="ij"), -1).reshape(-1, 2)
    K = 1.91 * np.exp(-np.linalg.norm(r[:, None] - r, axis=2) * 33 / M)
    x = math.log(126) - 1.91 / 2 + np.linalg.cholesky(K + 1e-9 * np.eye(M**2)) @ rng.standard_normal(M**2)
    target = targets.LogGaussianCox(rng.poisson(np.exp(x) / M**2).reshape(M, M))
    target.hmc = {"n_chains": 200, "n_warmup": 0, "n_rounds": 40, "n_trajectories": 2}
    return target


CASES = {
    "funnel": lambda _: targets.Funnel(),
    "many wells": lambda _: targets.ManyWell(),
    "forty Gaussians": forty,
    "Rosenbrock": lambda _: targets.Rosenbrock(),
    "Brownian bridge": lambda _: targets.BrownianBridge(),
    "seeds": lambda _: targets.SeedGermination(),
    "German credit": partial(logistic, "german"),
    "sparse German credit": partial(sparse, "german"),
    "ionosphere": partial(logistic, "ionosphere"),
    "sonar": partial(logistic, "sonar"),
    "volatility": volatility,
    "item response": items,
    "pines": pines,
}
#: Those on which the slow methods are left out.
LARGE = {"item response", "pines"}
SLOW = {"AISIVI", "UIVI", "SIVISM", "NUTS"}
#: Those whose second moments are those of a few draws.
WITHOUT_MOMENTS = {"funnel"}


# Methods


def baseline(name, **settings):
    return partial(getattr(baselines, name), **settings, **({"max_iter": FEWER[name]} if name in FEWER else {}))


METHODS = {
    "KSIVI": KSIVIApproximator,
    **{name: baseline(name) for name in ("SIVI", "SIVISM", "UIVI", "KPG", "AISIVI", "PVI", "SIFG")},
    "KPG-IS": baseline("KPG", importance_sampling=True),
    "NUTS": NutpieNUTS,
}
VARIATIONAL = [name for name in METHODS if name != "NUTS"]


# Runs


def reference_path(name, folder, n_draws):
    """Return where reference draws are kept."""
    kind = "generated" if folder is None else "original"
    return DIRECTORY / "suites" / f"{name.replace(' ', '_')}_{kind}_{n_draws}.npz"


def reference(name, folder, n_draws=N_REFERENCE):
    """Return reference draws (n_draws, d), made where there is no file."""
    path = reference_path(name, folder, n_draws)
    if not path.exists():
        target = CASES[name](folder)
        target.hmc = getattr(target, "hmc", HMC)
        x, diagnostics = nuts(target, n_draws, n_chains=8) if name in STIFF else exact_draws(target, n_draws)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, draws=x.numpy(), **diagnostics)
    return np.load(path)["draws"]


def r_hat_of(name, folder, n_draws):
    """Return the R-hat of the chains behind reference draws, one for exact ones."""
    return float(np.load(reference_path(name, folder, n_draws))["R-hat"])


@cache
def case(name, folder, n_draws):
    """Return the target and its reference draws."""
    return CASES[name](folder), reference(name, folder, n_draws)


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


def run(name, method, seed, folder, args):
    torch.set_num_threads(1)
    target, Y = case(name, folder, 200 if args.quick else N_REFERENCE)
    q = METHODS[method](random_state=seed)
    q.set_params(**few(q, args))
    watched, start = Watched(target, LIMIT if method == "NUTS" else math.inf), time.process_time()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            q.fit(watched)
        except (SpentError, FloatingPointError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not watched.spent:  # nutpie's, of what the model raised
                raise
            return {"failed": type(error).__name__}
    row = {"seconds": time.process_time() - start, "calls": watched.n_points[0]}
    X = q.sample(N_MOMENTS, random_state=seed).astype(float)
    rng = np.random.RandomState(seed)
    row |= {"warned": sorted({w.category.__name__ for w in told}), "w2": distance(X, rng.permutation(Y))}
    row |= {} if name in WITHOUT_MOMENTS else squared_bias(X, Y)
    knows = hasattr(q, "score_samples") and target.n_features <= MAX_BOUND
    return row | (bounds(q, target, X, Y) if knows else {})


def study(args):
    """Run what is not in the file yet; return the document of the results, with the floors."""
    document = load(args.out, {"quick": args.quick, "data": sources(args.data)})
    floors = document.setdefault("floors", {})
    methods = [name for name in args.methods if missing(METHODS[name]) is None]
    for name in args.names:
        _, Y = case(name, args.data, 200 if args.quick else N_REFERENCE)
        n = min(N_DISTANCE, len(Y) // 2)
        floor = noise_floor(partial(sliced_wasserstein, random_state=0), Y, n, n_repeats=5, random_state=0)._asdict()
        floors[name] = floor | {"d": Y.shape[1], "r_hat": r_hat_of(name, args.data, len(Y))}
        jobs = [
            (name, method, seed)
            for seed in range(args.seeds)
            for method in methods
            if not (name in LARGE and method in SLOW)
        ]
        run_missing(document, args.out, jobs, partial(run, folder=args.data, args=args))
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
        own = [[r for r in rows if (r["case"], r["method"]) == (name, m)] for m in methods]
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


def wins(document):
    """Return on which targets ours is the first of the variational methods, within it, and the others."""
    first, behind = [], []
    for name, floor in document["floors"].items():
        means = {}
        for case_, method in pairs(document["rows"]):
            values = of(document["rows"], "w2", case=name, method=method)
            if case_ == name and method in VARIATIONAL and values:
                means[method] = np.mean(values)
        if "KSIVI" in means:
            noise = 2 * floor["sd"]
            (first if means["KSIVI"] <= min(means.values()) + noise else behind).append(name)
    return first, behind


def main():
    parser = command(__doc__)
    parser.add_argument("--names", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="original files of the UCI repository")
    args = parser.parse_args()
    if args.quick and args.names == list(CASES):
        args.names, args.methods, args.seeds = ["seeds", "forty Gaussians"], ["KSIVI", "KPG", "PVI"], 1
    document = read(args.out if args.show is True else args.show) if args.show else study(args)
    found = {f"suites_{name}": table(document, cell) for name, cell in TABLES_OF.items()}
    print("\n".join(f"{name}\n{text}" for name, text in found.items()))
    if args.manual:
        write_tables(args.manual, found)
    first, behind = wins(document)
    print(f"First of the variational methods within the noise on {len(first)} targets, not on: {', '.join(behind)}.")


if __name__ == "__main__":
    main()
