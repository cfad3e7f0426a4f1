"""The pictures of the manual that explain an idea: `python benchmarks/pictures.py` draws them anew."""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from skksivi import HKSIVIApproximator, KSIVIApproximator, mixing
from skksivi.kernels import IMQ, Gaussian
from skksivi.plotting import DensityDisplay
from skksivi.targets import EightGaussians, StudentT

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "0.55"


def reach(_):
    """Values of two kernels against the distance of two draws, in two and in fifty dimensions."""
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.4), layout="constrained")
    r = np.linspace(0, 6, 200)
    for kernel, colour in ((Gaussian, BLUE), (IMQ, GREEN)):
        axes[0].plot(r, kernel(bandwidth=1.0).profile(torch.as_tensor(r**2)), color=colour, label=kernel.__name__)
    axes[0].set(
        xlabel="distance in bandwidths", ylabel="value of the kernel", ylim=(0, 1.05), title="A kernel's reach"
    )
    axes[0].legend(frameon=False, fontsize=9)
    rng = np.random.default_rng(0)
    for d, colour in ((2, BLUE), (50, ORANGE)):
        x = rng.normal(size=(2, 20_000, d))
        axes[1].hist(np.linalg.norm(x[0] - x[1], axis=1), 80, density=True, histtype="step", color=colour, lw=1.5)
    axes[1].text(2.9, 0.32, "d = 2", color=BLUE)
    axes[1].text(11.3, 0.32, "d = 50", color=ORANGE)
    axes[1].set(xlabel="distance of two draws of N(0, I)", yticks=[], title="Draws are far apart if d is large")
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def tail(max_iter):
    """Draws of a Student t by a network of Gaussian noise and by the defaults: quantiles against exact ones."""
    target = StudentT()
    exact = target.sample(100_000, torch.Generator().manual_seed(0)).numpy()
    own = {"method": "path", "mixing": "normal", "whiten": "laplace"}
    light = KSIVIApproximator(**own, max_iter=max_iter, random_state=0).fit(target)
    fits = {"normal mixing": (light, "#E69F00"), "skksivi": (KSIVIApproximator(random_state=0).fit(target), BLUE)}
    at = np.concatenate([np.linspace(0.01, 0.99, 99), 1 - np.geomspace(0.01, 1e-4, 30)])
    figure, ax = plt.subplots(figsize=(5.4, 4), layout="constrained")
    reference = np.quantile(np.linalg.norm(exact, axis=1), at)
    ax.plot(reference, reference, "k--", lw=1, label="exact")
    for name, (q, colour) in fits.items():
        r = np.linalg.norm(q.sample(100_000, random_state=0), axis=1)
        ax.plot(reference, np.quantile(r, at), "o-", ms=3, lw=1, color=colour, label=name)
    ax.set(xscale="log", yscale="log", xlabel="quantile of the distance, exact", ylabel="quantile of the fit")
    end = np.quantile(np.linalg.norm(exact, axis=1), 0.99)
    ax.axvline(end, color=GREY, lw=0.8)
    ax.text(1.08 * end, 0.12, "99% of the draws\nlie to the left", fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    return figure


def layers(max_iter):
    """The layers of a hierarchy on a ring of eight modes."""
    target = EightGaussians()
    q = HKSIVIApproximator(n_layers=4, mixing=mixing.Normal(), whiten=None, max_iter=max_iter, random_state=0)
    q.fit(target)
    figure, axes = plt.subplots(1, 5, figsize=(12.4, 2.7), layout="constrained")
    for ax, layer in zip(axes, range(4, -1, -1), strict=True):
        DensityDisplay.from_draws(q.sample(2000, 0, layer=layer), target, extent=(-14, 14, -14, 14), ax=ax)
        ax.set_title(f"layer {layer}")
        ax.label_outer()
    return figure


def flow(_):
    """The stages of `fit` from top to bottom, and the way past the training."""
    figure, ax = plt.subplots(figsize=(4.6, 4.5), layout="constrained")
    ax.set(xlim=(0, 100), ylim=(-1, 98))
    ax.set_axis_off()
    boxes = [
        ("start", "the score is checked; then modes, weighted\ndraws, chains or cells: $x = m + L u$", GREEN),
        ("verdict", "how far may the numbers be off?", ORANGE),
        ("training", "$u = \\mu_\\phi(z) + \\sigma_\\phi \\xi$ along the path gradient", BLUE),
        ("verdict", "the better of both", ORANGE),
        ("fit", "sample, score, diagnose", GREY),
    ]
    for k, (name, text, colour) in enumerate(boxes):
        y = 82 - 20 * k
        ax.add_patch(plt.Rectangle((2, y), 80, 14, fc="w", ec=colour, lw=2))
        ax.text(42, y + 13, f"{name}\n", ha="center", va="top", fontsize=12.5, weight="bold", color="k")
        ax.text(42, y + 7.8, text, ha="center", va="top", fontsize=10.5, linespacing=1.1)
        if k:
            ax.annotate("", (42, y + 14), (42, y + 20), arrowprops={"arrowstyle": "->"})
    ax.text(44, 59, "not good enough", va="center", fontsize=10.5)
    ax.plot([82, 91, 91], [69, 69, 9], color=ORANGE, lw=1.5)
    ax.annotate("", (82, 9), (91, 9), arrowprops={"arrowstyle": "->", "color": ORANGE, "lw": 1.5})
    ax.text(95.5, 39, "good: nothing is trained", rotation=270, ha="center", va="center", color=ORANGE, fontsize=10)
    return figure


def start(_):
    """The start of `fit`: five boxes, and the ways back to the weighted draws."""
    figure, ax = plt.subplots(figsize=(6.6, 2.9), layout="constrained")
    ax.set(xlim=(-1, 141), ylim=(-2, 60))
    ax.set_axis_off()
    boxes = [
        (0, 34, "modes", "Newton steps, and\nsearches from afar", GREEN),
        (36, 34, "mixture", "Gaussians in\nstraight coordinates", GREEN),
        (72, 34, "weighted draws", "of the mixture and\naround it", BLUE),
        (108, 34, "verdict", "how far may the\nnumbers be off?", ORANGE),
        (72, 0, "chains, or cells", "where weights fail;\ncells where $d \\leq 3$", GREY),
    ]
    for x, y, name, text, colour in boxes:
        ax.add_patch(plt.Rectangle((x, y), 29, 18, fc="w", ec=colour, lw=2))
        ax.text(x + 14.5, y + 16.5, name, ha="center", va="top", fontsize=9.5, weight="bold")
        ax.text(x + 14.5, y + 10.5, text, ha="center", va="top", fontsize=8, linespacing=1.1)
    for a, b in (((29, 43), (36, 43)), ((65, 43), (72, 43)), ((101, 43), (108, 43)), ((86.5, 34), (86.5, 18))):
        ax.annotate("", b, a, arrowprops={"arrowstyle": "->"})
    ax.plot([122.5, 122.5, 50.5], [52, 58, 58], color=ORANGE, lw=1.2)
    ax.annotate("", (50.5, 52), (50.5, 58.2), arrowprops={"arrowstyle": "->", "color": ORANGE})
    ax.text(86.5, 56.8, "not known: a better one, or more draws", ha="center", va="top", color=ORANGE, fontsize=8.5)
    ax.plot([72, 50.5], [9, 9], color="k", lw=1)
    ax.annotate("", (50.5, 34), (50.5, 8.8), arrowprops={"arrowstyle": "->"})
    return figure


def cluster(_):
    """A script and its workers, the thumbnail of the examples that have some."""
    figure, ax = plt.subplots(figsize=(4, 2.8), layout="constrained")
    ax.set(xlim=(-2.1, 2.1), ylim=(-1.45, 1.45))
    ax.set_axis_off()
    for x, y in ((-1.4, 0.95), (1.4, 0.95), (-1.4, -0.95), (1.4, -0.95)):
        ax.annotate("", (0.75 * x, 0.76 * y), (0.15 * x, 0.2 * y), arrowprops={"arrowstyle": "<->", "color": "k"})
        ax.text(x, y, "worker", ha="center", va="center", bbox={"fc": "w", "ec": BLUE, "lw": 2, "pad": 7})
    ax.text(0, 0, "script", ha="center", va="center", bbox={"fc": "w", "ec": ORANGE, "lw": 2, "pad": 7})
    return figure


PICTURES = {draw.__name__: draw for draw in (cluster, reach, tail, layers, flow, start)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "doc/_static/guide")
    parser.add_argument("--max-iter", type=int, default=1500, help="of the two that train")
    parser.add_argument("--names", nargs="+", choices=PICTURES, default=list(PICTURES))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.names:
        figure = PICTURES[name](args.max_iter)
        figure.savefig(args.out / f"{name}.png", dpi=130)
        plt.close(figure)
        print(args.out / f"{name}.png")
