"""The defaults on hard shapes, by what is hard in each.

python benchmarks/shapes.py [--names ...] [--seeds 3] [--jobs 2] [--out FILE.json]
python benchmarks/shapes.py --names directions     heavy, skewed and humped along directions that are no coordinates
python benchmarks/shapes.py --names catalogue      the defaults beside trainings
python benchmarks/shapes.py --show benchmarks/shapes.json --manual doc      the table of the manual

Shapes are those of benchmarks/_shapes.py; "--names large" is one of 1,980 features and one of 1,003, one seed each,
which take some minutes, and so do their reference draws. Of means and standard deviations the worst coordinate is
shown, by reference draws, in standard deviations; of tails the worst ratio of a quantile at .1% or 99.9% to that of
t, by a million draws, and its standard error; of the funnel v / 3 and x e^(-v/2), which are standard normal, and
the mass of the neck over the true one; of modes the largest error of a weight; of labels that and how many of their
orders there are; along directions the ratios of standard deviations, of clipped draws, and of the range of 99.8% to
the true ones. The worst of the seeds is shown, of calls and seconds the median. A fit is accurate where means are
within .1 sd and sds within 10%, also along the directions of benchmarks/_accuracy.py, quantiles within 10% and three
standard errors, the mass of the neck within 10%, weights within .03, ranges along directions within 20%.
"""

from __future__ import annotations

import math
from contextlib import suppress

import numpy as np
import torch
from _accuracy import along_directions, is_accurate, moments
from _harness import command, results, rst, select, show_tables, watched
from _shapes import (
    CATALOGUE,
    DIRECTIONS,
    LARGE,
    SHAPES,
    CorrelatedStudents,
    Directions,
    Labels,
    Normals,
    Students,
)
from posteriors import Funnel
from reference import reference
from scipy import stats

from skksivi import KSIVIApproximator
from skksivi.parameters import Pilot

N_DRAWS, N_TAILS, LEVEL = 20_000, 1_000_000, 1e-3
ALL = {**SHAPES, **DIRECTIONS, **LARGE, **CATALOGUE}
GROUPS = {"directions": DIRECTIONS, "large": LARGE, "catalogue": CATALOGUE}

#: By method: the defaults, and trainings from what a pilot of low effort finds.
LOW = {"whiten": Pilot(effort="low"), "method": "path"}
SETTINGS = {
    "defaults": {},
    "path gradient": LOW,
    "KSD": LOW | {"method": "ksivi"},
}


def errors(q, R):
    """Return the worst errors of means and standard deviations, by reference draws R (n, d)."""
    X = q.sample(N_DRAWS)
    found = moments(X, R) | along_directions(X, R)
    return found | {"accurate": is_accurate(found)}


def tails(q, target):
    """Return the ratio of quantiles that is farthest from one, and the standard error of one."""
    X = q.sample(N_TAILS)
    true = stats.t.isf(LEVEL, target.df)
    se = math.sqrt(LEVEL / N_TAILS) / stats.t.pdf(true, target.df) / true
    ratios = np.abs(np.quantile(X, [LEVEL, 1 - LEVEL], 0)).ravel() / true
    worst = float(ratios[np.abs(np.log(ratios)).argmax()])
    return {"quantile": worst, "quantile_se": se, "accurate": bool(abs(worst - 1) < 0.1 + 3 * se)}


def neck(q, _):
    """Return P(v < -3) over the true one, and the errors of v / 3 and of x e^(-v/2), which are standard normal."""
    v, x = np.split(q.sample(N_TAILS), [1], axis=1)
    z = np.column_stack([v / 3, x * np.exp(-v / 2)])
    ratio, sds, mean = float((v < -3).mean() / stats.norm.cdf(-1)), z.std(0), float(np.abs(z.mean(0)).max())
    right = mean < 0.1 and sds.min() > 0.9 and sds.max() < 1.1 and 0.9 < ratio < 1.1
    sd_min, sd_max = float(sds.min()), float(sds.max())
    return {"neck": ratio, "mean": mean, "sd_min": sd_min, "sd_max": sd_max, "accurate": bool(right)}


def weights(q, target):
    """Return the largest error of a weight."""
    error = float(np.abs(target.shares(q.sample(N_DRAWS)) - target.weights.numpy()).max())
    return {"weight": error, "accurate": error < 0.03}


def labels(q, target):
    """Return the largest error of the share of an order of labels, which all are alike."""
    shares = np.unique(q.sample(N_DRAWS).argsort(1), axis=0, return_counts=True)[1] / N_DRAWS
    n = math.factorial(target.n_features)
    error = float(np.abs(np.append(shares, [0.0] * (n - len(shares))) - 1 / n).max())
    return {"weight": error, "orders": len(shares), "accurate": error < 0.03}


