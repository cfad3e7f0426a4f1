r"""
A NumPyro model: putting golf balls
===================================

A putt goes in if its angle is right. With a hole of radius R, a ball of radius r, and a normal error of the angle
with standard deviation :math:`\sigma`, it misses from the distance x with probability
:math:`2 \Phi(-\arcsin((R - r) / x) / \sigma)`. We let each distance deviate from this law, by an amount :math:`\tau`
that is learned too, write the model in NumPyro, fit it, and compare with NumPyro's sampler, NUTS.
"""

import os

import arviz_base
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist

from skksivi import KSIVIApproximator, targets, to_arviz
from skksivi.plotting import MarginalsDisplay

MAX_ITER = 2000
DRAWS = 700  # of NUTS, in each of two chains, and as many to tune it
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
numpyro.enable_x64()

# %%
# The putts of professionals, from Berry (1996): 19 distances in feet, with tries and successes. The scales ``sigma``,
# in degrees, and ``tau``, on the scale of log-odds, are positive; the ``chance`` at each distance is derived.

distance = np.arange(2, 21)
# fmt: off
tries = np.array([1443, 694, 455, 353, 272, 256, 240, 217, 200, 237, 202, 192, 174, 167, 201, 195, 191, 147, 152])
successes = np.array([1346, 577, 337, 208, 149, 136, 111, 69, 67, 75, 52, 46, 54, 28, 27, 31, 33, 20, 24])
# fmt: on
SLACK = (4.25 - 1.68) / 2 / 12  # R - r in feet


def log_miss(distance, sigma):
    threshold = jnp.rad2deg(jnp.arcsin(SLACK / distance))
    return jnp.log(2) + jax.scipy.special.log_ndtr(-threshold / sigma)


def model(tries, successes):
    sigma = numpyro.sample("sigma", dist.HalfNormal(5))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("distance", len(tries)):
        z = numpyro.sample("z", dist.Normal(0, 1))
        miss = log_miss(distance, sigma)
        logits = jnp.log(-jnp.expm1(miss)) - miss + tau * z
        numpyro.deterministic("chance", jax.nn.sigmoid(logits))
        numpyro.sample("successes", dist.Binomial(tries, logits=logits), obs=successes)


# %%
# ``from_numpyro`` takes the model and its arguments. ``to_arviz`` draws and transforms the draws to the space of the
# model; we choose the names of dimensions. Times are CPU time, compilation included.


def timed(function, *arguments, **options):
    start = sum(os.times()[:4])
    return function(*arguments, **options), sum(os.times()[:4]) - start


target = targets.from_numpyro(model, tries, successes)
q, fit_time = timed(KSIVIApproximator(max_iter=MAX_ITER, random_state=0).fit, target)
labels = {"dims": {"chance": ["distance"], "z": ["distance"]}, "coords": {"distance": distance}}
fit, draw_time = timed(to_arviz, q, target, N_DRAWS, **labels)

sampler = numpyro.infer.NUTS(model, target_accept_prob=0.95)
mcmc = numpyro.infer.MCMC(
    sampler,
    num_warmup=DRAWS,
    num_samples=DRAWS,
    num_chains=2,
    chain_method="sequential",
    progress_bar=False,
)
_, nuts_time = timed(mcmc.run, jax.random.key(0), tries, successes)
nuts = arviz_base.from_numpyro(mcmc, log_likelihood=False, **labels)
print(f"skksivi: {fit_time:.1f} s to compile and fit, {draw_time:.2f} s for {N_DRAWS:,} draws")
print(f"NUTS:    {nuts_time:.1f} s to compile and to run {2 * DRAWS:,} draws after as many to tune it\n")

# %%
# Means and standard deviations of constrained and derived parameters. The last two columns are the differences
# between the two chains of NUTS, which are due to chance alone; differences of that size between the methods mean
# nothing.


def summary(data, name, **at):
    """Mean and standard deviation of a variable, over the draws of all chains and of each."""
    draws = data.posterior[name].sel(**at).values
    return draws.mean(), draws.std(), draws.mean(1), draws.std(1)


print(f"{'':<16}{'skksivi':^16}{'NUTS':^16}{'difference / sd':^18}{'between chains':^16}")
print(f"{'':<16}{'mean':>8}{'sd':>8}{'mean':>8}{'sd':>8}{'mean':>9}{'sd':>9}{'mean':>8}{'sd':>8}")
rows = [("sigma", {}), ("tau", {}), *(("chance", {"distance": feet}) for feet in distance)]
for name, at in rows:
    mean, sd, *_ = summary(fit, name, **at)
    exact_mean, exact_sd, means, sds = summary(nuts, name, **at)
    differences = np.array([mean - exact_mean, sd - exact_sd, np.ptp(means), np.ptp(sds)]) / exact_sd
    label = f"{name} {at['distance']} ft" if at else name
    print(f"{label:<16}{mean:>8.4f}{sd:>8.4f}{exact_mean:>8.4f}{exact_sd:>8.4f}", end="")
    print("{:>+9.2f}{:>+9.2f}{:>8.2f}{:>8.2f}".format(*differences))

# %%
# Left, 90% intervals of the probability of success at each distance by both methods, and the curve of the angle
# alone; in grey, 90% intervals of data predicted by skksivi. Right, marginals and contours of the two scales.

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.6), width_ratios=[3, 2], layout="constrained")
feet = np.linspace(1.8, 20.5, 200)
sigma = summary(fit, "sigma")[0]
left.plot(feet, -np.expm1(log_miss(feet, sigma)), color="#E69F00", label=rf"the angle alone, $\sigma$ = {sigma:.2f}°")
for data, name, colour, shift in ((nuts, "NUTS", "#D55E00", -0.12), (fit, "skksivi", "#0072B2", 0.12)):
    chances = data.posterior["chance"].values.reshape(-1, len(distance))
    left.vlines(distance + shift, *np.quantile(chances, [0.05, 0.95], axis=0), color=colour, label=f"{name}, 90%")
shares = fit.posterior_predictive["successes"].values.reshape(-1, len(distance)) / tries
left.vlines(
    distance, *np.quantile(shares, [0.05, 0.95], axis=0), color="0.85", linewidth=7, zorder=0, label="predicted"
)
left.plot(distance, successes / tries, "kx", markersize=5, label="data")
left.set(
    xlabel="distance in feet", ylabel="probability of success", title="Putts of professionals", xticks=distance[::2]
)
left.legend()
scales = {
    name: np.stack([data.posterior[parameter].values.ravel() for parameter in ("sigma", "tau")], axis=1)
    for name, data in (("skksivi", fit), ("NUTS", nuts))
}
names = [r"$\sigma$ in degrees", r"$\tau$"]
MarginalsDisplay.from_draws(scales, feature_names=names, ax=right)

# sphinx_gallery_start_ignore
figure.set_label(
    "Left, probabilities of success fall with the distance; the 90% intervals of NUTS and skksivi at each distance "
    "are alike. Right, the contours of both for the two scales coincide."
)
if args.output:
    figure.savefig(args.output, dpi=150)
    print(f"\nFigure in {args.output}")
    plt.close("all")
# sphinx_gallery_end_ignore
plt.show()
