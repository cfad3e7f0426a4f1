"""
Inference on a stream
=====================

Counts arrive by the minute. After every minute we want to know the rate of the last twenty and its trend, with their
uncertainty. The posterior has no closed form, and a fit per minute would do the same work again and again: one fit on
simulated windows does it once.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
import torch

from skksivi import AmortizedKSIVI

N_TRAINING, CALLS, N_MINUTES = 1000, 10_000, 400
# sphinx_gallery_start_ignore
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--training", type=int, default=N_TRAINING)
parser.add_argument("--calls", type=int, default=CALLS)
parser.add_argument("--output", help="write the figure to this file instead of showing it")
args, _ = parser.parse_known_args()
N_TRAINING, CALLS = args.training, args.calls
# sphinx_gallery_end_ignore

# %%
# The model of a window: Poisson counts with the rate exp(a + b t), t from -1 to 1, where a is N(2, 1) and b is
# N(0, 0.5^2). The data enter through two sums, which are the contexts.

TIMES = torch.linspace(-1, 1, 20, dtype=torch.float64)
MEAN, SD = torch.tensor([2.0, 0.0], dtype=torch.float64), torch.tensor([1.0, 0.5], dtype=torch.float64)


def sums(counts):
    return np.column_stack([counts.sum(1), counts @ TIMES.numpy()])


def features(counts):
    s = sums(counts)
    return np.column_stack([np.log1p(s[:, 0]), s[:, 1] / (1 + s[:, 0])])


def score_fn(x, y):
    total = torch.expm1(y[:, 0])
    weighted = y[:, 1] * (1 + total)
    rate = torch.exp(x[:, :1] + x[:, 1:] * TIMES)
    data = torch.stack([total - rate.sum(1), weighted - rate @ TIMES], 1)
    return data - (x - MEAN) / SD.square()


def simulate(n, rng):
    X = MEAN.numpy() + SD.numpy() * rng.normal(size=(n, 2))
    return X, features(rng.poisson(np.exp(X[:, :1] + X[:, 1:] * TIMES.numpy())))


q = AmortizedKSIVI(n_contexts=N_TRAINING, max_score_calls=CALLS, random_state=0)
q.fit(score_fn, simulate, n_features=2)

# %%
# The stream: the rate doubles after 150 minutes, and falls slowly after 280.

rng = np.random.RandomState(1)
minute = np.arange(N_MINUTES)
rate = np.where(minute < 150, 6.0, np.where(minute < 280, 12.0, 12.0 * np.exp(-(minute - 280) / 80)))
counts = rng.poisson(rate)
windows = np.lib.stride_tricks.sliding_window_view(counts, 20)
began = time.perf_counter()
draws = q.sample(500, features(windows), random_state=0)
print(f"{(time.perf_counter() - began) / len(windows) * 1e3:.2f} ms per window")

# %%
# The rate at the end of each window with a band of 90%, and the probability that the rate is rising.

low, middle, high = np.quantile(np.exp(draws.sum(2)), [0.05, 0.5, 0.95], axis=1)
rising = (draws[..., 1] > 0).mean(1)
now = minute[19:]
fig, (ax, ax_rising) = plt.subplots(2, 1, figsize=(8, 5), sharex=True, constrained_layout=True)
ax.plot(minute, counts, ".", color="0.7", ms=3, label="counts")
ax.fill_between(now, low, high, color="#0072B2", alpha=0.3, lw=0, label="90% band")
ax.plot(now, middle, color="#0072B2", label="median")
ax.plot(minute, rate, color="k", lw=1, label="true rate")
ax.set(ylabel="counts per minute")
fig.legend(loc="outside upper center", ncols=4)
ax_rising.plot(now, rising, color="#0072B2")
ax_rising.axhline(0.5, color="0.5", lw=1)
ax_rising.set(xlabel="minute", ylabel="probability of a rise", ylim=(0, 1))
for each in (ax, ax_rising):
    each.spines[["top", "right"]].set_visible(False)
# sphinx_gallery_start_ignore
fig.set_label(
    "Above, counts per minute, the true rate that doubles at minute 150 and falls after 280, and the band of the fit "
    "that follows it. Below, the probability of a rise, near one after the jump and low during the fall."
)
if args.output:
    fig.savefig(args.output, dpi=150)
# sphinx_gallery_end_ignore
plt.show()
