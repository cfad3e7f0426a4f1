"""
The two gradient estimators
===========================

The paper's figure of gradient norms: the mean over repeated batches of size N and, below it, the standard deviation
of the gradient, on a banana and on a conditioned diffusion. The vanilla estimator pairs two batches of N draws with
each other, the U-statistic the draws of one batch; a third curve gives the former the budget of the latter, two
batches of N / 2. Settings of the paper (``--full``): 50 repetitions, and a diffusion of 100 dimensions instead of 50.

The paper is `Cheng et al. (2024) <https://arxiv.org/abs/2405.18997>`__.
"""

import math
import warnings

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning

from skksivi import KSIVIApproximator
from skksivi.kernels import Gaussian
from skksivi.parameters import Adam, Network
from skksivi.targets import Banana, ConditionedDiffusion

REPEATS = 30
FULL = False  # True for the paper's iterations and draws
# sphinx_gallery_start_ignore
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--repeats", type=int, default=REPEATS)
parser.add_argument("--full", action="store_true")
parser.add_argument("--output", help="write the figure to this file instead of showing it")
args, _ = parser.parse_known_args()
REPEATS = args.repeats
FULL = args.full
# sphinx_gallery_end_ignore
n_repeats, d = (50, 100) if FULL else (REPEATS, 50)

# %%
# A layer in an early state of its training, and a batch of draws x with :math:`f = s_p(x) - s_{q(\cdot|z)}(x)`.

targets = {"banana": Banana(), f"conditioned diffusion, d = {d}": ConditionedDiffusion(d)}


def early(target):
    d = target.n_features
    q = KSIVIApproximator(
        whiten=None, latent_dim=min(d, 50), hidden_layer_sizes=Network((50, 50), linear_skip=False),
        initial_scale=math.exp(-1), optimizer=Adam(ema=None), max_iter=100, random_state=0,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # it is meant to be unfinished
        return q.fit(target).family_.requires_grad_(True)


def draw(family, target, n, generator):
    z = family.draw_latent(n, generator)
    mu, sigma = family.mean(z), family.sigma(z)
    xi = torch.randn(mu.shape, generator=generator)
    x = mu + sigma * xi
    return x, target.score_fn(x) + xi / sigma


# %%
# Both estimators are a few lines. Their gradients come by automatic differentiation here; ``fit`` has its own.


def vanilla(family, target, n, generator):
    (x, f), (y, g) = (draw(family, target, n, generator) for _ in range(2))
    return (Gaussian()(x, y) * (f @ g.T)).mean()


def u_statistic(family, target, n, generator):
    x, f = draw(family, target, n, generator)
    pairs = Gaussian()(x) * (f @ f.T)
    return (pairs.sum() - pairs.trace()) / (n * (n - 1))


def gradient(estimate, family, *arguments):
    family.zero_grad()
    estimate(family, *arguments).backward()
    return torch.cat([p.grad.flatten() for p in family.parameters()])


# %%
# The norm of an unbiased estimate is too large by its variance, which falls as 1 / N. With equal numbers of draws the
# U-statistic varies less, up to the noise of 30 repetitions, since the variance of a pair is at least twice the
# variance of its projection. For many draws the standard deviation falls as one over the root of N, for few draws
# faster.

curves = {
    "vanilla, 2N draws": (vanilla, 1),
    "vanilla, N draws": (vanilla, 2),
    "U-statistic, N draws": (u_statistic, 1),
}
COLOURS = ("#CC79A7", "#E69F00", "#009E73")
sizes = [4, 8, 16, 32, 64, 128, 256]
figure, axes = plt.subplots(2, len(targets), figsize=(10, 6.6), sharex=True, layout="constrained")
for (top, bottom), (title, target) in zip(axes.T, targets.items(), strict=True):
    family, generator = early(target), torch.Generator().manual_seed(0)
    for k, (name, (estimate, share)) in enumerate(curves.items()):
        batches = [
            torch.stack([gradient(estimate, family, target, n // share, generator) for _ in range(n_repeats)])
            for n in sizes
        ]
        mean = [g.norm(dim=1).mean().item() for g in batches]
        sd = [g.var(0).sum().sqrt().item() for g in batches]
        for ax, values in ((top, mean), (bottom, sd)):
            ax.plot(sizes, values, "o-", color=COLOURS[k], markersize=3.5, label=name)
        print(f"{title:<32}{name:<22} sd at N = 4 ... 256:" + " ".join(f"{value:>9.3g}" for value in sd))
    bottom.plot(
        sizes, 0.6 * sd[0] * np.sqrt(sizes[0] / np.array(sizes)), ":", color="0.4", label=r"slope of $1 / \sqrt{N}$"
    )
    top.set(xscale="log", yscale="log", ylabel="mean norm of the gradient", title=title)
    bottom.set(yscale="log", xlabel="N", ylabel="sd of the gradient")
    bottom.set_xticks(sizes, labels=sizes)
    for ax in (top, bottom):
        ax.minorticks_off()
        ax.spines[["top", "right"]].set_visible(False)
axes[1, 0].legend(frameon=False)

# sphinx_gallery_start_ignore
figure.set_label(
    "Mean norm and standard deviation of the gradient against batch size, all logarithmic, on two targets. All three "
    "lines fall; the vanilla estimator with N draws lies mostly above the U-statistic with N draws."
)
if args.output:
    figure.savefig(args.output, dpi=110)
    plt.close("all")
# sphinx_gallery_end_ignore
plt.show()
