"""What training makes of starts that are wrong, against exact reference draws.

python benchmarks/training.py [--names ...] [--methods ...] [--seeds 3] [--jobs 2] [--out FILE.json]
python benchmarks/training.py --show benchmarks/training.json --manual doc      the table of the manual
python benchmarks/training.py --show benchmarks/training_variants.json      sigmas and powers that were tried

A start is a Gaussian N(m, L L^T), given as `whiten`: of the moments of the reference draws, with each whitened
coordinate shifted by one standard deviation, twice or half as wide; or of the moments of 100 reference draws, shrunk
as Ledoit and Wolf do. Methods are the path gradient, the paper's two estimates of the discrepancy, the first
iteration alone, by which one sees what the search for coordinates does, and the paper's settings of the waveform
posterior, whose start is their own. Printed are errors before and after; accurate is a fit whose means are all within
0.1 sd and whose sds are all within 10%.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from unittest.mock import patch

import numpy as np
import torch
from _accuracy import is_accurate
from _harness import command, print_table, results, rst, select, show_tables, watched
from defaults import measure
from posteriors import POSTERIORS
from reference import reference
from sklearn.covariance import ledoit_wolf

from skksivi import KSIVIApproximator, paper_settings
from skksivi.stein import _estimators

#: Of 2 to 100 features: skewed, correlated, of two modes, hierarchies.
NAMES = (
    "x_shaped", "multimodal", "twenty_irises", "garch", "doctor_visits", "log_gamma", "geyser", "eight_schools",
    "diabetes", "waveform", "stochastic_volatility", "hundred_dimensional",
)  # fmt: skip

STARTS = ("shifted", "wide", "narrow", "100 points")
OWN = "its own"

METHODS = {
    "path gradient": {"method": "path"},
    **{f"path gradient, {n} draws": {"method": "path", "batch_size": n} for n in (16, 128)},
    "KSD, U-statistic": {"method": "ksivi", "gradient_estimator": "u-statistic"},
    "KSD, normalized": {"method": "ksivi"},
    "coordinates alone": {"method": "path", "max_iter": 1},
    "the paper's settings": paper_settings("waveform-u-statistic"),
}
#: The initial sigmas and the powers of the row means that were tried, from two of the starts.
POWERS = {f"KSD, power 1/{n}": 1 / n for n in (8, 2)}
SIGMAS = {f"KSD, sigma {s}": {"method": "ksivi", "initial_scale": s} for s in (0.4, 0.8, 0.99)}
METHODS |= (VARIANTS := SIGMAS | {name: {"method": "ksivi"} for name in POWERS})


def start(kind, R, rng):
    """Return a pair (m, L)."""
    if kind == "100 points":
        points = R[rng.choice(len(R), 100, replace=False)]
        scale = points.std(0)
        return points.mean(0), scale[:, None] * np.linalg.cholesky(ledoit_wolf(points / scale)[0])
    m, L = R.mean(0), np.linalg.cholesky(np.cov(R.T))
    if kind == "shifted":
        return m + L.sum(1), L
    return m, L * (2.0 if kind == "wide" else 0.5)


def is_worse(row):
    """Return whether a fit ends farther from the reference than it began, by more than a tenth, and not accurate."""
    return row["after"]["w2"] > 1.1 * row["before"]["w2"] and not is_accurate(row["after"])


def run(case, method, seed, quick=False):
    torch.set_num_threads(1)
    name, kind = case.split(", ")
    target, R, rng = POSTERIORS[name].make(), reference(name), np.random.RandomState(seed)
    if kind == OWN:
        m, L = np.zeros(R.shape[1]), np.eye(R.shape[1])
    else:
        m, L = start(kind, R, rng)
    own = {"whiten": (m, L), "mixing": "normal"} | METHODS[method] | ({"max_iter": 20} if quick else {})
    q = KSIVIApproximator(random_state=seed, **own)
    with (
        watched() as costs,
        patch.object(_estimators, "POWER", POWERS.get(method, _estimators.POWER)),
        suppress(FloatingPointError),  # the last finite state is kept
    ):
        q.fit(target)
    return {
        "d": target.n_features,
        "before": measure(m + rng.standard_normal(R.shape) @ L.T, R),
        "after": measure(q.sample(len(R), random_state=seed), R),
        "calls": q.n_score_calls_ + q.n_products_,
        "seconds": costs["seconds"],
    }


def in_words(errors):
    return f"{errors['mean']:.2f}  {errors['sd_min']:.2f} - {errors['sd_max']:.2f}"


def show(rows):
    methods, cases = (list(dict.fromkeys(row[name] for row in rows)) for name in ("method", "case"))
    lines = []
    for case in cases:
        of = select(rows, case=case)
        of_method = [select(of, method=method) for method in methods]
        worst = [max(some, key=lambda r: r["after"]["w2"], default=None) for some in of_method]
        cells = (f"{in_words(r['after'])}{' ' if is_accurate(r['after']) else '*'}" if r else "-" for r in worst)
        lines.append((case, of[0]["d"], in_words(of[0]["before"]), *cells))
    print_table(("", "d", "before", *methods), lines)
    print("Largest error of a mean and range of sds, of the worst seed; * is not accurate.")
    for method in methods:
        of = select(rows, method=method)
        calls, seconds = (np.median([r[name] for r in of]) for name in ("calls", "seconds"))
        n_before, n_after = (sum(is_accurate(r[name]) for r in of) for name in ("before", "after"))
        print(
            f"{method}: accurate {n_before} of {len(of)} before, {n_after} after; {calls:,.0f} calls, {seconds:.1f} s"
        )


def table(rows):
    """Return the table of the manual: the accurate fits of each kind of start, those that end worse, median costs."""
    kinds = [*STARTS, OWN]
    of = {method: select(rows, method=method) for method in METHODS}

    def accurate(when, method):
        for kind in kinds:
            own = [is_accurate(row[when]) for row in of[method] if row["case"].endswith(f", {kind}")]
            yield f"{sum(own)} of {len(own)}" if own else ""

    lines = [("before training", *accurate("before", "path gradient"), "", "", "")]
    for method, some in of.items():
        if not some:
            continue
        calls, seconds = (np.median([row[name] for row in some]) for name in ("calls", "seconds"))
        worse = sum(map(is_worse, some))
        lines.append((method, *accurate("after", method), worse, f"{calls / 1000:.0f}k", f"{seconds:.1f}"))
    return rst(("Accurate", *(kind.capitalize() for kind in kinds), "Worse", "Calls", "Seconds"), lines)


def main():
    parser = command(__doc__, jobs=2, methods=METHODS)
    parser.set_defaults(methods=[method for method in METHODS if method not in VARIANTS])
    parser.add_argument("--names", nargs="+", choices=POSTERIORS, default=NAMES)
    args = parser.parse_args()
    if not args.show:
        for name in args.names:
            reference(name)
    jobs = [
        (f"{name}, {kind}", method, seed)
        for method in args.methods
        for seed in range(args.seeds)
        for name in args.names
        for kind in ([OWN] if "whiten" in METHODS[method] else STARTS[:: 2 if method in VARIANTS else 1])
    ]
    rows = results(args, jobs, partial(run, quick=args.quick), n_jobs=args.jobs)["rows"]
    show(rows)
    show_tables(args, {"training": table(rows)})


if __name__ == "__main__":
    main()
