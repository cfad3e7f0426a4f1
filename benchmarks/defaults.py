"""The default settings on posteriors that people bring, against exact reference draws.

python benchmarks/defaults.py [--names ...] [--methods ...] [--seeds 3] [--jobs 2] [--out FILE.json]
python benchmarks/defaults.py --show benchmarks/defaults.json --manual doc      the table of the manual

Reference draws are made at the first run (`benchmarks/reference.py posteriors`, ten minutes) and kept in
build/reference. Each row of the table is a posterior; of the seeds the worst is shown, of the sliced Wasserstein
distance the mean, of calls and seconds the median. The distance is computed in coordinates whitened by the
reference's covariance, 1,000 draws a side, and divided by its floor, the same between two parts of the reference. A
fit is accurate where every mean is within 0.1 sd and every sd within 10%, of coordinates and, beyond the noise, of
the directions of benchmarks/_accuracy.py. The last column, of --methods "score alone", is the median of calls where
the target is known by its score; such fits are accurate but for those with a star. --methods frugal is
Pilot(effort="frugal"), at most 1,000 calls, whose verdict is to be good nowhere but where a fit is accurate.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from _accuracy import along_directions, is_accurate, moments
from _harness import command, results, rst, select, show_tables, watched
from posteriors import POSTERIORS
from reference import reference

from skksivi import KSIVIApproximator
from skksivi.metrics import sliced_wasserstein
from skksivi.parameters import Pilot
from skksivi.targets import from_score_fn

#: Parts of 1,000 draws.
PARTS = 4

DEFAULTS, ALONE, FRUGAL = "defaults", "score alone", "frugal"


def measure(X, R):
    """Return errors of draws X against reference draws R, in standard deviations."""
    if not np.isfinite(X).all():
        return {"w2": math.inf, **moments(X, R), **along_directions(X, R), "quantile": math.inf}
    u, v = whitened(X, R), whitened(R, R)
    quantiles, true = (np.quantile(draws, [0.01, 0.99], 0) for draws in (X, R))
    return {
        "w2": sliced(u, v, [(i, i) for i in range(PARTS)]),
        **moments(X, R),
        **along_directions(X, R),
        "quantile": float(np.abs((quantiles - true) / R.std(0)).max()),
    }


def floor(R):
    """Return the sliced distance between parts of the reference."""
    v = whitened(R, R)
    return sliced(v, v, [(i, j) for i in range(PARTS) for j in range(i)])


def whitened(X, R):
    """Return X in the coordinates in which R has mean zero and unit covariance."""
    return np.linalg.solve(np.linalg.cholesky(np.atleast_2d(np.cov(R.T))), (X - R.mean(0)).T).T


def sliced(u, v, pairs):
    """Return the mean over pairs (i, j) of the distance between part i of u and part j of v, of 1,000 draws each."""
    return float(np.mean([sliced_wasserstein(u[i::PARTS], v[j::PARTS], random_state=0) for i, j in pairs]))


def run(name, method, seed, max_iter):
    torch.set_num_threads(1)
    target, R, settings = POSTERIORS[name].make(), reference(name), {**max_iter, "random_state": seed}
    if method == ALONE:
        target, settings["dtype"] = from_score_fn(target.score_fn, target.n_features), "float64"  # as its data
    if method == FRUGAL:
        settings["whiten"] = Pilot(effort="frugal")
    with watched() as costs:
        q = KSIVIApproximator(**settings).fit(target)
        X = q.sample(len(R))
    calls = q.n_score_calls_ + q.n_products_
    found = {**measure(X, R), "floor": floor(R), **costs, "score_calls": calls, "n_iter": q.n_iter_}
    return {**found, "good": bool(q.verdict_ and q.verdict_.good)}


def summary(rows, name, method=DEFAULTS):
    of = select(rows, case=name, method=method)
    worst = {
        "w2": np.mean([r["w2"] / r["floor"] for r in of]),
        "mean": max(r["mean"] for r in of),
        "sd_min": min(r["sd_min"] for r in of),
        "sd_max": max(r["sd_max"] for r in of),
        "quantile": max(r["quantile"] for r in of),
        "shift_along": max(r.get("shift_along", 0.0) for r in of),
        "scale_along": max(r.get("scale_along", 0.0) for r in of),
        "seconds": np.median([r["seconds"] for r in of]),
        "score_calls": np.median([r["score_calls"] for r in of]),
        "n_iter": np.median([r["n_iter"] for r in of]),
        "warned": sum(bool(r["warned"]) for r in of),
    }
    worst["accurate"] = is_accurate(worst)
    return worst


def show(rows):
    names = list(dict.fromkeys(r["case"] for r in select(rows, method=DEFAULTS)))
    every = [summary(rows, name) for name in names]
    near = np.mean([a["w2"] <= 1.3 for a in every])
    print(
        f"accurate on {sum(a['accurate'] for a in every)} of {len(every)}, within 1.3 floors on {near:.0%}, "
        f"geometric mean of W2 / floor {np.exp(np.mean(np.log([a['w2'] for a in every]))):.3g}, median "
        f"{np.median([a['seconds'] for a in every]):.1f} s and {np.median([a['score_calls'] for a in every]):,.0f} "
        f"calls; {sum(a['n_iter'] > 0 for a in every)} were trained, {sum(a['warned'] > 0 for a in every)} warned"
    )
    both = [(name, a) for name, a in zip(names, every, strict=True) if select(rows, case=name, method=ALONE)]
    if both:
        alone = [summary(rows, name, ALONE) for name, _ in both]
        ratios = [b["score_calls"] / a["score_calls"] for b, (_, a) in zip(alone, both, strict=True)]
        print(
            f"by the score alone accurate on {sum(b['accurate'] for b in alone)} of {len(alone)}, with "
            f"{np.median(ratios):.2g} times the calls in the median, at most {max(ratios):.2g}"
        )


def show_frugal(rows):
    right = [is_accurate(r) for r in rows]
    if rows:
        silent = [r["case"] for r, ok in zip(rows, right, strict=True) if r["good"] and not ok]
        print(
            f"frugal: accurate {sum(right)} times of {len(rows)}, by at most {max(r['score_calls'] for r in rows):,} "
            f"calls; {sum(r['good'] for r in rows)} verdicts are good, of inaccurate fits {silent or 'none'}"
        )


def table(rows):
    """Return the table of the manual, of the defaults."""
    lines = []
    for name in dict.fromkeys(r["case"] for r in rows):
        a = summary(rows, name)
        calls, star = in_thousands(a["score_calls"]), r"\*"
        sds, w2 = f"{a['sd_min']:.2f} - {a['sd_max']:.2f}", f"{a['w2']:.2f}{'' if a['accurate'] else '*'}"
        errors = f"{a['mean']:.2f}", sds, f"{a['quantile']:.2f}"
        alone = "-"
        if select(rows, case=name, method=ALONE):
            b = summary(rows, name, ALONE)
            alone = f"{in_thousands(b['score_calls'])}{'' if b['accurate'] else star}"
        lines.append((name.replace("_", " "), *errors, w2.replace("*", star), calls, f"{a['seconds']:.1f}", alone))
    heads = "Posterior", "Mean", "Sd ratio", "1%, 99%", "W2 / floor", "Calls", "Seconds", "Score alone"
    shows_alone = bool(select(rows, method=ALONE))
    return rst(heads if shows_alone else heads[:-1], lines if shows_alone else [line[:-1] for line in lines])


def in_thousands(calls):
    return f"{calls / 1000:,.{0 if calls >= 10_000 else 1}f}k"


def main():
    args = command(__doc__, jobs=2, names=POSTERIORS, methods=(DEFAULTS, ALONE, FRUGAL)).parse_args()
    if not args.show:
        for name in args.names:
            reference(name)
    jobs = [(name, method, seed) for method in args.methods for name in args.names for seed in range(args.seeds)]
    run_one = partial(run, max_iter={"max_iter": 50} if args.quick else {})
    rows = results(args, jobs, run_one, n_jobs=args.jobs)["rows"]
    if select(rows, method=DEFAULTS):
        show_tables(args, {"defaults": table(rows)})
        show(rows)
    show_frugal(select(rows, method=FRUGAL))


if __name__ == "__main__":
    main()
