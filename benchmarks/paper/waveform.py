"""Sliced Wasserstein distance over learning rates on the logistic regression.

The paper's posterior needs the UCI data (--data-home DIR); without, it is that of the generated set that the package
has. SIVI-SM starts at sigma^2 = e^-5 with a floor of e^-6: from the paper's one it is thrown far off, and has not
come back after 10,000 iterations. "plain" is the loop of the public code, and h a fixed width of the kernel.
"""

from __future__ import annotations

from functools import partial

from reference import MAKE, waveform_target

from paper._base import DEFAULTS, WIDTHS, Counted, Method, Table, exact_draws, fit, sliced_distance
from paper.plain import PlainKSIVI
from skksivi import KSIVIApproximator, paper_settings
from skksivi.baselines import SIVISM
from skksivi.datasets import fetch_waveform, load_waveform_posterior
from skksivi.targets import BayesianLogisticRegression

MAKERS = {
    "SIVI-SM": partial(SIVISM, **paper_settings("waveform", "SIVISM")),
    "KSIVI": partial(KSIVIApproximator, **paper_settings("waveform")),
    "plain": partial(
        PlainKSIVI, latent_dim=10, width=100, log_variance=-5, batch_size=100, max_iter=20_000, decay_every=3000
    ),
}
METHODS = {f"{name} {k}k": Method(make, share=k / 20) for name, make in MAKERS.items() for k in (10, 20)}
METHODS |= {f"KSIVI 10k{end}": Method(partial(MAKERS["KSIVI"], bandwidth=h), share=0.5) for end, h in WIDTHS.items()}
PAPER = {
    "SIVI-SM 10k": (2.5415, 24.2952, 0.1203, 0.6107, 0.9906),
    "SIVI-SM 20k": (5.6184, 28.6335, 0.0938, 0.3283, 0.9145),
    "KSIVI 10k": (1.5196, 0.6863, 0.1509, 0.1064, 0.6059),
    "KSIVI 20k": (1.2600, 0.1120, 0.0965, 0.2628, 0.3186),
}
PAPER |= {f"plain {k}": PAPER[f"KSIVI {k}"] for k in ("10k", "20k")}


class Waveform(Table):
    """Cases are learning rates, "any" those of methods that have none or their own."""

    cases, metrics = ("1e-05", "0.0001", "0.001", "0.005", "0.008"), ("sliced W2",)
    methods, paper, options = DEFAULTS | METHODS, PAPER, ("data_home",)

    def jobs(self, args):
        for seed in range(args.seeds):
            yield from (("any", method, seed) for method in DEFAULTS)
            for case in self.cases[:1] if args.quick and not args.cases else self.cases:
                yield from ((case, method, seed) for method in METHODS)

    def run(self, case, method, seed, args, rows):
        own = {} if case == "any" else {"learning_rate": float(case)}
        target, Y = posterior(args)
        q = self.methods[method](args, **own, random_state=seed)
        return {**fit(q, Counted(target)), "values": [sliced_distance(q, Y, seed, args)]}


def posterior(args):
    """Return the target and reference draws."""
    if args.data_home is None:
        return waveform_target(), load_waveform_posterior()
    X, y = fetch_waveform(subset="train", data_home=args.data_home, return_X_y=True)
    target = BayesianLogisticRegression(X, y, prior_precision=0.01, fit_intercept=True)
    MAKE["waveform_uci"] = lambda: target
    return target, exact_draws("waveform_uci", target, args)