def directions(q, target):
    """Return the ratios of standard deviations, of draws clipped to the range of 99.8%, and of that range."""
    Z = q.sample(N_TAILS // 5).astype(np.float64) @ target.V.numpy()[:, : target.k]
    ends, sd = target.exact(LEVEL)
    sds, ranges = Z.clip(*ends).std(0) / sd, np.diff(np.quantile(Z, [LEVEL, 1 - LEVEL], 0), axis=0) / np.diff(ends)
    found = {"sd_min": sds.min(), "sd_max": sds.max(), "range_min": ranges.min(), "range_max": ranges.max()}
    right = np.abs(sds - 1).max() < 0.1 and np.abs(ranges - 1).max() < 0.2
    return {name: float(value) for name, value in found.items()} | {"accurate": bool(right)}


JUDGES = {
    Directions: directions, Funnel: neck, Students: tails, CorrelatedStudents: tails,
    Normals: weights, Labels: labels,
}  # fmt: skip


def run(name, method, seed):
    torch.set_num_threads(1)
    target, q = ALL[name](), KSIVIApproximator(random_state=seed, **SETTINGS[method])
    with watched() as costs, suppress(FloatingPointError):  # the last finite state is kept
        q.fit(target)
    row = {**costs, "calls": q.n_score_calls_ + q.n_products_, "good": q.verdict_.good, "n_iter": q.n_iter_}
    judge = JUDGES.get(type(target))
    return row | (errors(q, reference(name)) if judge is None else judge(q, target))


def told(rows):
    """Return the cell of the worst of some rows."""
    if "range_min" in rows[0]:
        sds, ranges = (
            f"{min(r[f'{name}_min'] for r in rows):.2f} - {max(r[f'{name}_max'] for r in rows):.2f}"
            for name in ("sd", "range")
        )
        return f"sds {sds}, ranges {ranges}"
    if "mean" in rows[0]:
        low, high = min(r["sd_min"] for r in rows), max(r["sd_max"] for r in rows)
        necks = [r["neck"] for r in rows if "neck" in r]
        of_neck = f", P(v < -3) {min(necks):.2f} - {max(necks):.2f}" if necks else ""
        along = max(r.get("scale_along", 0.0) for r in rows)
        directions = f", log sds along directions {along:.2f}" if along else ""
        return f"means {max(r['mean'] for r in rows):.3f}, sds {low:.2f} - {high:.2f}{of_neck}{directions}"
    if "quantile" in rows[0]:
        worst = max(rows, key=lambda r: abs(math.log(r["quantile"])))
        return f"quantiles {worst['quantile']:.3f} (se {worst['quantile_se']:.3f})"
    orders = f", {min(r['orders'] for r in rows)} orders" if "orders" in rows[0] else ""
    return f"weights {max(r['weight'] for r in rows):.3f}{orders}"


def table(rows):
    """Return the table of the manual."""
    lines = []
    for name in dict.fromkeys(r["case"] for r in rows):
        own = select(rows, case=name)
        n_right, n_warned = sum(r["accurate"] for r in own), sum(bool(r["warned"]) for r in own)
        calls, seconds = (np.median([r[key] for r in own]) for key in ("calls", "seconds"))
        accurate = f"{n_right} of {len(own)}"
        lines.append((name, told(own), accurate, f"{calls:,.0f}", f"{seconds:.1f}", str(n_warned or "")))
    total = f"{sum(r['accurate'] for r in rows)} of {len(rows)}"
    return rst(("Shape", "Worst", "Accurate", "Calls", "Seconds", "Warned"), [*lines, ("all", "", total, "", "", "")])


def compared(rows):
    """Return the table of the catalogue, by method: the worst, the calls, and whether that is right or told."""
    header = ["Target", "By the defaults", "Worst", "Calls"]
    header += [f"By {method}, calls" for method in list(SETTINGS)[1:]]
    lines = []
    for name in dict.fromkeys(r["case"] for r in rows):
        by_method = {method: select(rows, case=name, method=method) for method in SETTINGS}
        own = by_method.pop("defaults")
        calls = {m: f"{np.median([r['calls'] for r in each]):,.0f}" if each else "" for m, each in by_method.items()}
        others = [f"{said(each)}, {calls[m]}" if each else "" for m, each in by_method.items()]
        lines.append((name, said(own), told(own), f"{np.median([r['calls'] for r in own]):,.0f}", *others))
    return rst(header, lines)


def said(rows):
    """Tell how many fits are right, how many others warn, and how many are silently wrong."""
    counts = {
        "right": sum(r["accurate"] for r in rows),
        "told": sum(not r["accurate"] and not r["good"] for r in rows),
        "silent": sum(not r["accurate"] and r["good"] for r in rows),
    }
    return ", ".join(f"{n} {word}" for word, n in counts.items() if n)


def main():
    parser = command(__doc__, jobs=1)
    parser.add_argument("--names", nargs="+", choices=[*ALL, *GROUPS], default=list(SHAPES))
    args = parser.parse_args()
    names = list(GROUPS[args.names[0]]) if args.names[0] in GROUPS else args.names
    names = ["wide banana, d = 2", "labels of 2"] if args.quick and names == list(SHAPES) else names
    n_seeds = {name: 1 if args.quick or name in LARGE else args.seeds for name in names}
    methods = {name: SETTINGS if name in CATALOGUE else ("defaults",) for name in names}
    jobs = [(name, method, seed) for name in names for method in methods[name] for seed in range(n_seeds[name])]
    rows = results(args, jobs, run, n_jobs=args.jobs)["rows"]
    parts = {
        name: [r for r in rows if r["case"] in group]
        for name, group in (("shapes", {**SHAPES, **LARGE}), ("directions", DIRECTIONS), ("catalogue", CATALOGUE))
    }
    tables = {name: (compared if name == "catalogue" else table)(own) for name, own in parts.items() if own}
    show_tables(args, tables)


if __name__ == "__main__":
    main()
