"""
A conditioned diffusion: paths and losses
=========================================

The paper's figures of the path of a diffusion that is observed with noise
(`Cheng et al., 2024 <https://arxiv.org/abs/2405.18997>`__): mean and 95% band of SIVI, SIVI-SM and KSIVI beside exact
draws, and the losses in training. The paper has 100 points; here there are 50. The three fits have the paper's
100,000 iterations, which take most of an hour; they were recorded by this script with ``--record``. After a few
thousand iterations SIVI is still nearer to the target than KSIVI. A default fit of skksivi is made on the
spot, in coordinates found from the score. The drift is the one in the paper's public code.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from skksivi import KSIVIApproximator, paper_settings
from skksivi.baselines import MALA, SIVI, SIVISM
from skksivi.metrics import sliced_wasserstein
from skksivi.parameters import Adam
from skksivi.targets import ConditionedDiffusion, Target

MAX_ITER = None  # the recorded fits; a number makes new fits
RECORDED = Path(globals().get("__file__", ".")).parent / "recorded"  # a notebook runs in its folder
# sphinx_gallery_start_ignore
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--max-iter", type=int, default=MAX_ITER)
parser.add_argument("--record", action="store_true", help="fit as long as the paper, and keep draws and losses")
parser.add_argument("--output", help="write the figure to this file instead of showing it")
args, _ = parser.parse_known_args()
MAX_ITER = 100_000 if args.record else args.max_iter
# sphinx_gallery_end_ignore
d, rate = 50, 1e-4

# %%
# The public code simulates the observations by the drift :math:`10 x (1 - x^2)`, and divides it by :math:`1 + x^2` in
# the posterior.


class BoundedDiffusion(Target):
    def __init__(self, diffusion):
        self.n_features, self.observations = diffusion.n_features, diffusion.observations

    def log_prob(self, x):
        before = torch.nn.functional.pad(x[..., :-1], (1, 0))
        drift = 10 * before * (1 - before**2) / (1 + before**2)
        innovations, noise = x - before - drift / self.n_features, self.observations.to(x) - x[..., 4::5]
        return -(self.n_features * (innovations**2).sum(-1) + 100 * (noise**2).sum(-1)) / 2


# %%
# Exact draws come from Metropolis-adjusted Langevin chains.

diffusion = ConditionedDiffusion(d)
target = BoundedDiffusion(diffusion)
exact = MALA(n_chains=200, n_draws=10, random_state=0).fit(target).sample(2000, random_state=0)

# %%
# The three have the same layer. The record of a fit has 1,000 draws and the means of the loss over a hundred blocks.

paper = paper_settings("diffusion") | {"max_iter": MAX_ITER or 100_000, "random_state": 0}
shared = {name: paper[name] for name in SIVI().get_params().keys() & paper.keys() - {"optimizer"}}
shared |= paper["hidden_layer_sizes"].get_params()
shared["learning_rate"] = rate
critic = {"critic_hidden_layer_sizes": (128, 128), "critic_learning_rate": rate}
adam = {"decay": paper["optimizer"].decay, "ema": None}
methods = {
    "SIVI": SIVI(**shared, optimizer=Adam(betas=(0.9, 0.999), **adam)),
    "SIVI-SM": SIVISM(**shared, **critic, optimizer=Adam(betas=(0.5, 0.99), **adam)),
    "KSIVI": KSIVIApproximator(**paper),
}


def block_means(values):
    """The means over a hundred blocks of iterations."""
    return np.array([block.mean() for block in np.array_split(values, 100)])


def fit_of(name, q):
    """Draws and losses of the recorded fit, or of a new one."""
    file = RECORDED / f"diffusion_{name}.npz"
    if MAX_ITER is None:
        with np.load(file) as kept:
            return kept["draws"].astype(float), kept["losses"], kept["at"]
    q.fit(target)
    X, losses, at = q.sample(1000, random_state=0), block_means(q.loss_curve_), block_means(1 + np.arange(q.n_iter_))
    # sphinx_gallery_start_ignore
    if args.record:
        np.savez_compressed(file, draws=X.astype(np.float16), losses=losses.astype(np.float32), at=at)
    # sphinx_gallery_end_ignore
    return X, losses, at


fits = {name: fit_of(name, q) for name, q in methods.items()}
defaults = KSIVIApproximator(random_state=0).fit(target)
fits["skksivi"] = defaults.sample(1000, random_state=0), None, None

# %%
# The observed path is the thin line, the observations are points. Below are the losses of the three trainings, which
# are in different units: the Fisher divergence of conditional scores for SIVI-SM, which may be estimated below zero,
# the negative evidence bound for SIVI, the squared discrepancy for KSIVI. Each is shown above its minimum, to which
# the loss of SIVI-SM does not return. The default fit was not trained, since its start was good enough.

COLOURS = {"SIVI": "#E69F00", "SIVI-SM": "#CC79A7", "KSIVI": "#009E73", "skksivi": "#0072B2"}
figure, axes = plt.subplots(2, 4, figsize=(12, 5.6), height_ratios=[3, 2], layout="constrained")
for (name, (draws, losses, at)), (top, bottom) in zip(fits.items(), axes.T, strict=True):
    distance = sliced_wasserstein(draws, exact[:1000], random_state=0)
    times, (low, high) = np.arange(1, d + 1), np.quantile(draws, [0.025, 0.975], axis=0)
    top.fill_between(times, low, high, color=COLOURS[name], alpha=0.25, linewidth=0)
    top.plot(times, draws.mean(0), color=COLOURS[name], label="mean and 95% band")
    for k, row in enumerate([exact.mean(0), *np.quantile(exact, [0.025, 0.975], axis=0)]):
        top.plot(times, row, "--", color="0.25", linewidth=1, label=None if k else "exact draws")
    top.plot(times, diffusion.path, color="k", linewidth=0.8, alpha=0.6, label="true path")
    top.plot(times[4::5], diffusion.observations, "ok", markersize=3.5, label="observations")
    top.set_title(f"{name}: sliced W2 {distance:.3f}", fontsize="medium")
    top.set_ylim(-1.7, 0.9)
    if top is axes[0, 0]:
        top.legend(frameon=False, fontsize="small")
    if losses is None:
        bottom.text(0.5, 0.5, "not trained", ha="center", va="center", color="0.4")
        bottom.set_axis_off()
    else:
        above = losses - losses.min()
        bottom.semilogy(at, above.clip(1e-4 * above.max()), color=COLOURS[name])
        bottom.set(xlabel="iteration", ylabel="loss above its minimum" if name == "SIVI" else "")
        bottom.locator_params(axis="x", nbins=3)
    print(f"{name:<17}sliced W2 {distance:.3f}")
print(f"{'noise floor':<17}sliced W2 {sliced_wasserstein(exact[1000:], exact[:1000], random_state=0):.3f}")

# sphinx_gallery_start_ignore
figure.set_label(
    "Above, the bands of a path by SIVI, SIVI-SM, KSIVI and skksivi, over the dashed band of exact draws. "
    "Below, the losses of the three trainings, which fall; the loss of SIVI-SM rises again."
)
if args.output:
    figure.savefig(args.output, dpi=110)
    plt.close("all")
# sphinx_gallery_end_ignore
plt.show()
