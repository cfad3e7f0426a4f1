"""Distance against iterations and score calls, of the paper's method and its rivals, from few iterations to many.

python benchmarks/convergence.py [--seeds 1] [--methods ...] [--out FILE.json]
python benchmarks/convergence.py --show benchmarks/convergence.json --manual doc      the figure of the manual

Each point is a fit of its own that ends there. All but the last method have `paper_settings(name, method=...)` and
no coordinates; the last is `method="ksivi"`, whose calls include its start. The distance is the sliced Wasserstein
distance of draws from as many reference draws: 10,000, of the waveform 1,000 as in the paper's tables. The
lines of UIVI and SIVISM, whose iterations take some twelve and four times the seconds of SIVI, end earlier.
"""

from __future__ import annotations

from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import torch
from _harness import command, exact, results, rst, select, show_figure, show_tables, watched
from reference import waveform_target

from skksivi import KSIVIApproximator, baselines, paper_settings
from skksivi.datasets import load_waveform_posterior
from skksivi.metrics import sliced_wasserstein
from skksivi.targets import Banana, XShaped

CASES = {"banana": Banana, "x-shaped": XShaped, "waveform": waveform_target}
OWN = 'method="ksivi"'
#: The colour and marker of each method.
METHODS = {
    "SIVI": ("#E69F00", "o"), "UIVI": ("#882255", "v"), "SIVISM": ("#CC79A7", "s"), "SVGD": ("0.5", "x"),
    "KSIVI": ("#009E73", "D"), OWN: ("#009E73", "*"),
}  # fmt: skip
ITERATIONS = (100, 300, 1000, 3000, 10_000)
FEWER = {"UIVI": ITERATIONS[:3], "SIVISM": ITERATIONS[:4], OWN: ITERATIONS[:4]}


def run(case, method, seed, quick):
    torch.set_num_threads(1)
    name, n_iter = case.split(", ")
    target = CASES[name]()
    Y = load_waveform_posterior() if name == "waveform" else exact(target, 20_000, seed)
    Y, other = Y[np.random.RandomState(seed).permutation(len(Y))].reshape(2, -1, target.n_features)
    if method == OWN:
        q = KSIVIApproximator(method="ksivi")
    else:
        make = KSIVIApproximator if method == "KSIVI" else getattr(baselines, method)
        q = make(**paper_settings(name, method))
    q.set_params(max_iter=3 if quick else int(n_iter), random_state=seed)
    with watched() as costs:
        q.fit(target)
    ends = {"w2": q.sample(len(Y), random_state=seed), "floor": other}
    distances = {key: sliced_wasserstein(X, Y, random_state=seed) for key, X in ends.items()}
    return {**distances, "calls": q.n_score_calls_ + q.n_products_, "seconds": costs["seconds"]}


def points(rows, name, method):
    """Return iterations, score calls and distances of a line, means over seeds."""
    found = [(n_iter, select(rows, case=f"{name}, {n_iter}", method=method)) for n_iter in ITERATIONS]
    return [(n, *(np.mean([row[key] for row in some]) for key in ("calls", "w2"))) for n, some in found if some]


def floor(rows, name):
    """Return the mean distance of two sets of exact draws."""
    return np.mean([row["floor"] for row in rows if row["case"].startswith(name)])


def table(rows):
    """Return the distance and the calls at the end of each line."""
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        ends = [points(rows, name, method)[-1] for name in CASES]
        lines.append((method, f"{ends[0][0]:,}", *(f"{w2:.3f}, {calls / 1e3:,.0f}k" for _, calls, w2 in ends)))
    lines.append(("exact draws", "", *(f"{floor(rows, name):.3f}" for name in CASES)))
    return rst(("Method", "Iterations", *map(str.capitalize, CASES)), lines)


def draw(rows):
    figure, axes = plt.subplots(2, 3, figsize=(9.6, 5.6), sharey=True, layout="constrained")
    for column, name in zip(axes.T, CASES, strict=True):
        for method in dict.fromkeys(row["method"] for row in rows):
            (colour, marker), (n_iter, calls, w2) = METHODS[method], zip(*points(rows, name, method), strict=True)
            for ax, x in zip(column, (n_iter, calls), strict=True):
                ax.plot(x, w2, marker=marker, ms=8 if method == OWN else 4, color=colour, label=method)
        for ax in column:
            ax.set(xscale="log", yscale="log", ylim=(0.02, 2))
            ax.axhline(floor(rows, name), color="k", ls=":", lw=1)
            ax.spines[["top", "right"]].set_visible(False)
        column[0].set(title=name.capitalize(), xlabel="iterations")
        column[1].set(xlabel="score calls")
    for ax in axes[:, 0]:
        ax.set(ylabel="sliced Wasserstein distance")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=6, frameon=False)
    return figure


def main():
    args = command(__doc__, seeds=1, methods=METHODS).parse_args()
    jobs = [
        (f"{name}, {n_iter}", method, seed)
        for seed in range(args.seeds)
        for method in args.methods
        for n_iter in FEWER.get(method, ITERATIONS)[: 1 if args.quick else None]
        for name in CASES
    ]
    rows = results(args, jobs, partial(run, quick=args.quick))["rows"]
    show_tables(args, {"convergence": table(rows)})
    show_figure(args, "convergence", partial(draw, rows))


if __name__ == "__main__":
    main()
