"""Many modes and heavy tails: rings, the paper's Student target, and the eight schools.

python benchmarks/hierarchy.py [rings student schools] [--seeds 3] [--quick] [--out FILE.json]
python benchmarks/hierarchy.py schools --show benchmarks/schools.json --manual doc      the table of the manual

Rings: the share of each mode against its weight (largest relative error), the standard deviations within modes (1 is
right) and the share of draws beyond 5 from every mode. The paper's ring, the same shifted by 5 and by 10, and unequal
weights.
Student: squared Wasserstein distance in the boxes [-a, a]^2, 1,000 draws against 10,000 exact ones, means over three
sets. Exact draws give the floor, in the same units.
Schools: quantiles of the spread between schools with their standard errors, by a default fit and by NumPyro's NUTS,
one chain at target_accept_prob=0.95, in float64; calls are those of the fit, or of the chain with its warm-up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from _harness import OURS, command, exact, of, pairs, results, rst, show_tables, spread, watched
from _metrics import wasserstein_in_box

from skksivi import HKSIVIApproximator, KSIVIApproximator, mixing, paper_settings, summary
from skksivi.baselines import SIVI
from skksivi.kernels import Riesz
from skksivi.targets import EightGaussians, StudentT, from_numpyro

WEIGHTS = [0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05]
RINGS = {
    "ring": EightGaussians(),
    "shifted by 5": EightGaussians(shift=5.0),
    "shifted by 10": EightGaussians(shift=10.0),
    "unequal": EightGaussians(weights=WEIGHTS),
    "unequal, shifted by 10": EightGaussians(shift=10.0, weights=WEIGHTS),
}
#: The single layer of the paper, from N(0, I) and without whitening, trained as by default.
LAYER = (
    "whiten", "mixing", "latent_dim", "hidden_layer_sizes", "initial_scale", "kernel", "bandwidth"
)  # fmt: skip
PAPER = {name: paper_settings("x-shaped")[name] for name in LAYER}
#: Of the Student target: what the tails need is a heavy-tailed mixing distribution; the start is narrow.
STUDENT = {"kernel": Riesz(), "bandwidth": "median", "whiten": "laplace", "batch_size": 500, "learning_rate": 1e-3}
BY_PATH = STUDENT | {"method": "path", "mixing": "normal", "kernel": "gaussian"}
STUDENT_METHODS = {
    "HKSIVI, Riesz, pilot": lambda: HKSIVIApproximator(kernel=Riesz()),
    "HKSIVI, t base": lambda: HKSIVIApproximator(mixing=mixing.StudentT(2.0), bridge="none", **STUDENT),
    "HKSIVI, normal base": lambda: HKSIVIApproximator(mixing="normal", bridge="none", **STUDENT),
    "KSIVI, Riesz, pilot": lambda: KSIVIApproximator(kernel=Riesz()),
    "KSIVI, Riesz, t mixing": lambda: KSIVIApproximator(mixing=mixing.StudentT(2.0), **STUDENT),
    "KSIVI, Riesz, normal": lambda: KSIVIApproximator(mixing="normal", **STUDENT),
    "path gradient, normal": lambda: KSIVIApproximator(**BY_PATH),
    OURS: lambda: KSIVIApproximator(),
    "SIVI": lambda: SIVI(whiten=None),
}


def shares_of(X: np.ndarray, target: EightGaussians) -> tuple[np.ndarray, np.ndarray, float]:
    squares = ((X[:, None] - target.means.numpy()) ** 2).sum(-1)
    k = squares.argmin(1)
    sd = np.array([X[k == j].std(0) if (k == j).sum() > 10 else np.full(2, np.nan) for j in range(8)])
    return np.bincount(k, minlength=8) / len(X), sd, float((squares.min(1) > 25).mean())


RING_METHODS = {
    "one layer, path gradient": lambda: KSIVIApproximator(method="path", **PAPER),
    "SIVI": lambda: SIVI(whiten=None),
    OURS: lambda: KSIVIApproximator(),
    "HKSIVI, from N(0, I)": lambda: HKSIVIApproximator(whiten=None, mixing="normal"),
    "HKSIVI, defaults": lambda: HKSIVIApproximator(),
}


#: A target, the one whose exact draws are the truth, and the map of draws of the first to those of the second.
def non_centred(model: Callable[..., None]) -> Callable[..., None]:
    """Return the eight schools with standardised effects."""
    from numpyro.handlers import reparam
    from numpyro.infer.reparam import LocScaleReparam

    return reparam(model, config={"theta": LocScaleReparam(0)})


#: The forms of the eight schools, and quantiles of their spread.
FORMS, LEVELS = {"non-centred": non_centred, "centred": lambda model: model}, (0.05, 0.5, 0.95)
SCHOOLS_METHODS = ("skksivi", "NUTS")
EDGES, EXACT = (5, 8, 10), "exact draws"
#: Squared distances in the boxes, as printed in the paper.
OF_PAPER = {
    "the paper's HKSIVI": (0.042, 0.071, 0.110),
    "the paper's KSIVI, Riesz": (0.045, 0.082, 0.114),
    "the paper's SIVI": (0.081, 0.166, 0.223),
}


def ring(case: str, method: str, seed: int, max_iter: int, n: int) -> dict[str, Any]:
    target = RINGS[case]
    if method == EXACT:
        X = exact(target, 20 * n, seed)
    else:
        q = RING_METHODS[method]().set_params(random_state=seed, max_iter=max_iter).fit(target)
        X = q.sample(20 * n, random_state=seed).astype(float)
    shares, sd, off = shares_of(X, target)
    weights = target.weights.numpy()
    return {
        "modes": int((shares > 0.1 * weights).sum()),
        "error": np.abs(shares / weights - 1).max(),
        "ratio": shares.max() / max(shares.min(), 1e-9),
        "sds": (np.nanmin(sd), np.nanmax(sd)),
        "off": off,
    }


def student(_case: str, method: str, seed: int, max_iter: int, n: int) -> dict[str, Any]:
    target = StudentT()
    if method == EXACT:
        X = exact(target, 3 * n, seed)
    else:
        q = STUDENT_METHODS[method]().set_params(random_state=seed)
        if "defaults" not in method:
            q.set_params(max_iter=max_iter)
        X = q.fit(target).sample(3 * n, random_state=seed).astype(float)
    sets = [(X[n * r : n * (r + 1)], exact(target, 10 * n, 100 + r)) for r in range(3)]
    return {"costs": [np.mean([wasserstein_in_box(x, y, a) for x, y in sets]) for a in EDGES]}


def eight_schools(y, se):
    """State the model in NumPyro."""
    import numpyro
    from numpyro import distributions as dist

    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("school", 8):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, se), obs=y)


def schools(case: str, method: str, seed: int, _max_iter: int | None, n: int) -> dict[str, Any]:
    import jax
    import numpyro
    from arviz_stats.base import array_stats

    numpyro.enable_x64()
    model = FORMS[case](eight_schools)
    data = np.array([[28.0, 8, -3, 7, -1, 1, 18, 12], [15.0, 10, 16, 11, 9, 11, 10, 18]])
    if method == "skksivi":
        target = from_numpyro(model, *data)
        q = KSIVIApproximator(random_state=seed).fit(target)
        tau = summary(q, target, random_state=seed).to_frame().loc["tau"]
        quantiles = [[tau[f"{level:.0%}{which}"] for level in LEVELS] for which in ("", "_se")]
        return {"quantiles": quantiles, "calls": q.n_score_calls_}
    nuts = numpyro.infer.NUTS(model, target_accept_prob=0.95)
    mcmc = numpyro.infer.MCMC(nuts, num_warmup=n, num_samples=2 * n, progress_bar=False)
    mcmc.warmup(jax.random.PRNGKey(seed), *data, extra_fields=("num_steps",), collect_warmup=True)
    calls = int(mcmc.get_extra_fields()["num_steps"].sum())
    mcmc.run(mcmc.post_warmup_state.rng_key, *data, extra_fields=("num_steps", "diverging"))
    tau, fields = np.asarray(mcmc.get_samples(group_by_chain=True)["tau"]), mcmc.get_extra_fields()
    errors = [float(array_stats.mcse(tau, method="quantile", prob=level)) for level in LEVELS]
    return {
        "quantiles": [np.quantile(tau, LEVELS).tolist(), errors],
        "calls": calls + int(fields["num_steps"].sum()),
        "n_effective": float(array_stats.ess(tau)),
        "divergences": int(fields["diverging"].sum()),
    }


#: Of each study the function, its cases, its methods and their iterations.
STUDIES = {
    "rings": (ring, RINGS, RING_METHODS, 1500),
    "student": (student, {"student": None}, STUDENT_METHODS, 3000),
    "schools": (schools, FORMS, SCHOOLS_METHODS, None),
}


def run(case: str, method: str, seed: int, quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    study, _, _, max_iter = next(study for study in STUDIES.values() if case in study[1])
    with watched() as costs:
        row = study(case, method, seed, *((50, 50) if quick else (max_iter, 1000)))
    return row | {"seconds": costs["seconds"]}


# The tables


def to(values: list[float], digits: int) -> str:
    """Return the cell of the smallest and the largest value."""
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if len(values) == 1 else f"{low} - {high}"


def ring_line(found: dict[str, list]) -> tuple[str, ...]:
    present = min(found["modes"])
    ratio = f"{max(found['ratio']):.2f}" if present == 8 else ""
    sds = to([sd for pair in found["sds"] for sd in pair], 2)
    return f"{present} of 8", f"{max(found['error']):.1%}", ratio, sds, f"{max(found['off']):.2%}"


def student_line(found: dict[str, list]) -> tuple[str, ...]:
    return tuple(spread(list(costs)) for costs in zip(*found["costs"], strict=True))


def schools_line(found: dict[str, list]) -> tuple[str, ...]:
    values, errors = np.array(found["quantiles"]).transpose(1, 2, 0)
    notes = ""
    if found["divergences"]:
        notes = f"{np.median(found['divergences']):.0f}; {np.median(found['n_effective']):,.0f}"
    cells = (f"{np.median(value):.2f} ± {np.median(error):.2f}" for value, error in zip(values, errors, strict=True))
    return *cells, f"{np.median(found['calls']) / 1000:.0f}k", notes


HEADS = {
    "rings": (ring_line, ("Ring", "Method", "Modes", "Error", "Max/min", "Sd", "Off")),
    "student": (student_line, ("Method", *(f"a = {a}" for a in EDGES))),
    "schools": (schools_line, ("Form", "Method", *(f"{level:.0%}" for level in LEVELS), "Calls", "Divergences; ESS")),
}


def tables(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return the tables of the studies of which there are rows."""
    found = {}
    for name, (_, cases, *_) in STUDIES.items():
        line, heads = HEADS[name]
        own = [row for row in rows if row["case"] in cases]
        lines = [
            (
                case,
                method,
                *line({key: of(own, key, case=case, method=method) for key in {k for r in own for k in r}}),
            )
            for case, method in pairs(own)
        ]
        if name == "student":
            lines = [cells[1:] for cells in lines]
            lines += [(method, *(f"{value:.3f}" for value in values)) for method, values in OF_PAPER.items()]
        if own:
            found[name] = rst(heads, lines)
    return found


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("studies", nargs="*", metavar="{rings,student,schools}", help="all by default")
    args = parser.parse_args()
    if unknown := set(args.studies) - STUDIES.keys():
        parser.error(f"unknown studies: {', '.join(sorted(unknown))}")
    n_seeds = 1 if args.quick else args.seeds
    jobs = []
    for name in args.studies or STUDIES:
        _, cases, methods, _ = STUDIES[name]
        some = list(cases)[: 1 if args.quick else None], list(methods)[-2 if args.quick else 0 :]
        for case in some[0]:
            if name != "schools":
                jobs += [(case, EXACT, seed) for seed in range(n_seeds)]
            jobs += [(case, method, seed) for method in some[1] for seed in range(n_seeds)]
    rows = results(args, jobs, partial(run, quick=args.quick))["rows"]
    show_tables(args, tables(rows))


if __name__ == "__main__":
    main()
