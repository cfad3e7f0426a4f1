"""Sliced Wasserstein distance, and seconds, over dimensions of the conditioned diffusion.

The public code of the method has another drift in its posterior than the paper: --drift bounded is to be compared
with the paper's table. The paper does not give the learning rate of UIVI: it is that of SIVI. "plain" is KSIVI in
plain autograd.

Seconds are those of 500 iterations, less what a fit of one takes, scaled to 10,000; the methods take turns, and the
median over seeds is shown. The paper's are of another machine: compare the ratios.
"""

from __future__ import annotations

from functools import partial

from paper._base import DEFAULTS, QUICK, Counted, Method, Table, exact_draws, fit, sliced_distance
from paper.plain import PlainKSIVI
from paper.public_code import DIFFUSIONS
from skksivi import KSIVIApproximator, paper_settings
from skksivi.baselines import SIVI, SIVISM, UIVI
from skksivi.targets import ConditionedDiffusion

KSIVI = paper_settings("diffusion")
PLAIN = {
    "latent_dim": 100, "width": 128, "log_variance": -2, "batch_size": 128, "max_iter": 100_000,
    "learning_rate": 2e-4, "decay_every": 10_000, "betas": (0.9, 0.99),
}  # fmt: skip
METHODS = {
    "SIVI": Method(partial(SIVI, **paper_settings("diffusion", "SIVI"))),
    "SIVI-SM": Method(partial(SIVISM, **paper_settings("diffusion", "SIVISM"))),
    "UIVI": Method(partial(UIVI, **paper_settings("diffusion", "UIVI"))),
    "KSIVI, U-stat.": Method(partial(KSIVIApproximator, **KSIVI | {"gradient_estimator": "u-statistic"})),
    "KSIVI, vanilla": Method(partial(KSIVIApproximator, **KSIVI)),
    "plain, U-stat.": Method(partial(PlainKSIVI, **PLAIN, within=True)),
}
TIMED = ("KSIVI, vanilla", "KSIVI, U-stat.", "SIVI", "SIVI-SM")
N_TIMED = 500
PAPER = {
    "SIVI": (0.1266, 0.0981, 0.0756),
    "SIVI-SM": (0.0917, 0.0640, 0.0628),
    "UIVI": (0.0314, 0.0426, 0.0582),
    "KSIVI, U-stat.": (0.0134, 0.0182, 0.0551),
    "KSIVI, vanilla": (0.0140, 0.0115, 0.0493),
}
PAPER["plain, U-stat."] = PAPER["KSIVI, U-stat."]
PAPER_SECONDS = {
    "KSIVI, vanilla": (56.67, 90.48, 107.84),
    "KSIVI, U-stat.": (39.09, 58.13, 64.17),
    "SIVI": (58.00, 88.12, 113.46),
    "SIVI-SM": (70.42, 128.13, 149.61),
}


class Diffusion(Table):
    """Cases are dimensions."""

    cases, metrics = ("50", "100", "200"), ("sliced W2",)
    methods, paper, options = DEFAULTS | METHODS, PAPER, ("drift",)

    def run(self, case, method, seed, args, rows):
        target = DIFFUSIONS[args.drift](int(case))
        Y = exact_draws(f"{'diffusion' if args.drift == 'paper' else args.drift}_{case}", target, args)
        q = self.methods[method](args, random_state=seed)
        return {**fit(q, Counted(target)), "values": [sliced_distance(q, Y, seed, args)]}


class Seconds(Table):
    """Cases are dimensions, seeds are repetitions."""

    cases, metrics = ("50", "100", "200"), ("s per 10k",)
    methods, paper = {name: METHODS[name] for name in TIMED}, PAPER_SECONDS

    def run(self, case, method, seed, args, rows):
        target, k = ConditionedDiffusion(int(case)), QUICK["max_iter"] if args.quick else N_TIMED
        q = self.methods[method](args, random_state=seed).set_params(max_iter=1)
        fit(q, target)  # what is done once in a process
        once = fit(q, target)["seconds"]
        row = fit(q.set_params(max_iter=1 + k), target)
        return {**row, "iterations": k, "values": [1e4 * (row["seconds"] - once) / k]}
