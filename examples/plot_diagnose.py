"""
One good fit and three bad ones
===============================

A converged loss does not mean that the fit is good. `skksivi.diagnose` runs eleven checks and suggests a remedy for
each that fails. Here are a good fit and three that went wrong in different ways. No single check finds all three.
"""

import matplotlib.pyplot as plt

from skksivi import KSIVIApproximator, diagnose
from skksivi.baselines import FullRankVI
from skksivi.targets import EightGaussians, StudentT, Target

MAX_ITER = 1000
# sphinx_gallery_thumbnail_number = 3
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

options = {"max_iter": MAX_ITER, "random_state": 0}


def show(name, q, target):
    """Fit, print the report and draw it."""
    report = diagnose(q.fit(target), target, random_state=0)
    print(report)
    figure = report.plot()
    figure.suptitle(f"{name}: " + (", ".join(check.name for check in report.warnings) or "no check fails"))
    # sphinx_gallery_start_ignore
    if args.output:
        figure.savefig(args.output, dpi=80)
        plt.close(figure)
    # sphinx_gallery_end_ignore
    plt.show()


# %%
# A good fit
# ----------
#
# The defaults, on the ring, trained in any case so that there is a loss. A report draws four panels: the loss, with
# its last quarter shaded; the Stein variances, which should be in the band around one; the whitened scores of the
# draws, beside scores where Markov chains have moved them; and the draws by the mode they are in.

show("A good fit", KSIVIApproximator(early_stopping=None, **options), ring)

# %%
# Too narrow
# ----------
#
# Without whitening, in half the iterations. The loss is flat, but the draws have the width that the family started
# with: the Stein variance of the second coordinate is far from one.

show("Too narrow", KSIVIApproximator(whiten=None, max_iter=MAX_ITER // 2, random_state=0), units)

# %%
# Lost modes
# ----------
#
# From a single mode. Within the modes that have draws everything is right, and the discrepancy is insensitive to the
# others. The search for modes finds them: crosses mark modes without draws.

show("Lost modes", KSIVIApproximator(whiten="laplace", mixing="normal", **options), ring)

# %%
# No tails
# --------
#
# A Gaussian instead of a Student t. Means and variances look harmless; chains that start at the draws leave them
# outward, and the importance ratios have a heavy tail.

show("No tails", FullRankVI(**options), tails)
