"""Regression in a pipeline with a grid search, beside scikit-learn's own regressors.

python benchmarks/predictors.py --data-home FOLDER [--data boston yacht] [--methods NAME ...] [--splits 3] [--quick]

The split of the paper (the first) and others: a tenth of the rows for the test. Every method stands behind a
StandardScaler in a Pipeline whose settings a GridSearchCV chooses on the training rows, by three folds. RMSE and NLL
(nats, in the units of y) are of the test rows, "cover" is the share of them within the central 90% interval of a
normal with the predicted standard deviation, and seconds are those of search and fit. MLPRegressor predicts no
standard deviation: its NLL and intervals take that of its errors in five-fold cross-validation. Means over splits,
with their standard deviation.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path

import numpy as np
import torch
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
        "KSIVI, network": (KSIVIRegressor(random_state=0), {"prior_precision": [None, 1.0]}),
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data-home", type=Path)
    parser.add_argument("--data", nargs="+", default=["boston", "yacht"])
    parser.add_argument("--methods", nargs="+", help="all by default")
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="made-up data, and one method alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ["made up"] if args.quick else args.data:
        if args.quick:
            X = np.random.RandomState(0).normal(size=(60, 2))
            y = X[:, 0] + 0.1 * np.random.RandomState(1).normal(size=60)
        else:
            X, y = getattr(datasets, f"fetch_{name}")(data_home=args.data_home, return_X_y=True)
        print(f"{name}: {len(X)} rows, {X.shape[1]} columns, {args.splits} splits")
        print(f"  {'':<18}{'RMSE':>16}{'NLL':>16}{'cover':>16}{'seconds':>10}  chosen")
        for method in ["BayesianRidge"] if args.quick else args.methods or methods(X.shape[1]):
            rows, seconds, chosen = [], [], []
            for split in range(args.splits):
                parts = train_test_split(X, y, test_size=0.1, random_state=42 + split)
                start = time.perf_counter()
                search = searched(method, parts[0], parts[2])
                seconds.append(time.perf_counter() - start)
                chosen.append("/".join(str(v) for v in search.best_params_.values()))
                rows.append(judged(search, parts[0], parts[2], parts[1], parts[3]))
            cells = "".join(f"{m:>9.3f} +-{s:>5.3f}" for m, s in zip(np.mean(rows, 0), np.std(rows, 0), strict=True))
            print(f"  {method:<18}{cells}{np.median(seconds):>10.1f}  {' '.join(chosen)}", flush=True)


if __name__ == "__main__":
    main()
