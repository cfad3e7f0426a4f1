"""What a score without a graph costs: the Kullback-Leibler divergence of fits, and their time.

python benchmarks/detached.py [--seeds 3] [--out FILE.json] [--quick]
python benchmarks/detached.py --show benchmarks/detached.json --manual doc      the table of the manual

The banana and the X by the defaults, and by the paper's settings with 5,000 iterations, from four kinds of the same
score: a target with its own product, a torch function, one of numpy arrays and one that detaches its input; and once
more from the last with the check of its graph taken out, so that its products are those of a constant. Times are CPU
seconds in units of those of automatic differentiation.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import torch
from _harness import command, exact, of, pairs, results, rst, show_tables, spread, watched

from skksivi import KSIVIApproximator, paper_settings
from skksivi.metrics import kl_divergence
from skksivi.parameters import Pilot
from skksivi.score import _probe
from skksivi.targets import Banana, XShaped


def banana_of_arrays(X):
    v1, v2 = X[:, 0], X[:, 1] - X[:, 0] ** 2 - 1
    g1, g2 = (0.9 * v2 - v1) / 0.19, (0.9 * v1 - v2) / 0.19
    return np.column_stack([g1 - 2 * v1 * g2, g2])


PRECISION = np.linalg.inv([[2.0, 1.8], [1.8, 2.0]])


def x_shaped_of_arrays(X):
    scores = [-X @ PRECISION, -X @ (PRECISION * [[1, -1], [-1, 1]])]
    logits = [(s * X).sum(1) / 2 for s in scores]
    share = 1 / (1 + np.exp(logits[1] - logits[0]))[:, None]
    return share * scores[0] + (1 - share) * scores[1]


TARGETS = {"banana": (Banana(), banana_of_arrays), "x-shaped": (XShaped(), x_shaped_of_arrays)}
KINDS = ("own product", "autograd", "numpy", "detached", "detached, unguarded")
CASES = [f"{name}, {settings}" for name in TARGETS for settings in ("defaults", "the paper's")]


def jobs(args):
    for seed in range(args.seeds):
        for case in CASES[:2] if args.quick else CASES:
            own = KINDS if case.startswith("banana") else KINDS[1:]  # the X has no product of its own
            yield from ((case, kind, seed) for kind in (own[:-1] if case.endswith("defaults") else own))


def unguarded():
    """Leave the products to autograd, whatever the check finds, as an implementation without the check does."""
    check = _probe.choose_product

    def blind(score, *arguments):
        score, asymmetry = check(score, *arguments)
        return replace(score, by_differences=False), asymmetry

    return mock.patch.object(_probe, "choose_product", blind)


def parameters_of(case, args):
    name, settings = case.split(", ")
    own = {} if settings == "defaults" else paper_settings(name) | {"max_iter": 5000}
    return own | ({"max_iter": 50, "whiten": own.get("whiten", Pilot(budget=20_000))} if args.quick else {})


def run(case, kind, seed, args):
    """Fit by a kind of score; return its row."""
    target, of_arrays = TARGETS[case.split(", ")[0]]
    score_fn = {"own product": target, "autograd": target.score_fn, "numpy": of_arrays}.get(
        kind, lambda x: target.score_fn(x.detach())
    )
    q = KSIVIApproximator(**parameters_of(case, args), random_state=seed)
    with watched() as costs, unguarded() if "unguarded" in kind else contextlib.nullcontext():
        q.fit(score_fn, n_features=None if kind == "own product" else 2)
    n = 2000 if args.quick else 100_000
    truth = exact(target, n, 0)
    kl, floor = kl_divergence(q.sample(n), truth), kl_divergence(exact(target, n, 1), truth)
    return {"kl": kl, "floor": floor, "seconds": costs["seconds"], "warned": bool(costs["warned"])}


def table(rows):
    """Return the table of the manual: means over seeds, and the median of the ratios of CPU time."""
    cells = []
    for case, kind in pairs(rows):
        seconds = of(rows, "seconds", case=case, method=kind)
        ratio = np.median(np.divide(seconds, of(rows, "seconds", case=case, method="autograd")[: len(seconds)]))
        kl, floor, warned = (of(rows, key, case=case, method=kind) for key in ("kl", "floor", "warned"))
        cells.append((case, kind, spread(kl), f"{floor[0]:.3f}", f"{ratio:.2f}", f"{sum(warned)} of {len(warned)}"))
    return rst(("Target, settings", "Score", "KL", "Floor", "Time", "Warned"), cells)


def main():
    args = command(__doc__).parse_args()
    torch.set_num_threads(1)
    show_tables(args, {"detached": table(results(args, jobs(args), partial(run, args=args))["rows"])})


if __name__ == "__main__":
    main()
