"""One fit for many data sets, from scores, against neural posterior estimation from simulations.

python benchmarks/amortized.py [--parts c2st sbc single] [--models ...] [--calls 1000 10000 100000]
                               [--methods AmortizedKSIVI NPE] [--out FILE.json] [--quick] [--show] [--manual FOLDER]

"c2st": on the seven models of `_sbibm`, the accuracy of a classifier that is to tell draws from those of a reference,
by 10 data sets: multilayer perceptrons with two hidden layers of 10 d units, five folds, 1,000 draws each, as in the
study of Lueckmann et al. A method may take so many calls: of NPE simulations, of AmortizedKSIVI simulations, scores
and products with their Jacobian together. "sbc": the ranks of 1,000 parameters among draws of one fit. "single": one
fit against default fits to each of 50 data sets, before and after refinement.

NPE is that of the package sbi with its defaults, a masked autoregressive flow.
"""

from __future__ import annotations

import math
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import torch
from _harness import command, of, print_table, results, rst, write_tables
from _sbibm import MODELS
from sklearn.model_selection import cross_val_score
from sklearn.neural_network import MLPClassifier

from skksivi import AmortizedKSIVI, KSIVIApproximator
from skksivi.calibration import Calibration
from skksivi.metrics import sliced_wasserstein

N_OBSERVATIONS, N_DRAWS, N_SBC, N_SINGLE = 10, 1000, 1000, 50


def observations(model, n, seed):
    """Return n parameters and the features of their data, none of which a fit sees."""
    rng = np.random.RandomState([seed, 1])
    X = model.prior(n, rng)
    return X, model.simulate(X, rng)


def pairs(model, n, seed):
    rng = np.random.RandomState([seed, 2])
    X = model.prior(n, rng)
    return X, model.simulate(X, rng)


def share_simulated(calls):
    """Return how many of the calls are simulations: a score for each takes as many, and modes need some."""
    return min(calls // 3, 20_000)


def by_scores(model, calls, seed):
    n = share_simulated(calls)
    X, Y = pairs(model, n, seed)
    est = AmortizedKSIVI(max_score_calls=calls - n, random_state=seed, dtype="float64")
    est.fit(model.score_fn, Y, X, n_features=model.n_features)
    spent = n + est.n_score_calls_ + est.n_products_
    return lambda n, y: est.sample(n, y, random_state=seed), spent


def by_simulations(model, calls, seed):
    from sbi.inference import NPE

    X, Y = (torch.as_tensor(a, dtype=torch.float32) for a in pairs(model, calls, seed))
    torch.manual_seed(seed)
    prior = torch.distributions.MultivariateNormal(X.mean(0), X.T.cov())
    trainer = NPE(prior=prior, show_progress_bars=False).append_simulations(X, Y)
    q = trainer.train(training_batch_size=200 if calls <= 10_000 else 1000)

    def sample(n, y):
        with torch.no_grad():
            return q.sample((n,), condition=torch.as_tensor(y, dtype=torch.float32)[None])[:, 0].double().numpy()

    return sample, calls


METHODS = {"AmortizedKSIVI": by_scores, "NPE": by_simulations}


def c2st(A, B, seed):
    """Return the cross-validated accuracy of a classifier of draws, 0.5 if they cannot be told apart."""
    d = A.shape[1]
    mean, sd = A.mean(0), A.std(0)
    Z = np.nan_to_num((np.concatenate([A, B]) - mean) / sd, nan=1e3, posinf=1e3, neginf=-1e3).clip(-1e3, 1e3)
    labels = np.repeat([0, 1], [len(A), len(B)])
    net = MLPClassifier((10 * d, 10 * d), max_iter=300, early_stopping=True, n_iter_no_change=20, random_state=seed)
    order = np.random.RandomState(seed).permutation(len(Z))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(cross_val_score(net, Z[order], labels[order], cv=5).mean())


def reference(model, name, seed, n, folder=Path(".cache")):
    """Return draws (10, n, d) of the posteriors of the observations, kept in a file."""
    path = folder / f"sbibm_{name.replace(' ', '_')}_{seed}_{n}.npy"
    if path.exists():
        return np.load(path)
    rng = np.random.RandomState([seed, 3])
    draws = np.stack([model.reference(y, n, rng, x) for x, y in zip(*observations(model, N_OBSERVATIONS, seed), strict=True)])
    folder.mkdir(exist_ok=True)
    np.save(path, draws)
    return draws


def compare(case, method, calls, quick):
    model, seed, n = MODELS[case](), 0, 200 if quick else N_DRAWS
    truth = reference(model, case, seed, n)
    _, Y = observations(model, N_OBSERVATIONS, seed)
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sample, spent = METHODS[method](model, calls, seed)
    seconds = time.process_time() - start
    n_observed = 1 if quick else N_OBSERVATIONS
    start = time.process_time()
    draws = [sample(n, y) for y in Y[:n_observed]]
    each = (time.process_time() - start) / n_observed
    values = [c2st(a, b, i) for i, (a, b) in enumerate(zip(truth, draws, strict=False))]
    return {"c2st": values, "spent": spent, "seconds": seconds, "seconds_of_draws": each}


def main():
    parser = command(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--calls", nargs="+", type=int, default=[1000, 10_000, 100_000])
    args = parser.parse_args()
    jobs = [(case, method, calls) for calls in args.calls for case in args.models for method in args.methods]
    rows = results(args, jobs, partial(compare, quick=args.quick))["rows"]
    for row in rows:
        print(row["case"], row["method"], row["seed"], np.round(np.mean(row["c2st"]), 3), np.round(row["c2st"], 2), row["spent"], round(row["seconds"], 1))


if __name__ == "__main__":
    main()
