"""
From data to a decision: the O-rings of the space shuttle
=========================================================

A complete analysis of a small real data set: load the data, choose a prior, fit, check the fit, check the model
against the data, check the whole procedure on simulated data, and decide.

The data are the 23 flights of the space shuttle before the launch of Challenger on 28 January 1986. On seven of them
at least one of the rubber rings that seal the joints of the boosters was damaged. The night before the launch, with
31 °F in the forecast, engineers argued that the rings fail when they are cold. What did the data say? Sources: Dalal,
S., Fowlkes, E. and Hoadley, B. (1989), `Risk analysis of the space shuttle <https://doi.org/10.2307/2290069>`_; the
data are in the public domain.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.nn.functional import softplus

from skksivi import KSIVIApproximator, diagnose
from skksivi.calibration import sbc
from skksivi.plotting import ForestDisplay
from skksivi.targets import from_log_prob

N_REPLICATIONS = 30
# sphinx_gallery_start_ignore
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--n", type=int, default=N_REPLICATIONS, help="replications of the calibration")
parser.add_argument("--output", help="write the first figure to this file")
args, _ = parser.parse_known_args()
N_REPLICATIONS = args.n
# sphinx_gallery_end_ignore

# %%
# The data
# --------
#
# One row per flight: the temperature at launch in °F, and whether a ring was damaged.

temperature = np.array([53, 57, 58, 63, 66, 67, 67, 67, 68, 69, 70, 70, 70, 70, 72, 73, 75, 75, 76, 76, 78, 79, 81])
damage = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0])
print(f"{len(damage)} flights, {damage.sum()} with damage, the coldest at {temperature.min()} °F")

# %%
# The model
# ---------
#
# The log-odds of damage are linear in the temperature. The intercept is the log-odds at 70 °F, the slope a change per
# 10 °F. A normal prior with standard deviation 2 on both allows probabilities from below 2% to above 98% at 70 °F,
# and an odds ratio of up to 50 per 10 °F in either direction. The log-density takes a batch of parameters, shape
# (n, 2), and returns n numbers; gradients are automatic.

PRIOR_SD = 2.0


def design(fahrenheit):
    return np.column_stack([np.ones(len(fahrenheit)), (np.asarray(fahrenheit) - 70) / 10])


def posterior(damage):
    A, y = torch.as_tensor(design(temperature)), torch.as_tensor(damage)

    def log_prob(b):  # (n, 2) -> (n,)
        log_odds = b @ A.to(b).T
        log_likelihood = (y.to(b) * log_odds - softplus(log_odds)).sum(1)
        return log_likelihood - (b**2).sum(1) / (2 * PRIOR_SD**2)

    return from_log_prob(log_prob, n_features=2)


# %%
# Fit and check the fit
# ---------------------
#
# The report has a line per check. All of them passed: means, standard deviations and shape can be relied on.

target = posterior(damage)
q = KSIVIApproximator(random_state=0).fit(target)
print(diagnose(q, target))

# %%
# The posterior, and what it says about the risk. With two parameters the exact posterior can be computed on a grid:
# its contours hold 50, 90 and 99% of the mass. The fit was not told about them.

b = q.sample(4000).astype(float)


def risk(b, fahrenheit):
    """Probability of damage, a row per draw and a column per temperature."""
    return 1 / (1 + np.exp(-b @ design(fahrenheit).T))


def levels(density):
    """Heights of the contours that hold 99, 90 and 50% of a density on a grid."""
    ordered = np.sort(density.ravel())[::-1]
    return [ordered[np.searchsorted(ordered.cumsum() / ordered.sum(), mass)] for mass in (0.99, 0.9, 0.5)]


at = np.linspace(28, 84, 113)
curves = risk(b, at)
grid = np.meshgrid(np.linspace(-3.5, 1, 120), np.linspace(-6.5, 1.5, 120))
log_p = target.log_prob(torch.as_tensor(np.stack([g.ravel() for g in grid], 1))).reshape(120, 120).numpy()
density = np.exp(log_p - log_p.max())

figure, (left, right) = plt.subplots(1, 2, figsize=(6.6, 3.4), layout="constrained")
left.plot(*b[:1500].T, ".", ms=3, alpha=0.35, color="#0072B2", label="draws of the fit")
left.contour(*grid, density, levels(density), colors="k", linewidths=1)
left.plot([], [], "k", lw=1, label="exact: 50, 90, 99%")
left.set(xlabel="log-odds of damage at 70 °F", ylabel="change per 10 °F", title="Posterior")
left.legend(frameon=False, loc="upper left", fontsize=9, borderpad=0)
right.fill_between(at, *np.quantile(curves, [0.05, 0.95], axis=0), color="#0072B2", alpha=0.2, lw=0, label="90%")
right.plot(at, curves.mean(0), color="#0072B2", label="mean")
right.plot(temperature, damage, "k|", ms=12, label="flights")
right.axvline(31, color="#D55E00", lw=1.2)
right.annotate("forecast,\n31 °F", (31, 0.3), (33, 0.1), color="#D55E00")
right.set(xlabel="temperature, °F", ylabel="probability of damage", title="Risk")
right.legend(frameon=False, loc="upper right", bbox_to_anchor=(1.05, 0.9), fontsize=9)
for ax in (left, right):
    ax.spines[["top", "right"]].set_visible(False)
# sphinx_gallery_start_ignore
figure.set_label(
    "Left, draws of the fit lie within the contours of the exact posterior. Right, the probability of damage "
    "falls from nearly one at 31 °F to below 0.1 at 80 °F, with a 90% band and the 23 flights."
)
if args.output:
    figure.savefig(args.output, dpi=150)
# sphinx_gallery_end_ignore
plt.show()

# %%
# Check the model against the data
# --------------------------------
#
# This is a posterior predictive check. Each draw of the parameters simulates the 23 flights once more. If the model
# is right, the real data look like one of these simulations. We compare the number of damaged flights, the number of
# those below 65 °F, and the warmest damaged flight: a line in the temperature might not allow damage at 75 °F.

rng = np.random.default_rng(0)
simulated = rng.random((len(b), len(damage))) < risk(b, temperature)
statistics = {
    "flights with damage": lambda d: d.sum(-1),
    "damaged below 65 °F": lambda d: d[..., temperature < 65].sum(-1),
    "warmest with damage, °F": lambda d: (d * temperature).max(-1),
}
figure, axes = plt.subplots(1, 3, figsize=(9, 2.8), layout="constrained")
for ax, (name, statistic) in zip(axes, statistics.items(), strict=True):
    values, observed = statistic(simulated), statistic(damage)
    share = (values >= observed).mean()
    seen, counts = np.unique(values[values > 0], return_counts=True)
    ax.bar(seen, counts / len(values), color="#0072B2", alpha=0.5, width=0.8)
    ax.axvline(observed, color="#D55E00", lw=2)
    ax.set(xlabel=name, yticks=[], title=f"{share:.0%} at least as large")
    ax.spines[["top", "right", "left"]].set_visible(False)
    print(f"{name}: {observed} observed, at least as large in {share:.0%} of the simulations")
figure.suptitle("Simulated flights (blue) and the real ones (orange)", fontsize="medium")
# sphinx_gallery_start_ignore
figure.set_label(
    "Three histograms of simulated flights: with damage, damaged below 65 °F, and the warmest damaged one. An "
    "orange line for the real flights lies within each."
)
# sphinx_gallery_end_ignore
plt.show()

# %%
# Check the procedure on simulated data
# -------------------------------------
#
# Simulation-based calibration draws parameters from the prior and flights given these, fits them, and ranks the true
# parameters among draws of the fit. Uniform ranks mean that intervals cover as often as they say, whatever the data.
# The third quantity is the one the decision is about.


def simulate_prior(rng):
    return PRIOR_SD * rng.normal(size=2)


def simulate_data(b, rng):
    return (rng.uniform(size=len(temperature)) < risk(b, temperature)).astype(float)


calibration = sbc(
    simulate_prior,
    simulate_data,
    posterior,
    KSIVIApproximator(),
    n=N_REPLICATIONS,
    quantities=lambda b, _: {"risk at 31 °F": risk(b, [31]).item()},
    names=["at 70 °F", "per 10 °F"],
    random_state=0,
)
print(calibration)
figure, ax = plt.subplots(figsize=(6, 3.4), layout="constrained")
calibration.plot(ax)
ax.set_title(f"Ranks among draws of the fit, {N_REPLICATIONS} simulated data sets", fontsize="medium")
# sphinx_gallery_start_ignore
figure.set_label("ECDF differences of the ranks of intercept, slope and risk at 31 °F, all within the grey band.")
# sphinx_gallery_end_ignore
plt.show()

# %%
# Decide
# ------
#
# At 31 °F damage is almost certain under this model, although the interval is wide: no flight was colder than 53 °F,
# so that this is an extrapolation, and the prior matters. A decision compares losses. If a damaged ring costs as much
# as 20 delays by a day, launching is the better choice only if the risk is below 1/20.

cold = risk(b, [31, 53, 70])
for f, p in zip((31, 53, 70), cold.T, strict=True):
    low, high = np.quantile(p, [0.05, 0.95])
    print(f"{f} °F: risk {p.mean():.2f}, 90% interval {low:.2f} to {high:.2f}; in delays: {20 * p.mean():.1f}")

# %%
# How much of this is due to the prior? The same fit with half and twice its standard deviation:

fits = {}
for PRIOR_SD in (1.0, 2.0, 4.0):
    q = KSIVIApproximator(random_state=0).fit(posterior(damage))
    fits[f"prior sd {PRIOR_SD:.0f}"] = q.sample(4000).astype(float)
risks = {name: risk(draws, [31, 40, 50, 60, 70]) for name, draws in fits.items()}
for name, p in risks.items():
    print(f"{name}: risk at 31 °F {p[:, 0].mean():.2f}, 5% quantile {np.quantile(p[:, 0], 0.05):.2f}")
display = ForestDisplay.from_draws(risks, feature_names=["31 °F", "40 °F", "50 °F", "60 °F", "70 °F"])
display.ax_.set_title("Risk by temperature and prior", fontsize="medium")
# sphinx_gallery_start_ignore
display.figure_.set_label(
    "Medians and intervals of the risk at five temperatures under three priors: at 31 °F all medians are above "
    "0.9 and the narrow prior has the lowest; at 70 °F they agree."
)
# sphinx_gallery_end_ignore
plt.show()

# %%
# Under each of the priors the risk at 31 °F is far above 1/20. The launch should have been delayed. The analysis does
# not show whether damage leads to the loss of the shuttle, nor whether the line continues below 53 °F.
