"""
A PyMC model: eighteen batters
==============================

After 45 at-bats in the season of 1970, how often will each of eighteen baseball players hit in the rest of it? A
hierarchical model in PyMC shrinks their averages towards each other, by an amount that it learns. We pass the model
to skksivi, draw from the fit in the model's own parameters, and compare with draws from PyMC's sampler, NUTS. Then
ArviZ compares the model with a simpler one, and finds out how much the posterior depends on the prior.
"""

import os

import arviz_stats
import matplotlib.pyplot as plt
import numpy as np
import pymc as pm

from skksivi import KSIVIApproximator, targets, to_arviz

MAX_ITER = 2000
DRAWS = 2000  # of NUTS, in each of two chains, and as many to tune it
N_DRAWS = 10_000  # of the fit
# sphinx_gallery_start_ignore
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--max-iter", type=int, default=MAX_ITER)
parser.add_argument("--draws", type=int, default=DRAWS)
parser.add_argument("--output", help="write the figure to this file instead of showing it")
args, _ = parser.parse_known_args()
MAX_ITER = args.max_iter
DRAWS = args.draws
N_DRAWS = min(N_DRAWS, 5 * DRAWS)
# sphinx_gallery_end_ignore

# %%
# The data are from Efron and Morris (1975). The spread ``tau`` of the players on the scale of log-odds is
# positive, and the ``rate`` of each is derived from it.

# fmt: off
players = ["Clemente", "F. Robinson", "F. Howard", "Johnstone", "Berry", "Spencer", "Kessinger", "Alvarado", "Santo",
           "Swoboda", "Unser", "Williams", "Scott", "Petrocelli", "E. Rodriguez", "Campaneris", "Munson", "Alvis"]
hits = np.array([18, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7])
rest_of_season = np.array([.346, .298, .276, .222, .273, .270, .263, .210, .269,
                           .230, .264, .256, .303, .264, .226, .286, .316, .200])
# fmt: on

with pm.Model(coords={"player": players}) as model:
    mu = pm.Normal("mu", -1, 1)
    tau = pm.HalfNormal("tau", 0.5)
    z = pm.Normal("z", dims="player")
    rate = pm.Deterministic("rate", pm.math.invlogit(mu + tau * z), dims="player")
    pm.Binomial("hits", 45, rate, observed=hits, dims="player")

# %%
# The target lives in PyMC's unconstrained space, where the logarithm of ``tau`` is a coordinate; ``to_arviz``
# transforms draws to the space of the model, with the names of variables and players. PyMC's own have the same form.
# Times are CPU time of this process and its compilers.


def timed(function, *arguments, **options):
    start = sum(os.times()[:4])
    return function(*arguments, **options), sum(os.times()[:4]) - start


target, compile_time = timed(targets.from_pymc, model)
q, fit_time = timed(KSIVIApproximator(max_iter=MAX_ITER, random_state=0).fit, target)
fit, draw_time = timed(to_arviz, q, target, N_DRAWS)
settings = {"chains": 2, "cores": 1, "target_accept": 0.95, "random_seed": 0, "progressbar": False}
nuts, nuts_time = timed(pm.sample, DRAWS, tune=DRAWS, model=model, **settings)
print(f"skksivi: {compile_time + fit_time:.1f} s to compile and to fit, {draw_time:.2f} s for {N_DRAWS:,} draws")
print(f"NUTS:    {nuts_time:.1f} s to compile and to run {2 * DRAWS:,} draws after as many to tune it\n")

# %%
# Means and standard deviations of the constrained parameters. The last two columns are the differences between the
# two chains of NUTS, which are due to chance alone; differences of that size between the methods mean nothing.


def summary(data, name, **at):
    """Mean and standard deviation of a variable, over the draws of all chains and of each."""
    draws = data.posterior[name].sel(**at).values
    return draws.mean(), draws.std(), draws.mean(1), draws.std(1)


print(f"{'':<20}{'skksivi':^16}{'NUTS':^16}{'difference / sd':^18}{'between chains':^16}")
print(f"{'':<20}{'mean':>8}{'sd':>8}{'mean':>8}{'sd':>8}{'mean':>9}{'sd':>9}{'mean':>8}{'sd':>8}")
rows = [("mu", {}), ("tau", {}), *(("rate", {"player": player}) for player in players)]
for name, at in rows:
    mean, sd, *_ = summary(fit, name, **at)
    exact_mean, exact_sd, means, sds = summary(nuts, name, **at)
    differences = np.array([mean - exact_mean, sd - exact_sd, np.ptp(means), np.ptp(sds)]) / exact_sd
    label = " ".join([name, *at.values()])
    print(f"{label:<20}{mean:>8.3f}{sd:>8.3f}{exact_mean:>8.3f}{exact_sd:>8.3f}", end="")
    print("{:>+9.2f}{:>+9.2f}{:>8.2f}{:>8.2f}".format(*differences))

