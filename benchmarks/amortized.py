"""One fit for many data sets, from scores, against neural posterior estimation from simulations.

python benchmarks/amortized.py [--parts c2st sbc single many] [--models ...] [--calls 1000 10000 100000]
                               [--methods AmortizedKSIVI NPE] [--out FILE.json] [--quick] [--show] [--manual FOLDER]

"c2st": on the seven models of `_sbibm`, the accuracy of a classifier that is to tell draws from those of a reference,
by 10 data sets: multilayer perceptrons with two hidden layers of 10 d units, five folds, 1,000 draws each, as in the
study of Lueckmann et al. A method may take so many calls: of NPE simulations, of AmortizedKSIVI simulations, scores
and products with their Jacobian together. "sbc": the ranks of 1,000 parameters among draws of one fit. "single": one
fit against default fits to each of 50 data sets, before and after refinement. "many": 100 logistic regressions with
40 rows and ten coefficients, of one fit to 1,000 others without and with the coefficients that made them, of Laplace
approximations and of default fits. "Layer" rows are of commit 3abea2f, whose last stage trained a semi-implicit layer
along the path gradient, after that stage and before it.

NPE is that of the package sbi with its defaults, a masked autoregressive flow.
"""

from __future__ import annotations

import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import torch
from _harness import command, of, results, rst, show_tables
from _sbibm import MODELS, LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.neural_network import MLPClassifier

from skksivi import AmortizedKSIVI, KSIVIApproximator
from skksivi.baselines import Laplace
from skksivi.calibration import Calibration
from skksivi.metrics import sliced_wasserstein

