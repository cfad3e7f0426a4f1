"""Every method of the package, NUTS and a flow on three targets: quality against scores evaluated and seconds.

python benchmarks/comparison.py [--seeds 3] [--output FILE.json] [--quick]
python benchmarks/comparison.py --show benchmarks/comparison.json --manual doc      table and figure of the manual

The banana, the product of two Student t, and the waveform posterior (d = 22), by the sliced Wasserstein distance of
2,000 draws to the same 2,000 reference draws for all. Of the Student target, coordinates beyond 8 are first set to 8,
with their sign and on both sides, or a few far draws would decide. The floor is that of two sets of exact draws. Each
method has its defaults, of which nothing was chosen by these references. Other rows say in what they differ; methods
that take more than twenty seconds or so with their defaults have fewer iterations.

"scores" are the points at which a fit asked for the score, those of the whitening included; a product with its
Jacobian comes with the score at the same point and is not counted again, nor are values of log p, which MALA and
MIED compare. "seconds" are those of one thread of a CPU, medians over
seeds. --quick runs a few iterations on the banana alone, to see that all works.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from _harness import OURS, command, exact, load, rst, run_missing, select, show_figure, show_tables, shown, watched
from _rivals import Flow, NutpieNUTS, available
from paper._base import Counted, few
from reference import mala, waveform_target

from skksivi import HKSIVIApproximator, KSIVIApproximator, baselines, paper_settings, targets
from skksivi.datasets import load_waveform_posterior
from skksivi.kernels import Riesz
from skksivi.metrics import noise_floor, sliced_wasserstein
from skksivi.mixing import StudentT

N_DRAWS, N_QUICK, EDGE = 2000, 200, 8.0


class Method(NamedTuple):
    """An estimator, the settings in which it differs from its defaults, perhaps by target, and the only target."""

    make: Callable[..., Any]
    settings: dict[str, Any]
    case: str | None = None


#: What the paper and the user guide take for heavy tails, here with the exponent of those of the target.
HEAVY = {"kernel": Riesz(), "mixing": StudentT(2.0), "whiten": "laplace"}
#: The paper's settings of each target.
PAPER = {case: paper_settings(case.split()[0].lower()) for case in ("banana", "Student t", "waveform")}
#: Iterations of those that are slow.
FEWER = {"AISIVI": 1000, "HSIVISM": 1000, "SIVISM": 2500, "UIVI": 500}
#: Those that are trained in the coordinates of the target in their papers.
IN_X = ("SIVI", "SIVISM", "UIVI")


def baseline(name, **settings):
    return Method(getattr(baselines, name), settings | ({"max_iter": FEWER[name]} if name in FEWER else {}))


METHODS = {
    OURS: Method(KSIVIApproximator, {}),
    "skksivi, trained to the end": Method(KSIVIApproximator, {"method": "path", "early_stopping": False}),
    "KSIVI, paper": Method(KSIVIApproximator, PAPER),
    "KSIVI, t mixing": Method(KSIVIApproximator, HEAVY, "Student t"),
    "HKSIVI": Method(HKSIVIApproximator, {"max_iter": 1000}),
    **{name: baseline(name) for name in baselines.__all__},
    "KPG-IS": baseline("KPG", importance_sampling=True),
    **{f"{name}, in x": baseline(name, whiten=None) for name in IN_X},
    "NUTS": Method(NutpieNUTS, {}),
    "Normalising flow": Method(Flow, {}),
}


# Targets


def toy(target, quick):
    """Return a target, its reference draws and others for the floor."""
    return target, exact(target, N_QUICK if quick else N_DRAWS, 1), exact(target, 10 * N_DRAWS, 2)


def waveform(_):
    """Return the posterior, its packaged draws, and the same with as many others."""
    target, Y = waveform_target(), load_waveform_posterior().astype(float)
    others, _ = mala(target, N_DRAWS, n_steps=600, seed=1)
    return target, Y, np.concatenate([Y, others.numpy()])


CASES = {
    "banana": lambda quick: toy(targets.Banana(), quick),
    "Student t": lambda quick: toy(targets.StudentT(), quick),
    "waveform": waveform,
}


def distance(case, X, Y):
    """Return the sliced Wasserstein distance, of the Student target with coordinates cut at the edge of a box."""
    if not np.isfinite(X).all():
        return math.inf
    if case == "Student t":
        X, Y = X.clip(-EDGE, EDGE), Y.clip(-EDGE, EDGE)
    return sliced_wasserstein(X, Y, random_state=0)


# Runs


def run(case, name, seed, cases, args):
    """Fit a method; return its row."""
    method, (target, Y, _) = METHODS[name], cases[case]
    q = method.make(**method.settings.get(case, method.settings), random_state=seed)
    q.set_params(**few(q, args))
    counted = Counted(target)
    with watched() as costs:
        q.fit(counted)
    n_scores = counted.n_points[0]
    X = q.sample(len(Y), random_state=seed).astype(float)
    return {
        "distance": distance(case, X, Y),
        "scores": n_scores,
        "seconds": costs["seconds"],
        "warnings": costs["warned"],
    }


def compare(args):
    """Run what is not in the file yet; return the document of the results, with the floors."""
    document = load(args.out, {"quick": args.quick})
    cases = {case: CASES[case](args.quick) for case in list(CASES)[: 1 if args.quick else None]}
    document["floors"] = document.get("floors", {})
    for case, (_, Y, pool) in cases.items():
        floor = noise_floor(lambda X, Z, case=case: distance(case, X, Z), pool, len(Y), random_state=0)
        document["floors"][case] = floor._asdict()
    methods = set(available({name: METHODS[name].make for name in args.methods}))
    # the seed outermost, so that methods take turns
    jobs = [
        (case, name, seed)
        for seed in range(args.seeds)
        for case in cases
        for name in methods_of(case)
        if name in methods
    ]
    run_missing(document, args.out, jobs, partial(run, cases=cases, args=args))
    return document


def methods_of(case):
    return [name for name, method in METHODS.items() if method.case in (None, case)]


# The table


def tried(document, case):
    """Return the methods that have rows on a target."""
    there = {row["method"] for row in select(document["rows"], case=case)}
    return [name for name in methods_of(case) if name in there]


def summary(document, case, name):
    """Return what the table shows of a method on a target: means, the standard deviation, medians."""
    rows = select(document["rows"], case=case, method=name)
    distances = [row["distance"] for row in rows]
    return {
        "mean": float(np.mean(distances)),
        "sd": float(np.std(distances, ddof=1)) if len(rows) > 1 else math.nan,
        "scores": float(np.median([row["scores"] for row in rows])),
        "seconds": float(np.median([row["seconds"] for row in rows])),
        "warned": any(row["warnings"] for row in rows),
    }


def short(number):
    """Return a count in a few characters."""
    if number >= 1e6:
        return f"{number / 1e6:.1f}M"
    return f"{number / 1e3:.0f}k" if number >= 9950 else f"{number / 1e3:.1f}k"


def ordered(document):
    """Return the summaries of each target by method, and the methods in the order of the mean ratio to the floor."""
    floors = document["floors"]
    of = {case: {name: summary(document, case, name) for name in tried(document, case)} for case in floors}
    names = dict.fromkeys(name for found in of.values() for name in found)

    def ratio(name):
        return np.mean([found[name]["mean"] / floors[case]["mean"] for case, found in of.items() if name in found])

    return of, sorted(names, key=ratio)


def manual(document):
    """Return the table of the manual."""
    (of, names), floors = ordered(document), document["floors"]

    def cells(name, show):
        return [show(found[name]) if name in found else "\\-" for found in of.values()]

    def distance(a):
        return f"{a['mean']:.3f} +- {a['sd']:.3f}" + ("\\*" if a["warned"] else "")

    lines = [("two sets of exact draws", *(f"{f['mean']:.3f} +- {f['sd']:.3f}" for f in floors.values()), "", "")]
    for name in names:
        scores = " ".join(cells(name, lambda a: short(a["scores"])))
        lines.append((name, *cells(name, distance), scores, " ".join(cells(name, lambda a: f"{a['seconds']:.1f}"))))
    return rst(("Method", *(case[0].upper() + case[1:] for case in floors), "Scores", "Seconds"), lines)


# The figure

#: Where the first panel ends, in floors; the rest is at its edge.
TOP = 20
STYLES = (("#E69F00", "o"), ("#CC79A7", "s"), ("0.35", "D"))
#: The colours of methods in all pictures.
COLOURS = {"skksivi": "#0072B2", "KSIVI": "#009E73", "NUTS": "#D55E00"}


def draw(document):
    """Draw a row per method: distances over their floor, score evaluations and seconds, a marker for each target."""
    of, names = ordered(document)
    figure, axes = plt.subplots(
        1, 3, figsize=(10.5, 1.4 + 0.24 * len(names)), width_ratios=[2, 1, 1], sharey=True, layout="constrained"
    )
    for (case, found), (colour, marker), shift in zip(of.items(), STYLES, (-0.2, 0, 0.2), strict=False):
        floor = document["floors"][case]
        for row, name in enumerate(names):
            if name not in found:
                continue
            a, look = found[name], {"marker": marker, "color": colour, "ms": 5.5, "mew": 1.2}
            near = a["mean"] < floor["mean"] + 2 * floor["sd"]
            for ax, x in zip(axes, (a["mean"] / floor["mean"], a["scores"], a["seconds"]), strict=True):
                ax.plot(min(x, TOP) if ax is axes[0] else x, row + shift, mfc="w" if near else colour, **look)
                if ax is axes[0] and x > TOP:
                    place = {"ha": "right", "va": "top" if shift > 0 else "bottom", "fontsize": 8, "color": "0.3"}
                    ax.text(0.9 * TOP, row + shift / 2, f"{x:,.0f}", **place)
        axes[0].plot([], [], ls="", label=case, **look)
    axes[0].plot([], [], "o", color="0.3", mfc="w", label="hollow: within the noise of exact draws")
    axes[0].axvline(1, color="0.4", lw=1)
    axes[0].set(xlim=(0.8, TOP * 1.1), xlabel="sliced Wasserstein distance over its floor")
    axes[0].set_yticks(range(len(names)), names)
    axes[1].set(xlabel="evaluations of the score")
    axes[2].set(xlabel="seconds to fit, one thread")
    for label in axes[0].get_yticklabels():
        label.set_color(COLOURS.get(label.get_text().split(",")[0], "k"))
    for ax in axes:
        ax.set_xscale("log")
        ax.grid(axis="y", color="0.92")
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].minorticks_off()
    axes[0].set_xticks([1, 2, 5, 10, TOP], ["1", "2", "5", "10", f"{TOP}+"])
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return figure


def main():
    args = command(__doc__, methods=METHODS).parse_args()
    torch.set_num_threads(1)
    document = shown(args) or compare(args)
    show_tables(args, {"comparison": manual(document)})
    if document["settings"]["quick"]:
        print("A quick run: a few iterations, whose numbers mean nothing.")
    show_figure(args, "comparison", partial(draw, document))


if __name__ == "__main__":
    main()
