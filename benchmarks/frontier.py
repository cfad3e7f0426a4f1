"""Accuracy against evaluations of the score and against seconds: ours, and what a user would pick instead.

python benchmarks/frontier.py [--names ...] [--methods ...] [--seeds 1] [--out FILE.json]
python benchmarks/frontier.py --show benchmarks/frontier.json --manual doc      the tables and figure of the manual

Posteriors: the 31 of benchmarks/posteriors.py and the five of benchmarks/_expensive.py, against reference draws
(benchmarks/reference.py). A method is tried with larger and larger budgets, its rungs, and stops at the first that is
accurate: every mean within 0.1 sd, every sd within 10%, of our fits along directions, too. Of several seeds the worst
counts. A rival's fit is stopped when 100,000 calls are spent, 30,000 where one takes more than a millisecond, its
ladder when that has happened twice; our fits end by themselves. Errors are those of all draws that a chain kept, and
of 10,000 draws of a fit; W2 is the sliced Wasserstein distance of 4,000 of them in whitened coordinates over its
floor, as in benchmarks/defaults.py.

A call is a row at which the score is evaluated, with or without log p, or log p alone where the score is not; a
product with the Jacobian of the score is a call too. Seconds are CPU time of one thread, compilation included: the
model is torch for all, so that NUTS pays a call from Python for each of its steps, which a model compiled together
with its sampler does not. The next 10,000 draws are independent ones. Those of a fit are drawn and timed; for chains
and weighted draws they are the calls after the warm-up, and the seconds of as many calls without compilation, times
10,000 over the least effective sample size of a coordinate. Rivals whose package is missing are left out.
"""

from __future__ import annotations

import importlib
import math
import time
import warnings
from collections import Counter
from functools import cache, partial
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from _accuracy import along_directions, is_accurate, moments
from _expensive import EXPENSIVE
from _harness import OURS, command, results, rst, select, show_figure, show_tables
from _rivals import (
    AdaptiveImportance,
    Flow,
    MicrocanonicalLangevin,
    NumPyroNUTS,
    NutpieNUTS,
    Pathfinder,
    TemperedSMC,
    Watched,
    available,
    effective_size,
)
from defaults import PARTS, floor, sliced, whitened
from paper._base import few
from posteriors import POSTERIORS
from reference import MAKE, reference

from skksivi import KSIVIApproximator
from skksivi.baselines import MALA, BatchAndMatch, FullRankVI

N_DRAWS, N_NEXT, MAX_SPENT = 4000, 10_000, 2
RETURNED = "the start, after a training"
#: Calls of a fit of a rival, and those where one takes more than a millisecond.
LIMIT, LIMITS = 100_000, {"predators": 30_000, "process_of_five": 30_000}


class Method(NamedTuple):
    """A constructor, its rungs with the smallest first, and the colour and marker of its line."""

    make: Any
    rungs: list[dict[str, Any]]
    style: tuple[str, str]


def rungs(names, *values):
    return [dict(zip(names.split(), value, strict=True)) for value in values]


