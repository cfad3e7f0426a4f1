"""The paper's settings, and the defaults, on the waveform posterior against exact reference draws.

python benchmarks/waveform.py [--seeds 3] [--max-iter 20000]
python benchmarks/waveform.py --show benchmarks/waveform.json --manual doc      the table of the manual
"""

from __future__ import annotations

import time
from functools import partial

import numpy as np
from _harness import command, of, pairs, results, rst, show_tables, spread
from posteriors import waveform_target

from skksivi import KSIVIApproximator, paper_settings
from skksivi.baselines import Laplace
from skksivi.datasets import load_waveform_posterior
from skksivi.metrics import sliced_wasserstein

PAPER = paper_settings("waveform")
#: The paper starts sigma^2 at e^-5; its public code starts the U-statistic at e^-2.
METHODS = {
    "paper, vanilla": PAPER,
    "paper, U-statistic": PAPER | {"gradient_estimator": "u-statistic"},
    "U-statistic from e^-2": paper_settings("waveform-u-statistic"),
    "defaults": {},
}

#: What is kept of a fit.
KEYS = ("sliced_w2", "mean_error", "sd_ratio_min", "sd_ratio_max", "seconds")


def accuracy(X, reference):
    """Return sliced W2 (1,000 against 1,000), the largest standardised mean error and the range of sd ratios."""
    mean, sd = reference.mean(0), reference.std(0)
    ratio = X.std(0) / sd
    return {
        "sliced_w2": sliced_wasserstein(X[:1000], reference[:1000], random_state=0),
        "mean_error": float(np.abs((X.mean(0) - mean) / sd).max()),
        "sd_ratio_min": float(ratio.min()),
        "sd_ratio_max": float(ratio.max()),
    }


def run(_case, method, seed, max_iter):
    """Fit, or take the reference's own draws; return the row."""
    reference = load_waveform_posterior()
    if method == "noise floor":
        return accuracy(reference[1000:], reference)
    target, parameters = waveform_target(), METHODS.get(method, {})
    own = {"max_iter": max_iter} if parameters else {}
    make = Laplace if method == "Laplace" else KSIVIApproximator
    q, start = make(**parameters | own, random_state=seed), time.perf_counter()
    q.fit(target)
    seconds = time.perf_counter() - start
    return {**accuracy(q.sample(10_000), reference), "seconds": seconds}


def main():
    parser = command(__doc__, methods=METHODS)
    parser.add_argument("--max-iter", type=int, default=20_000)
    args = parser.parse_args()
    settings = {"max_iter": 100 if args.quick else args.max_iter}
    jobs = [("waveform", "noise floor", 0), ("waveform", "Laplace", 0)]
    jobs += [("waveform", method, seed) for method in args.methods for seed in range(args.seeds)]
    show_tables(args, {"waveform": table(results(args, jobs, partial(run, **settings), **settings)["rows"])})


def table(rows):
    """Return the table of the manual: errors and ratios of the worst seed, median seconds."""
    lines = []
    for case, method in pairs(rows):
        w2, error, low, high, seconds = (of(rows, key, case=case, method=method) for key in KEYS)
        ratios, median = f"{min(low):.2f} - {max(high):.2f}", f"{np.median(seconds):.1f}" if seconds else ""
        lines.append((method, spread(w2), f"{max(error):.2f}", ratios, median))
    return rst(("Method", "Sliced W2", "Mean error", "Sd ratio", "Seconds"), lines)


if __name__ == "__main__":
    main()
