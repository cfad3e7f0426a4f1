r"""
How smooth the network stays
============================

The paper's theory assumes that :math:`\|\nabla_\phi \mu(z; \phi)\|` and the Lipschitz constant of
:math:`\nabla_\phi \mu(z; \phi)` are bounded by a G times :math:`1 + \|z\|`. Its last figures check whether that holds
during a training on the waveform posterior, for the vanilla estimator and the U-statistic: Frobenius norms, mean and
range over random z. The paper runs 20,000 iterations (``--full``); here there are 2,000.

The paper is `Cheng et al. (2024) <https://arxiv.org/abs/2405.18997>`__.
"""

import warnings

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from torch.func import functional_call, jacrev

from skksivi import KSIVIApproximator, paper_settings
from skksivi.datasets import load_waveform
from skksivi.targets import BayesianLogisticRegression

MAX_ITER = 2000
FULL = False  # True for the paper's iterations and draws
# sphinx_gallery_start_ignore
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--max-iter", type=int, default=MAX_ITER)
parser.add_argument("--full", action="store_true")
parser.add_argument("--output", help="write the figure to this file instead of showing it")
args, _ = parser.parse_known_args()
MAX_ITER = args.max_iter
FULL = args.full
# sphinx_gallery_end_ignore
n_iter, n_points = (20_000, 50) if FULL else (MAX_ITER, 10)

# %%
# The Lipschitz constant is estimated by the change of the Jacobian along a small random step of the parameters. The
# network has kinks, where there is no such constant; a step meets few of them.


def jacobian(network, parameters, z):
    by_name = jacrev(lambda p: functional_call(network, p, (z,)))(parameters)
    return torch.cat([J.flatten(1) for J in by_name.values()], 1)


def smoothness(network, generator):
    """Return the norm of the Jacobian over 1 + |z| (n_points,), and of its change over the step."""
    phi = {name: p.detach() for name, p in network.named_parameters()}
    rows = []
    for _ in range(n_points):
        z = torch.randn(10, generator=generator)
        step = {name: 1e-3 * torch.randn(p.shape, generator=generator) for name, p in phi.items()}
        length = torch.cat([s.flatten() for s in step.values()]).norm()
        J = jacobian(network, phi, z)
        moved = jacobian(network, {name: phi[name] + step[name] for name in phi}, z)
        rows.append(torch.stack([J.norm(), (moved - J).norm() / length]) / (1 + z.norm()))
    return torch.stack(rows).numpy()


# %%
# The learning rate does not depend on `max_iter`: a shorter fit of the same seed is the beginning of a longer one. It
# warns that it is not good.

warnings.simplefilter("ignore", ConvergenceWarning)
X, y = load_waveform(return_X_y=True)
target = BayesianLogisticRegression(X, y, prior_precision=0.01, fit_intercept=True)
labels = {"vanilla": "vanilla", "u-statistic": "U-statistic"}
colours = {"vanilla": "#E69F00", "U-statistic": "#009E73"}
figure, axes = plt.subplots(1, 2, figsize=(10.5, 4), layout="constrained")
for estimator, label in labels.items():
    at, generator = n_iter // 2 ** np.arange(3)[::-1], torch.Generator().manual_seed(0)
    settings = paper_settings("waveform") | {"gradient_estimator": estimator, "random_state": 0}
    fits = (KSIVIApproximator(**settings | {"max_iter": n}).fit(target) for n in at.tolist())
    seen = np.array([smoothness(fit.family_.mean, generator) for fit in fits])
    for ax, values in zip(axes, np.moveaxis(seen, -1, 0), strict=True):
        ax.plot(at, values.mean(1), color=colours[label], label=label)
        ax.fill_between(at, values.min(1), values.max(1), color=colours[label], alpha=0.2, linewidth=0)
    print(f"{label:<12} largest ratios {seen.max((0, 1)).round(1)}")
axes[0].set(xlabel="iterations", title=r"$\|\nabla_\phi \mu\|$ over $1 + \|z\|$", ylim=(0, None))
axes[1].set(xlabel="iterations", title=r"Lipschitz constant of $\nabla_\phi \mu$ over $1 + \|z\|$", ylim=(0, None))
axes[0].legend(frameon=False, loc="lower right")

# sphinx_gallery_start_ignore
figure.set_label(
    "Left, the norm of the Jacobian rises slowly from four to six over the training; right, the Lipschitz "
    "constant stays between one and two on average, alike for both estimators."
)
if args.output:
    figure.savefig(args.output, dpi=110)
    plt.close("all")
# sphinx_gallery_end_ignore
plt.show()