NUTS_SETTINGS = "n_chains n_warmup n_draws"
NUTS_RUNGS = rungs(
    NUTS_SETTINGS, (1, 100, 300), (1, 150, 500), (1, 200, 800), (1, 300, 1200), (1, 400, 2500), (4, 400, 1500)
)
METHODS = {
    OURS: Method(KSIVIApproximator, [{}], ("#0072B2", "o")),
    "skksivi, always trained": Method(KSIVIApproximator, [{"method": "path"}], ("#88CCEE", "o")),
    "NUTS, low rank (nutpie)": Method(NutpieNUTS, NUTS_RUNGS, ("#D55E00", "v")),
    "NUTS, from the mode (nutpie)": Method(
        NutpieNUTS, [rung | {"starts_at_mode": True} for rung in NUTS_RUNGS], ("#882255", "^")
    ),
    "NUTS, diagonal (NumPyro)": Method(
        NumPyroNUTS, rungs(NUTS_SETTINGS, (1, 100, 300), (1, 200, 800), (1, 400, 2500)), ("#E69F00", "^")
    ),
    "microcanonical (blackjax)": Method(
        MicrocanonicalLangevin, rungs("n_draws", (1000,), (3000,), (10_000,)), ("#CC79A7", "<")
    ),
    "MALA": Method(
        MALA,
        rungs("n_warmup n_draws thin", (30, 10, 2), (60, 15, 4), (100, 20, 7), (200, 40, 7), (300, 60, 10)),
        ("#7A5195", ">"),
    ),
    "tempered SMC (blackjax)": Method(
        TemperedSMC,
        rungs("n_particles n_moves scale", (1000, 1, 1.5), (1000, 2, 3.0), (2000, 2, 2.0), (1000, 2, 10.0)),
        ("#117733", "h"),
    ),
    "adaptive importance sampling": Method(
        AdaptiveImportance,
        rungs(
            "n_draws n_rounds n_components",
            (250, 4, 1),
            (500, 4, 1),
            (1000, 5, 1),
            (1000, 10, 4),
            (4000, 5, 1),
            (3000, 10, 8),
        ),
        ("#332288", "*"),
    ),
    "Pathfinder (blackjax)": Method(Pathfinder, rungs("n_paths n_draws", (4, 500), (20, 500)), ("#999999", "X")),
    "batch and match": Method(BatchAndMatch, rungs("max_iter", (10,), (20,), (40,), (80,)), ("#009E73", "D")),
    "full-rank ADVI": Method(
        FullRankVI, rungs("max_iter", (50,), (100,), (200,), (400,), (800,), (1500,)), ("#56B4E9", "s")
    ),
    "normalising flow (zuko)": Method(Flow, rungs("max_iter", (100,), (200,), (600,), (1500,)), ("#000000", "P")),
}
CASES = [*POSTERIORS, *EXPENSIVE]


# Runs


def run(case, method, seed, args):
    """Climb the rungs of a method up to an accurate one, or to the end of its calls."""
    make, settings, _ = METHODS[method]
    if package := getattr(make, "package", None):
        importlib.import_module(package)
    R, found = reference(case), []
    ours = make is KSIVIApproximator
    limit = math.inf if ours else LIMITS.get(case, LIMIT)
    for setting in settings[: 1 if args.quick else None]:
        watched = Watched(MAKE[case](), limit)
        q = make(**setting, random_state=seed)
        found.append({"setting": told(setting), **row(q.set_params(**few(q, args)), watched, R)})
        if is_accurate(found[-1]) or sum(rung["spent"] for rung in found) == MAX_SPENT:
            break
    return {"d": R.shape[1], "floor": floor_of(case), "rungs": found}


@cache
def floor_of(case):
    return floor(reference(case))


def told(setting):
    return ", ".join(f"{k} {v}" for k, v in setting.items()) or "defaults"


