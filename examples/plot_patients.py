"""
One fit for 10,000 patients
===========================

A drug is swallowed, absorbed and eliminated. Each patient has an individual rate of absorption, rate of elimination
and volume, and is measured six times. A fit to each patient would be 10,000 fits. Here is one fit on simulated
patients, which then draws from the posterior of any other. The windows of a stream of data can be fitted in the same
way.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
import torch

from skksivi import AmortizedKSIVI

N_PATIENTS, N_TRAINING, CALLS = 10_000, 1000, 10_000
# sphinx_gallery_start_ignore
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--patients", type=int, default=N_PATIENTS)
parser.add_argument("--training", type=int, default=N_TRAINING)
parser.add_argument("--calls", type=int, default=CALLS)
parser.add_argument("--output", help="write the figure to this file instead of showing it")
args, _ = parser.parse_known_args()
N_PATIENTS, N_TRAINING, CALLS = args.patients, args.training, args.calls
# sphinx_gallery_end_ignore

# %%
# The model. Parameters are logarithms of the absorption rate, the elimination rate (per hour) and the volume
# (litres), with a normal population. Data are the logarithms of six concentrations after a dose of 320 mg, with noise
# of 15%.

HOURS = torch.tensor([0.5, 1.0, 2.0, 5.0, 9.0, 24.0], dtype=torch.float64)
MEAN = torch.tensor([0.4, -2.5, 3.5], dtype=torch.float64)
SD = torch.tensor([0.5, 0.3, 0.25], dtype=torch.float64)
NOISE = 0.15


def log_concentration(x):
    a, e, v = x.exp().unbind(-1)
    a = a + e  # absorption is faster than elimination
    rise = torch.exp(-e[:, None] * HOURS) - torch.exp(-a[:, None] * HOURS)
    return torch.log(320 * a / (v * (a - e)))[:, None] + torch.log(rise)


def simulate(n, rng):
    X = MEAN.numpy() + SD.numpy() * rng.normal(size=(n, 3))
    return X, log_concentration(torch.from_numpy(X)).numpy() + NOISE * rng.normal(size=(n, 6))


def score_fn(x, y):
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        log_p = -((x - MEAN) / SD).square().sum() / 2 - ((y - log_concentration(x)) / NOISE).square().sum() / 2
        return torch.autograd.grad(log_p, x, create_graph=True)[0]


# %%
# One fit. The simulated patients come with the parameters that made them, which are exact draws of their posteriors.

q = AmortizedKSIVI(n_contexts=N_TRAINING, max_score_calls=CALLS, random_state=0)
q.fit(score_fn, simulate, n_features=3)
print(f"{q.n_score_calls_ + q.n_products_:,} calls")

# %%
# All the other patients at once.

truth, data = simulate(N_PATIENTS, np.random.RandomState(1))
began = time.perf_counter()
draws = q.sample(100, data, random_state=0)
print(f"{(time.perf_counter() - began) / N_PATIENTS * 1e3:.2f} ms per patient")

# %%
# Left, the clearance (elimination rate times volume) of some patients, with intervals that should contain 90% of the
# true values. Right, for all patients, the share of intervals of each level that contain the true value.

clearance = np.exp(draws[..., 1] + draws[..., 2])
true_clearance = np.exp(truth[:, 1] + truth[:, 2])
low, middle, high = np.quantile(clearance, [0.05, 0.5, 0.95], axis=1)
levels = np.linspace(0.05, 0.95, 19)
ends = np.quantile(clearance, [(1 - levels) / 2, (1 + levels) / 2], axis=1)
held = ((ends[0] < true_clearance) & (true_clearance < ends[1])).mean(1)

fig, (ax, ax_held) = plt.subplots(1, 2, figsize=(9, 4), constrained_layout=True)
some = np.arange(min(60, N_PATIENTS))
bars = np.stack([middle - low, high - middle])[:, some]
ax.errorbar(true_clearance[some], middle[some], bars, fmt="o", ms=3, lw=1, color="#0072B2")
span = [true_clearance[some].min(), true_clearance[some].max()]
ax.plot(span, span, color="0.5", lw=1)
ax.set(xlabel="true clearance, litres per hour", ylabel="posterior median and 90% interval", title="Sixty patients")
ax_held.plot(levels, held, ".-", color="#0072B2", label="intervals of the fit")
ax_held.plot([0, 1], [0, 1], color="0.5", lw=1, label="exact")
ax_held.set(xlabel="level of the interval", ylabel="share of patients inside", title=f"All {N_PATIENTS:,} patients")
ax_held.legend(frameon=False)
for each in (ax, ax_held):
    each.spines[["top", "right"]].set_visible(False)
# sphinx_gallery_start_ignore
fig.set_label(
    "Left, posterior medians of sixty patients' clearance against the true values, most intervals crossing the "
    "diagonal. Right, the share of intervals that contain the true value follows their level."
)
if args.output:
    fig.savefig(args.output, dpi=150)
# sphinx_gallery_end_ignore
plt.show()

# %%
# One patient can be looked at closely: ``q.at(y)`` is an ordinary fit, ``q.diagnose(y)`` checks it, and
# ``q.refine(y)`` trains it further.

print(q.refine(data[0]).certificate_)