# %%
# What ArviZ needs for the next steps is in the result, too. Is one rate for all players as good a model, by
# leave-one-out? Draws of a fit have other tails than the posterior; ``loo_approximate_posterior`` makes up for it.
# And how much do the parameters depend on prior and likelihood, when these are scaled?

with pm.Model(coords={"player": players}) as one_rate:
    pm.Binomial("hits", 45, pm.math.invlogit(pm.Normal("mu", -1, 1)), observed=hits, dims="player")


def left_out(data):
    return arviz_stats.loo_approximate_posterior(data, data.sample_stats.log_p, data.sample_stats.log_q)


simple = targets.from_pymc(one_rate)
same = to_arviz(KSIVIApproximator(max_iter=MAX_ITER, random_state=0).fit(simple), simple)
results = {"a rate each": left_out(fit), "one rate": left_out(same)}
print("", arviz_stats.compare(results).to_string(), sep="\n")
print("Largest k-hat:", {name: round(float(found.pareto_k.max()), 2) for name, found in results.items()})
print("", arviz_stats.summary(fit, var_names=["mu", "tau"], kind="stats").to_string(), sep="\n")
print("", arviz_stats.psense_summary(fit, var_names=["mu", "tau"]).to_string(), sep="\n")

# %%
# Left, each player's average after 45 at-bats, his rate by both methods, with 90% intervals, and his average in the
# rest of the season. Right, the spread of the players on the scale of log-odds: its posterior, which reaches down to
# zero, and its prior; below, the standard deviation of the hits of eighteen players in data predicted by both models,
# and in the data. Means and intervals agree. Below 0.1 the histograms of tau differ a little: the fit is a
# mixture of a few Gaussians in log tau, and such details of a density are less accurate than its moments.

parts = [["rates", "spread"], ["rates", "predicted"]]
figure, axes = plt.subplot_mosaic(parts, figsize=(9, 5.6), width_ratios=[2, 1], layout="constrained")
left, right, below = axes.values()
for data, name, colour in ((fit, "a rate each", "#0072B2"), (same, "one rate", "#CC79A7")):
    sds = data.posterior_predictive["hits"].std("player").values.ravel()
    below.hist(sds, np.linspace(1, 6, 26), density=True, histtype="step", color=colour, linewidth=1.5, label=name)
below.axvline(hits.std(), color="k", linewidth=1, label="data")
below.set(xlabel="sd of hits", title="Predicted data", yticks=[])
below.legend(frameon=False, fontsize="small")
rank = np.arange(len(players))[::-1]
for data, name, colour, shift in ((nuts, "NUTS", "#D55E00", 0.15), (fit, "skksivi", "#0072B2", -0.15)):
    rates = data.posterior["rate"].values.reshape(-1, len(players))
    low, high = np.quantile(rates, [0.05, 0.95], axis=0)
    left.hlines(rank + shift, low, high, color=colour, linewidth=1.5, label=f"{name}, 90%")
    left.plot(rates.mean(0), rank + shift, "o", color=colour, markersize=3)
    taus = data.posterior["tau"].values.ravel()
    right.hist(taus, np.linspace(0, 0.8, 26), density=True, histtype="step", color=colour, linewidth=1.5, label=name)
at = np.linspace(0, 0.8, 100)
right.plot(
    at, 2 * np.exp(-((at / 0.5) ** 2) / 2) / (0.5 * np.sqrt(2 * np.pi)), "--", color="0.6", lw=1, label="prior"
)
left.plot(hits / 45, rank, "kx", markersize=5, label="first 45 at-bats")
left.plot(rest_of_season, rank, "d", color="#009E73", markersize=5, label="rest of the season")
left.set_yticks(rank, players)
left.set(xlabel="batting average", title="Eighteen batters of 1970")
left.legend(loc="lower right", fontsize="small")
right.set(xlabel=r"$\tau$", title=r"Spread of the players", yticks=[], xlim=(0, 0.8))
right.legend(frameon=False)

# sphinx_gallery_start_ignore
figure.set_label(
    "Left, eighteen players with the 90% intervals of NUTS and skksivi, which agree, and their averages before and "
    "after. Right, histograms of the spread of players by both, which agree, and of the sd of hits in predicted "
    "data, around the sd of the data."
)
if args.output:
    figure.savefig(args.output, dpi=150)
    print(f"\nFigure in {args.output}")
    plt.close("all")
# sphinx_gallery_end_ignore
plt.show()
