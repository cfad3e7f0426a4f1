"""Regression in a pipeline with a grid search, beside scikit-learn's own regressors.

python benchmarks/predictors.py --data-home FOLDER [--data boston yacht] [--methods NAME ...] [--splits 3] [--quick]
python benchmarks/predictors.py --show benchmarks/predictors.json --manual doc      the table of the manual

The split of the paper (the first) and others: a tenth of the rows for the test. Every method stands behind a
StandardScaler in a Pipeline whose settings a GridSearchCV chooses on the training rows, by three folds. RMSE and NLL
(nats, in the units of y) are of the test rows, "cover" is the share of them within the central 90% interval of a
normal with the predicted standard deviation, and seconds are those of search and fit. MLPRegressor predicts no
standard deviation: its NLL and intervals take that of its errors in five-fold cross-validation. Means over splits,
with their standard deviation.
"""

from __future__ import annotations

import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import torch
from _harness import command, of, pairs, results, rst, show_tables, spread
from scipy.stats import norm
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import BayesianRidge
from sklearn.model_selection import GridSearchCV, cross_val_predict, train_test_split
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from skksivi import KSIVIRegressor, datasets


def methods(p):
    """Return the regressors for p columns, and what is searched of each."""
    kernel = ConstantKernel() * RBF(np.ones(p), (1e-2, 1e3)) + WhiteKernel()  # a length scale for each column
    process = GaussianProcessRegressor(kernel, normalize_y=True, random_state=0)
    linear = KSIVIRegressor(model="linear", random_state=0)
    return {
        "BayesianRidge": (BayesianRidge(), {"lambda_init": [None, 1e-3]}),
        "GaussianProcess": (process, {"alpha": [1e-10, 1e-3]}),
        "MLP": (MLPRegressor(hidden_layer_sizes=(50,), max_iter=2000, random_state=0), {"alpha": [1e-4, 1e-2, 1.0]}),
        "KSIVI, linear": (linear, {"hyperprior": [(1.0, 0.1), (1.0, 1.0)]}),
        "KSIVI, network": (KSIVIRegressor(model="network", random_state=0), {"prior_precision": [None, 1.0]}),
    }


def searched(name, X, y):
    """Return the search of a method, fitted."""
    regressor, grid = methods(X.shape[1])[name]
    step = type(regressor).__name__.lower()
    pipeline = make_pipeline(StandardScaler(), regressor)
    scoring = "neg_root_mean_squared_error"
    return GridSearchCV(pipeline, {f"{step}__{k}": v for k, v in grid.items()}, cv=3, scoring=scoring).fit(X, y)


def judged(search, X, y, X_test, y_test):
    """Return RMSE, NLL and the coverage of the 90% interval."""
    model = search.best_estimator_
    try:
        mean, sd = model.predict(X_test, return_std=True)
    except (TypeError, ValueError):
        mean, sd = model.predict(X_test), np.std(y - cross_val_predict(model, X, y, cv=5))
    last = model.steps[-1][1]
    if isinstance(last, KSIVIRegressor):
        nll = -last.log_predictive_density(model[:-1].transform(X_test), y_test).mean()
    else:
        nll = -norm.logpdf(y_test, mean, np.maximum(sd, 1e-9)).mean()
    inside = np.abs(y_test - mean) <= norm.ppf(0.95) * sd
    return np.sqrt(np.mean((y_test - mean) ** 2)), nll, inside.mean()


#: What is shown of the splits.
KEYS = ("rmse", "nll", "cover", "seconds")


def data(name, folder):
    if name == "made up":
        X = np.random.RandomState(0).normal(size=(60, 2))
        return X, X[:, 0] + 0.1 * np.random.RandomState(1).normal(size=60)
    return getattr(datasets, f"fetch_{name}")(data_home=folder, return_X_y=True)


def run(name, method, split, folder):
    """Search, and judge on the rows that are held out; return the row."""
    X, y = data(name, folder)
    X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.1, random_state=42 + split)
    start = time.perf_counter()
    search = searched(method, X_train, y_train)
    seconds = time.perf_counter() - start
    rmse, nll, cover = map(float, judged(search, X_train, y_train, X_test, y_test))
    chosen = "/".join(str(v) for v in search.best_params_.values())
    return {"rmse": rmse, "nll": nll, "cover": cover, "seconds": seconds, "chosen": chosen}


def main():
    parser = command(__doc__)
    parser.add_argument("--data-home", type=Path)
    parser.add_argument("--data", nargs="+", default=["boston", "yacht"])
    parser.add_argument("--methods", nargs="+", help="all by default")
    parser.add_argument("--splits", dest="seeds", type=int, default=3, help="the same as --seeds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names, of_all = (["made up"], ["BayesianRidge"]) if args.quick else (args.data, args.methods or list(methods(1)))
    jobs = [(name, method, split) for name in names for method in of_all for split in range(args.seeds)]
    rows = results(args, jobs, partial(run, folder=args.data_home))["rows"]
    show_tables(args, {"predictors": table(rows)})


def table(rows):
    """Return the table of the manual, means over splits."""
    lines = []
    for name, method in pairs(rows):
        rmse, nll, cover, seconds = (of(rows, key, case=name, method=method) for key in KEYS)
        costs = f"{np.mean(cover):.0%}", f"{np.median(seconds):.1f}"
        lines.append((name, method, spread(rmse, 2), spread(nll, 2), *costs))
    return rst(("Data", "Regressor", "RMSE", "NLL", "In 90%", "Seconds"), lines)


if __name__ == "__main__":
    main()
