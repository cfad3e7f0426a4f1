"""
One good fit and three bad ones
===============================

A converged loss does not mean that the fit is good. `skksivi.diagnose` runs eleven checks and suggests a remedy for
each that fails. Here are a good fit and three that went wrong in different ways. No single check finds all three."""

import matplotlib.pyplot as plt

from skksivi import KSIVIApproximator, diagnose
from skksivi.baselines import FullRankVI
from skksivi.targets import EightGaussians, StudentT, Target

MAX_ITER = 1000
# sphinx_gallery_start_ignore
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--max-iter", type=int, default=MAX_ITER)
parser.add_argument("--output", help="write the figure to this file instead of showing it")
args, _ = parser.parse_known_args()
MAX_ITER = args.max_iter
# sphinx_gallery_end_ignore

# %%
# Three targets: a ring of eight Gaussians, two coordinates in unlike units, and heavy tails.


class Units(Target):
    """Two independent Gaussians, one in millimetres and one in metres."""

    n_features = 2

    def log_prob(self, x):
        return -((x[:, 0] - 3).square() + ((x[:, 1] + 200) / 30).square()) / 2


ring, units, tails = EightGaussians(shift=5.0), Units(), StudentT()

# %%
# The defaults, on the ring. Then a fit without whitening, in half the iterations; one that starts at a single mode
# and misses the others, which the discrepancy does not see; and a Gaussian instead of a Student t.

options = {"max_iter": MAX_ITER, "random_state": 0}
fits = {
    "a good fit": (KSIVIApproximator(**options), ring),
    "too narrow": (KSIVIApproximator(whiten=None, max_iter=MAX_ITER // 2, random_state=0), units),
    "lost modes": (KSIVIApproximator(whiten="laplace", mixing="normal", **options), ring),
    "no tails": (FullRankVI(**options), tails),
}
reports = {name: diagnose(q.fit(target), target, random_state=0) for name, (q, target) in fits.items()}
for name, report in reports.items():
    print(f"{name}: {report}\n")

# %%
# Each report draws four panels: the loss, with its last quarter shaded; the Stein variances, which should be in the
# band around one; the whitened scores of the draws, beside those where Markov chains have moved them; and the draws
# by the mode they are in.

figure = plt.figure(figsize=(13, 13), layout="constrained")
rows = figure.subfigures(len(reports), 1)
for row, (name, report) in zip(rows, reports.items(), strict=True):
    warned = ", ".join(check.name for check in report.warnings) or "nothing"
    row.suptitle(f"{name} (warns of {warned})")
    report.plot(row.subplots(1, 4))
# sphinx_gallery_start_ignore
if args.output:
    figure.savefig(args.output, dpi=80)
    print(f"Figure in {args.output}")
    plt.close("all")
# sphinx_gallery_end_ignore
plt.show()