#: Where reference draws are kept.
DIRECTORY = Path(__file__).parents[1] / "build" / "reference"

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
    """Return how many of the calls are simulations: most where there are few, and scores where there are many."""
    return min(4 * calls // 5, 500 + 7 * calls // 20, 20_000)


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
    return float(quietly(cross_val_score, net, Z[order], labels[order], cv=5).mean())


def reference(model, name, seed, n, folder=DIRECTORY):
    """Return draws (10, n, d) of the posteriors of the observations, kept in a file."""
    path = folder / f"sbibm_{name.replace(' ', '_')}_{seed}_{n}.npy"
    if path.exists():
        return np.load(path)
    rng = np.random.RandomState([seed, 3])
    draws = np.stack(
        [model.reference(y, n, rng, x) for x, y in zip(*observations(model, N_OBSERVATIONS, seed), strict=True)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    np.save(path, draws)
    return draws


def compare(case, method, calls, quick):
    model, seed, n = MODELS[case](), 0, 200 if quick else N_DRAWS
    truth = reference(model, case, seed, n)
    _, Y = observations(model, N_OBSERVATIONS, seed)
    start = time.process_time()
    sample, spent = quietly(METHODS[method], model, calls, seed)
    seconds = time.process_time() - start
    n_observed = 1 if quick else N_OBSERVATIONS
    start = time.process_time()
    draws = [sample(n, y) for y in Y[:n_observed]]
    each = (time.process_time() - start) / n_observed
    values = [c2st(a, b, i) for i, (a, b) in enumerate(zip(truth, draws, strict=False))]
    return {"c2st": values, "spent": spent, "seconds": seconds, "seconds_of_draws": each}


def ranks(case, method, calls, quick):
    """Return p-values of the ranks of the parameters of 1,000 data sets among 99 draws of one fit, in one pass."""
    model, n = MODELS[case](), 50 if quick else N_SBC
    sample, spent = quietly(METHODS[method], model, calls, 0)
    X, Y = observations(model, n, 1)
    start = time.process_time()
    draws = sample(99, Y)
    seconds = time.process_time() - start
    found = (draws < X[:, None]).sum(1)
    names = tuple(f"x{i}" for i in range(X.shape[1]))
    result = Calibration(found, 99, names)
    return {
        "p_value": result.p_value,
        "p_values": result.p_values.tolist(),
        "n": n,
        "seconds": seconds,
        "spent": spent,
    }


def standardised_w2(A, B, truth):
    """Return the sliced 2-Wasserstein distance of draws in units of the spread of others."""
    mean, sd = truth.mean(0), truth.std(0)
    return float(sliced_wasserstein((A - mean) / sd, (B - mean) / sd, random_state=0))


def single(case, _, calls, quick):
    """Compare one fit with default fits to each of 50 data sets, by their distance from a reference."""
    model, n, n_draws = MODELS[case](), 2 if quick else N_SINGLE, 500 if quick else 2000
    X, Y = pairs(model, share_simulated(calls), 0)
    est = AmortizedKSIVI(max_score_calls=calls - len(X), random_state=0, dtype="float64")
    quietly(est.fit, model.score_fn, Y, X, n_features=model.n_features)
    observed = zip(*observations(model, n, 2), strict=True)
    rng = np.random.RandomState(4)
    rows = [quietly(one_data_set, model, est, x, y, n_draws, rng) for x, y in observed]
    return {name: [row[name] for row in rows] for name in rows[0]}


def one_data_set(model, est, x, y, n_draws, rng):
    """Return the distances from a reference of the amortised fit, of it refined, and of a default fit."""
    truth, other = (model.reference(y, n_draws, rng, x) for _ in range(2))
    start = time.process_time()
    amortised = est.sample(n_draws, y, random_state=0)
    times = [time.process_time()]
    refined = est.refine(y)
    times.append(time.process_time())
    default = KSIVIApproximator(random_state=0, dtype="float64").fit(est.target(y))
    times.append(time.process_time())
    draws = {"amortised": amortised, "refined": refined.sample(n_draws), "default": default.sample(n_draws)}
    seconds = dict(zip(draws, np.diff([start, *times]).tolist(), strict=True))
    return {
        **{name: standardised_w2(value, truth, truth) for name, value in draws.items()},
        "floor": standardised_w2(other, truth, truth),
        **{f"seconds {name}": value for name, value in seconds.items()},
        "calls refined": refined.n_score_calls_ + refined.n_products_,
        "calls default": default.n_score_calls_ + default.n_products_,
    }


def many(_, method, calls, quick):
    """Return the mean distance from a reference over data sets, and what all their fits cost together."""
    model, n = LogisticRegression(), 2 if quick else 10 if "default" in method else N_MANY
    rng, others = np.random.RandomState(1), np.random.RandomState(100)
    X, (A, Y) = model.prior(N_MANY, rng), model.pairs(1000, others)
    observed = model.simulate(X, rng)[:n]
    truth = [model.reference(y, 2 * N_DRAWS, rng, x) for x, y in zip(X, observed, strict=False)]
    start = time.process_time()
    if method in GIVEN:
        est = AmortizedKSIVI(max_score_calls=calls, random_state=0, dtype="float64")
        quietly(est.fit, model.score_fn, Y, A if GIVEN[method] else None, n_features=10)
        draws, spent = est.sample(N_DRAWS, observed, random_state=0), est.n_score_calls_ + est.n_products_
    else:
        fits = [quietly(EACH[method](random_state=0).fit, model.target(y)) for y in observed]
        draws, spent = [q.sample(N_DRAWS) for q in fits], sum(q.n_score_calls_ + q.n_products_ for q in fits)
    seconds = time.process_time() - start
    halves = [(T[:N_DRAWS], T[N_DRAWS:]) for T in truth]
    distances = [standardised_w2(D, T, T) for D, (T, _) in zip(draws, halves, strict=True)]
    floors = [standardised_w2(other, T, T) for T, other in halves]
    return {"w2": np.mean(distances), "floor": np.mean(floors), "n": n, "spent": spent, "seconds": seconds}


def quietly(function, *args, **options):
    """Call a function whose warnings are no news here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **options)


PARTS = {"c2st": compare, "sbc": ranks, "single": single, "many": many}
#: Of `many`: whether a fit is given coefficients, and what is fitted to each data set.
GIVEN = {"data sets alone": False, "with coefficients": True}
EACH = {"Laplace, each": Laplace, "defaults, each": KSIVIApproximator}
BUDGETS, N_MANY = (25_000, 50_000, 100_000), 100


def run(case, method, calls, quick):
    part, _, case = case.rpartition(": ")
    return PARTS[part or "c2st"](case, method, calls, quick)


def c2st_table(rows):
    """Return the accuracies by model and method, the mean over data sets, and where the first method is no worse."""
    own = [row for row in rows if "c2st" in row]
    calls = sorted({row["seed"] for row in own})
    columns = [(n, method) for n in calls for method in METHODS]

    def cell(case, n, method):
        found = of(own, "c2st", case=case, method=method, seed=n)
        return f"{np.mean(found[0]):.2f}" if found else "\\-"

    cases = [case for case in MODELS if of(own, "c2st", case=case)]
    lines = [(case, *(cell(case, *column) for column in columns)) for case in cases]
    return rst(("Model", *(f"{method}, {n:,}" for n, method in columns)), lines)


def sbc_table(rows):
    """Return the p-values of the calibration."""
    own = [row for row in rows if "p_value" in row]
    lines = [
        (row["case"].removeprefix("sbc: "), f"{row['seed']:,}", f"{row['n']:,}", f"{row['p_value']:.2g}")
        for row in own
    ]
    return rst(("Model", "Calls", "Data sets", "p-value"), lines)


def single_table(rows):
    """Return the ratios of distances from the reference, and seconds and calls for one data set."""
    lines = []
    for row in rows:
        if "amortised" in row:
            before, after, default = (np.mean(row[name]) for name in ("amortised", "refined", "default"))
            seconds = [np.median(row[f"seconds {name}"]) for name in ("amortised", "refined", "default")]
            times = ", ".join(f"{value:.2g}" for value in seconds)
            name, calls = row["case"].removeprefix("single: "), f"{row['seed']:,}"
            lines.append((name, calls, f"{before / default:.2f}", f"{after / default:.2f}", times))
    heads = ("Model", "Calls", "Ratio", "Ratio, refined", "Seconds: amortised, refined, default fit")
    return rst(heads, lines)


def many_table(rows):
    """Return distances, calls and seconds by what is given and by the budget."""
    own, lines = [row for row in rows if "floor" in row and "spent" in row and row["case"].startswith("many")], []
    for row in sorted(own, key=lambda row: (row["method"] in EACH, row["method"], row["seed"])):
        budget, per = f"{row['seed']:,}" if row["seed"] else "", 100 / row["n"]
        lines.append(
            (row["method"], budget, f"{row['w2']:.3f}", f"{per * row['spent']:,.0f}", f"{per * row['seconds']:.0f}")
        )
    lines.append(("exact draws", "", *(f"{row['floor']:.3f}" for row in own[:1]), "", ""))
    return rst(("Fit", "Calls allowed", "Distance", "Calls", "Seconds"), lines)


def main():
    parser = command(__doc__, parts=PARTS, models=MODELS, methods=METHODS)
    parser.add_argument("--calls", nargs="+", type=int, default=[1000, 10_000, 100_000])
    args = parser.parse_args()
    jobs = []
    if args.quick:
        args.models, args.methods, args.calls = ["Gaussian linear"], ["AmortizedKSIVI"], [1500]
    if "c2st" in args.parts:
        jobs += [(case, method, calls) for calls in args.calls for case in args.models for method in args.methods]
    for part in {"sbc", "single"} & set(args.parts):
        jobs += [(f"{part}: {case}", "AmortizedKSIVI", max(args.calls)) for case in args.models]
    if "many" in args.parts:
        case = "many: logistic regression"
        jobs += [(case, method, calls) for calls in ((1500,) if args.quick else BUDGETS) for method in GIVEN]
        jobs += [(case, method, 0) for method in EACH]
    rows = results(args, jobs, partial(run, quick=args.quick))["rows"]
    tables = {
        "amortized": c2st_table(rows),
        "amortized_calibration": sbc_table(rows),
        "amortized_single": single_table(rows),
        "amortized_many": many_table(rows),
    }
    show_tables(args, tables)


if __name__ == "__main__":
    main()