def row(q, watched, R):
    """Fit a method to a watched target; return what it cost and how near it is to the reference draws R (n, d)."""
    start, failed, X, more = time.process_time(), "", np.full_like(R, np.nan), {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            q.fit(watched)
        except Exception as error:  # each package has its own errors, and wraps ours
            failed = "calls spent" if watched.spent else f"{type(error).__name__}: {error}"[:200]
        seconds, inside = time.process_time() - start, watched.seconds
        calls = getattr(q, "n_score_calls_", watched.n_points[0]) + getattr(q, "n_products_", 0)
        if not failed:
            X, more = drawn(q, watched)
    return {
        "calls": int(calls),
        "seconds": seconds,
        "in_score": inside,
        "failed": failed,
        "spent": watched.spent,
        "warned": sorted({w.category.__name__ for w in caught}),
        **(of_ours(q, X, R) if isinstance(q, KSIVIApproximator) and not failed else {}),
        **errors(X, R),
        **more,
    }


def of_ours(q, X, R):
    """Return what made our draws, and their errors along directions."""
    made_by = RETURNED if q.n_iter_ > 0 and q.best_iter_ == 0 else q.fitted_by_
    return {"made_by": made_by, **along_directions(X, R)}


def errors(X, R):
    """Return those of the moments of all draws X against the reference R, and the distance of N_DRAWS of them."""
    if not np.isfinite(X).all():
        return moments(X, R) | {"w2": math.inf}
    some = whitened(X[np.linspace(0, len(X) - 1, N_DRAWS).astype(int)], R)
    return moments(X, R) | {"w2": sliced(some, whitened(R, R), [(i, i) for i in range(PARTS)])}


def drawn(q, watched):
    """Return draws, and what the next ones cost."""
    if hasattr(q, "chains_"):
        X, n_effective = q.chains_.reshape(-1, q.n_features_in_), effective_size(q.chains_)
        n_calls = q.n_chains * q.n_draws * q.thin
    elif hasattr(q, "draws_"):
        X, n_effective, n_calls = q.draws_, q.n_effective_, q.n_sampling_calls_
    else:
        before, start = watched.n_points[0], time.process_time()
        X = q.sample(N_NEXT, random_state=0)
        return X, {"next_calls": watched.n_points[0] - before, "next_seconds": time.process_time() - start}
    next_calls = n_calls * N_NEXT / n_effective
    return X, {"next_calls": next_calls, "next_seconds": next_calls * watched.seconds_a_row()}


# Tables


class Summary(NamedTuple):
    """What a method needed on a posterior in the worst of its seeds, infinite where one of them was not accurate."""

    calls: float
    seconds: float
    next_calls: float
    next_seconds: float
    w2: float


def summary(document, case, method):
    """Return the `Summary`, or None where there is no row."""
    rows = select(document["rows"], case=case, method=method)
    if not rows:
        return None
    last = [r["rungs"][-1] for r in rows]
    w2 = float(np.median([rung["w2"] / r["floor"] for rung, r in zip(last, rows, strict=True)]))
    if not all(map(is_accurate, last)):
        return Summary(*4 * [math.inf], w2)
    worst = (max(rung[key] for rung in last) for key in ("calls", "seconds", "next_calls", "next_seconds"))
    return Summary(*worst, w2)


def of_method(document, method, cases=CASES):
    """Return the summaries of the cases that have one."""
    return [s for s in (summary(document, case, method) for case in cases) if s is not None]


def compared(document, method):
    """Return on how many posteriors a method needs fewer calls than ours, of those where both are accurate."""
    pairs = ((summary(document, case, method), summary(document, case, OURS)) for case in CASES)
    both = [(a.calls, b.calls) for a, b in pairs if a and b and math.isfinite(a.calls + b.calls)]
    return "" if method == OURS else f"{sum(a < b for a, b in both)} of {len(both)}"


def methods_of(document):
    there = {r["method"] for r in document["rows"]}
    return [method for method in METHODS if method in there]


def short(x):
    """Return a number in three digits at most, a dash if it is infinite."""
    if not math.isfinite(x):
        return r"\-"
    if x >= 10_000:
        return f"{x / 1000:,.0f}k"
    return f"{x:,.0f}" if x >= 100 else f"{x:.2g}"


def within_limit(some):
    """Return how many are accurate within the limit and, if these are more, without one."""
    within, every = sum(s.calls <= LIMIT for s in some), sum(math.isfinite(s.calls) for s in some)
    return f"{within}{f' ({every})' if every > within else ''} of {len(some)}" if some else r"\-"


def by_method(document, method):
    """Return a line of the first table."""
    every = of_method(document, method)
    good = [s for s in every if math.isfinite(s.calls)]
    medians = np.median([s[:4] for s in good], 0) if good else 4 * [math.inf]
    n = [within_limit(of_method(document, method, cases)) for cases in (POSTERIORS, EXPENSIVE)]
    calls, w2 = (short(np.median([getattr(s, key) for s in every])) for key in ("calls", "w2"))
    return (method, *n, calls, w2, *map(short, medians), compared(document, method))


def by_posterior(document, case, methods):
    """Return a line of the second table."""
    there = [summary(document, case, method) for method in methods]
    d = next(r["d"] for r in document["rows"] if r["case"] == case)
    return (case.replace("_", " "), d, *("" if s is None else short(s.calls) for s in there))


def made_by(document):
    """Return the table of what made the draws of our fits to the 31."""
    ours = [method for method in methods_of(document) if METHODS[method].make is KSIVIApproximator]
    fits = [r for r in document["rows"] if r["case"] in POSTERIORS]
    found = [Counter(r["rungs"][-1].get("made_by", "no fit") for r in select(fits, method=method)) for method in ours]
    makers = sorted(set().union(*found), key=lambda maker: (-found[0][maker], maker))
    return rst(("Draws made by", *ours), [(maker, *(some[maker] for some in found)) for maker in makers])


def tables(document):
    """Return the tables of the methods, of the posteriors and of what made our draws."""
    methods = methods_of(document)
    heads = ("Method", "The 31", "Expensive", "Calls, all", "W2, all")
    heads = (*heads, "Calls", "Seconds", "Next calls", "Next seconds", "Fewer calls")
    cases = [case for case in CASES if any(r["case"] == case for r in document["rows"])]
    names = [method.split(" (")[0] for method in methods]
    return {
        "frontier_methods": rst(heads, [by_method(document, method) for method in methods]),
        "frontier_posteriors": rst(
            ("Posterior", "d", *names), [by_posterior(document, case, methods) for case in cases]
        ),
        "frontier_made_by": made_by(document),
    }


# The figure

#: The lines in colour.
NAMED = (
    OURS, "NUTS, low rank (nutpie)", "microcanonical (blackjax)", "adaptive importance sampling",
    "normalising flow (zuko)",
)  # fmt: skip


def draw(document):
    """Draw the share of posteriors on which a method is accurate, against calls and against seconds."""
    figure, axes = plt.subplots(1, 2, figsize=(8.8, 4.4), sharey=True, layout="constrained")
    for ax, key in zip(axes, ("calls", "seconds"), strict=True):
        methods = sorted(methods_of(document), key=lambda method: method in NAMED)  # the named ones above the others
        needed = {method: [getattr(s, key) for s in of_method(document, method)] for method in methods}
        last = 1.3 * max((x for values in needed.values() for x in values if math.isfinite(x)), default=1.0)
        for method, values in needed.items():
            colour, marker = METHODS[method].style
            at = np.sort([x for x in values if math.isfinite(x)])
            share = 100 * np.arange(len(at) + 1) / len(values)
            line = {"color": "0.8", "lw": 1.0, "label": "the other methods" if method == methods[0] else None}
            if method in NAMED:
                line = {"color": colour, "marker": marker, "ms": 4, "mew": 0, "lw": 2.6 if method == OURS else 1.5}
                line |= {"label": method, "markevery": range(len(at))}
            ax.step([*at, last], [*share[1:], share[-1]], where="post", **line)
        ax.set(xscale="log", ylim=(0, 101))
        ax.grid(alpha=0.3)
    axes[0].set(xlabel="evaluations of the score", ylabel="posteriors with an accurate fit, %")
    axes[1].set(xlabel="seconds of CPU time, compilation included")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=11, frameon=False
    )
    return figure


def jobs_of(args):
    """Yield the jobs, those of the expensive posteriors last; say which methods are left out."""
    methods = list(available({method: METHODS[method].make for method in args.methods}))
    for group in POSTERIORS, EXPENSIVE:
        for seed in range(args.seeds):
            yield from ((case, method, seed) for method in methods for case in group if case in args.names)


def main():
    args = command(__doc__, seeds=1, names=CASES, methods=METHODS).parse_args()
    if args.quick and args.names == CASES:
        args.names = ["log_gamma"]
    torch.set_num_threads(1)
    document = results(args, [] if args.show else list(jobs_of(args)), partial(run, args=args))
    show_tables(args, tables(document))
    if document["settings"]["quick"]:
        print("A quick run: a few iterations, whose numbers mean nothing.")
    show_figure(args, "frontier", partial(draw, document))


if __name__ == "__main__":
    main()
