"""RMSE and NLL of Bayesian neural networks on the rows that are held out.

As in the public code KSIVI trains the mean on a tenth of the training rows first and sets these aside, and all draws
of an iteration see the same rows, taken in turn. So does "plain", its loop in plain autograd, at the rate that is
chosen for KSIVI. "KSIVI, two minibatches" starts at random, with all training rows, of which two halves of the draws
see independent ones. That is unbiased, but so noisy that the training may run away. "SGLD, cut" cuts scores at five
times the root of the number of weights, which on the yacht data most exceed. A fixed width h of the kernel is tried
at some rates, and not trained in full.

Learning rates are chosen by the NLL on a tenth of the training rows, once a split, after a quarter of the iterations
(rows "NAME @ RATE" of the file). Noise precisions are in the units of y; --units legacy takes them as the public code
does. Seed s has the split s modulo --splits, the first being the paper's. "diabetes" is not in the paper, but needs
no download.

"ours" is the regressor with its defaults, a prior precision of one; "ours, learned" learns it with the weights.
"ours, searched" has it chosen by the NLL in five-fold cross-validation on the training rows, by chains of half the
length from which no network is trained. All three learn the precision of the noise.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from sklearn.model_selection import KFold, train_test_split

from paper._base import DEFAULTS, WIDTHS, Method, Table, fit
from paper.plain import PlainNetwork, fit_mean
from paper.public_code import NETWORKS
from skksivi import KSIVIApproximator, KSIVIRegressor, datasets, paper_settings
from skksivi.baselines import SGLD, SIVI, SIVISM
from skksivi.parameters import Pilot, Scale
from skksivi.targets import Minibatches, Target

NETWORK = paper_settings("network")
METHODS = {
    "SIVI": Method(partial(SIVI, **paper_settings("network", "SIVI"))),
    "SIVI-SM": Method(partial(SIVISM, **paper_settings("network", "SIVISM"))),
    "SGLD": Method(partial(SGLD, n_chains=100, n_warmup=10_000, n_draws=1, thin=1, whiten=None, max_score=None)),
    "KSIVI": Method(partial(KSIVIApproximator, **NETWORK)),
}
METHODS["plain"] = Method(
    partial(
        PlainNetwork, latent_dim=3, width=10, log_variance=-8, batch_size=100, max_iter=20_000, decay_every=3000,
        entropic=1.0,
    )
)  # fmt: skip
METHODS["SGLD, cut"] = Method(partial(METHODS["SGLD"].make, max_score=5.0))
METHODS["KSIVI, two minibatches"] = METHODS["KSIVI"]
GRID = {f"KSIVI{end}": Method(partial(KSIVIApproximator, **NETWORK | {"bandwidth": h})) for end, h in WIDTHS.items()}
METHODS |= GRID
#: Among which the validation chooses: prior precisions of ours, steps of SGLD, learning rates of the others.
RATES = ("1e-05", "0.0001", "0.0002", "0.0005", "0.001")
CHOICES = {
    "ours, searched": ("learned", "0.1", "1"),
    **dict.fromkeys(METHODS, RATES),
    "plain": (),
    **dict.fromkeys(("SGLD", "SGLD, cut"), ("2e-05", "4e-05", "5e-05", "0.0001")),
    **dict.fromkeys(GRID, ("0.0001", "0.001")),
}
#: Of the regressor where nothing is searched.
SETTINGS = {"ours": {}, "ours, learned": {"prior_precision": None}}
N_DRAWS, N_ROWS = 100, 100
#: Logarithms of the precisions of prior and noise.
PRECISIONS = {
    "boston": (-1.0039, -2.5560),
    "concrete": (-0.8141, -3.4498),
    "power": (-0.9018, -2.8802),
    "wine_red": (-0.8578, 1.0561),
    "yacht": (-0.7687, 0.3297),
    "protein": (-0.7890, -3.1617),
    "diabetes": (-1.0, -8.0),
}
#: RMSE and NLL in turn.
PAPER = {
    "SIVI": (2.621, 2.481, 6.932, 3.337, 3.861, 2.791, 0.597, 0.904, 1.505, 1.721, 4.669, 2.967),
    "SIVI-SM": (2.785, 2.542, 5.973, 3.229, 4.009, 2.822, 0.605, 0.916, 0.884, 1.432, 5.087, 3.047),
    "SGLD": (2.857, 3.094, 6.861, 4.036, 3.916, 2.944, 0.597, 0.904, 2.152, 2.873, 4.777, 2.984),
    "KSIVI": (2.555, 2.506, 5.750, 3.309, 3.868, 2.797, 0.595, 0.901, 1.237, 1.752, 5.027, 3.034),
}


class SameRows(Target):
    """A posterior of which all draws of an iteration see the same rows, taken in turn, and other calls all rows."""

    def __init__(self, target):
        self.target, self.n_features = target, target.n_features
        self.rows = torch.arange(target.n_rows)

    def part(self, x):
        if len(x) != 2 * NETWORK["batch_size"]:
            return self.target
        self.rows = self.rows.roll(-N_ROWS)
        return self.target.subset(self.rows[-N_ROWS:])

    def score_fn(self, x):
        return self.part(x).score_fn(x)

    def score_vjp(self, x):
        return self.part(x).score_vjp(x)


class Networks(Table):
    """Cases are data sets."""

    cases, metrics = tuple(PRECISIONS), ("RMSE", "NLL")
    methods = dict.fromkeys((*SETTINGS, "ours, searched"), DEFAULTS["ours, start"]) | METHODS
    paper, options = PAPER, ("data_home", "units", "splits")

    def jobs(self, args):
        for seed in range(max(args.seeds, args.splits)):
            for case in self.cases[-1:] if args.quick and not args.cases else self.cases:
                yield from ((case, method, seed) for method in SETTINGS)
                for method, choices in ({"KSIVI": RATES, "plain": ()} if args.quick else CHOICES).items():
                    if seed < args.splits:
                        yield from ((case, f"{method} @ {c}", seed) for c in choices[: 1 if args.quick else None])
                    if method not in GRID:
                        yield case, method, seed

    def run(self, case, method, seed, args, rows):
        split = seed % args.splits
        X, y, train, test = data(case, split, args)
        name, _, choice = method.partition(" @ ")
        if name in SETTINGS:
            return ours(X, y, train, test, args, seed, **SETTINGS[name])
        if name == "ours, searched" and choice:
            return validated(X[train], y[train], args, seed, choice)
        choice_of_split = choice or best_choice(case, "KSIVI" if name == "plain" else name, split, rows)
        if name == "ours, searched":
            return ours(X, y, train, test, args, seed, prior_precision=precision(choice_of_split))
        make = METHODS[name]
        if choice:  # a part of the training rows stands for the test
            train, test = train_test_split(train, test_size=0.1, random_state=split)
            make = make._replace(share=1 / 4)
        own = {"step_size" if name.startswith("SGLD") else "learning_rate": float(choice_of_split)}
        if name in ("KSIVI", "plain", *GRID):
            train, rows_aside = np.split(train, [-min(round(len(train) / 10), 500)])
            aside = X[rows_aside], y[rows_aside]
        if name == "plain":
            own["aside"] = aside
        lam, gam = np.exp(PRECISIONS[case])
        size = {"n_hidden": 2} if args.quick else {}
        target = NETWORKS[args.units](X[train], y[train], prior_precision=lam, noise_precision=gam, **size)
        q = make(args, **own, random_state=seed)
        in_parts = SameRows(target) if name in ("KSIVI", *GRID) else Minibatches(target, N_ROWS)
        if name in ("KSIVI", *GRID):
            start_at(q, in_parts, aside, seed)
        row = fit(q, target if name == "plain" else in_parts)  # the plain loop takes rows itself
        draws = q.sample(N_DRAWS, random_state=seed)
        return {**row, "values": [target.rmse(draws, X[test], y[test]), target.nll(draws, X[test], y[test])]}


def start_at(q, posterior, aside, seed):
    """Train the mean of KSIVI on rows that are set aside, from which `fit` goes on."""
    first = {"max_iter": 1, "learning_rate": 1e-9}
    later = {name: getattr(q, name) for name in first}
    fit(q.set_params(**first, warm_start=True), posterior)
    family, generator = q.family_.requires_grad_(True), torch.Generator().manual_seed(seed)
    fit_mean(lambda: family.draw(q.batch_size, generator).x, family.parameters(), posterior.target, *aside)
    family.requires_grad_(False)
    q.set_params(**later)


def ours(X, y, train, test, args, seed, **settings):
    """Return the row of a regressor, by default with those of a network."""
    if args.quick:
        settings |= {"n_hidden": 1, "approximator": DEFAULTS["ours, start"](args)}
    model = KSIVIRegressor(model="network", **settings, random_state=seed)
    row = fit(model, X[train], y[train])
    rmse = np.sqrt(np.mean((y[test] - model.predict(X[test])) ** 2))
    nll = -model.log_predictive_density(X[test], y[test]).mean()
    return {**row, "iterations": model.approximator_.n_iter_, "values": [float(rmse), float(nll)]}


def validated(X, y, args, seed, choice):
    """Return the row of the mean over five folds."""
    chains = KSIVIApproximator(
        whiten=Pilot("diagonal", budget=int(40_000 * min(1, 2000 / len(X)))), scale=Scale(floor=1e-5), max_iter=1
    )
    settings = {"prior_precision": precision(choice), "approximator": chains}
    folds = KFold(5, shuffle=True, random_state=0).split(X)
    rows = [ours(X, y, train, test, args, seed, **settings) for train, test in folds]
    return {
        "seconds": sum(row["seconds"] for row in rows),
        "estimator": rows[0]["estimator"],
        "values": np.mean([row["values"] for row in rows], 0).tolist(),
    }


def precision(choice):
    return None if choice == "learned" else float(choice)


def data(case, split, args):
    """Return X, y, and the rows of training and of test."""
    if case == "diabetes":
        X, y = load_diabetes(return_X_y=True, scaled=False)
        return X, y, *train_test_split(np.arange(len(y)), test_size=0.1, random_state=42 + split)
    X, y = getattr(datasets, f"fetch_{case}")(data_home=args.data_home, return_X_y=True)
    return X, y, *datasets.uci_splits(case, split + 1)[split]


def best_choice(case, method, split, rows):
    """Return that with the smallest NLL in the validation."""
    tried = {
        row["method"].split(" @ ")[1]: row["values"][1]
        for row in rows
        if (row["case"], row["seed"]) == (case, split) and row["method"].startswith(f"{method} @ ")
    }
    finite = {choice: nll for choice, nll in tried.items() if nll is not None}
    if not finite:
        raise FloatingPointError(f"{method} has come to its end at none of {sorted(tried)}.")
    return min(finite, key=finite.get)
