"""The default regressor on small and noisy data sets, beside scikit-learn's own with what they learn by themselves.

python benchmarks/regression.py [--data-home FOLDER] [--data diabetes ...] [--splits 3] [--quick]
python benchmarks/regression.py --show benchmarks/regression.json --manual doc      the table of the manual

Nothing is searched. A quarter of the rows is for the test, a tenth where there are more than 300. NLL is in nats in
the units of y, "cover" the share of test rows within the central 90% interval, and seconds are of CPU. The ensemble
is of five MLPRegressor, each on four fifths with the alpha that is best on the rest, whose errors are the noise.
"behind" is NLL less that of the best of the three others. The UCI sets, of which 1,111 rows at most are taken, need a
folder.
"""

from __future__ import annotations

import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import torch
from _harness import command, of, results, rst, show_tables
from scipy.stats import norm
from sklearn import datasets as bundled
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import BayesianRidge
from sklearn.model_selection import KFold, train_test_split
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from skksivi import KSIVIRegressor, datasets

N_ROWS = 1111
UCI = ("boston", "yacht", "concrete", "wine_red", "power", "protein")


def linnerud(column):
    data = bundled.load_linnerud()
    return data.data, data.target[:, column]


def last_column(load):
    X = load().data
    return X[:, :-1], X[:, -1]


def linear(n, p, noise):
    return bundled.make_regression(n, p, n_informative=max(5, p // 5), noise=noise, random_state=0)


BUNDLED = {
    "diabetes": partial(bundled.load_diabetes, return_X_y=True),
    **{f"linnerud {k}": partial(linnerud, k) for k in range(3)},
    **{f"friedman1 {n}": partial(bundled.make_friedman1, n, noise=1.0, random_state=0) for n in (100, 500)},
    **{f"friedman2 {n}": partial(bundled.make_friedman2, n, noise=125.0, random_state=0) for n in (100, 500)},
    **{f"friedman3 {n}": partial(bundled.make_friedman3, n, noise=0.1, random_state=0) for n in (100, 500)},
    "linear 60x10": partial(linear, 60, 10, 100.0),
    "linear 200x10": partial(linear, 200, 10, 50.0),
    "linear 300x50": partial(linear, 300, 50, 100.0),
    "iris": partial(last_column, bundled.load_iris),
    "wine": partial(last_column, bundled.load_wine),
    "breast cancer": partial(last_column, bundled.load_breast_cancer),
}


def data(name, folder):
    if name in BUNDLED:
        return BUNDLED[name]()
    X, y = getattr(datasets, f"fetch_{name}")(data_home=folder, return_X_y=True)
    rows = np.random.RandomState(0).permutation(len(X))[:N_ROWS]
    return X[rows], y[rows]


def ensemble(X, y, X_test):
    """Return mean and standard deviation of five networks."""
    centre, unit, errors, f = y.mean(), y.std(), [], []
    z = (y - centre) / unit
    for inner, outer in KFold(5, shuffle=True, random_state=0).split(X):
        nets = [
            MLPRegressor(hidden_layer_sizes=(50,), alpha=a, max_iter=1000, random_state=0) for a in (0.01, 1.0, 10.0)
        ]
        nets = [make_pipeline(StandardScaler(), net).fit(X[inner], z[inner]) for net in nets]
        squares = [np.square(net.predict(X[outer]) - z[outer]) for net in nets]
        best = np.argmin([square.mean() for square in squares])
        errors.append(squares[best])
        f.append(nets[best].predict(X_test))
    return centre + unit * np.mean(f, 0), unit * np.sqrt(np.concatenate(errors).mean() + np.var(f, 0))


def by_itself(regressor, X, y, X_test):
    return make_pipeline(StandardScaler(), regressor).fit(X, y).predict(X_test, return_std=True)


def process(X, y, X_test):
    kernel = ConstantKernel() * RBF(np.ones(X.shape[1]), (1e-2, 1e3)) + WhiteKernel()
    return by_itself(GaussianProcessRegressor(kernel, normalize_y=True, random_state=0), X, y, X_test)


#: What is not skksivi's, as functions that return mean and standard deviation.
OTHERS = {"BayesianRidge": partial(by_itself, BayesianRidge()), "GP": process, "MLPs": ensemble}


def run(name, method, split, folder):
    """Fit, and judge on the rows that are held out; return the row."""
    X, y = data(name, folder)
    share = 0.25 if len(X) <= 300 else 0.1
    X, X_test, y, y_test = train_test_split(X, y, test_size=share, random_state=split)
    start = time.process_time()
    if method == "KSIVI":
        model = KSIVIRegressor(random_state=0).fit(X, y)
        mean, nll = model.predict(X_test), -model.log_predictive_density(X_test, y_test).mean()
        low, high = model.predict_quantiles(X_test, [0.05, 0.95]).T
    else:
        mean, sd = OTHERS[method](X, y, X_test)
        nll = -norm.logpdf(y_test, mean, np.maximum(sd, 1e-9)).mean()
        low, high = mean - 1.645 * sd, mean + 1.645 * sd
    return {
        "n": len(X),
        "nll": float(nll),
        "cover": float(np.mean((low <= y_test) & (y_test <= high))),
        "rmse": float(np.sqrt(np.mean((mean - y_test) ** 2))),
        "seconds": time.process_time() - start,
    }


def lines(rows):
    """Return a line of each data set, the means over splits."""
    for name in dict.fromkeys(row["case"] for row in rows):

        def mean(key, method, name=name):
            return np.mean(of(rows, key, case=name, method=method) or [np.nan])

        others = [mean("nll", method) for method in OTHERS]
        ours = mean("nll", "KSIVI")
        behind = ours - np.nanmin([*others, np.inf])
        costs = f"{mean('cover', 'KSIVI'):.0%}", f"{mean('seconds', 'KSIVI'):.1f}"
        yield name, f"{mean('n', 'KSIVI'):.0f}", *(f"{value:.2f}" for value in (*others, ours, behind)), *costs


def main():
    parser = command(__doc__)
    parser.add_argument("--data-home", type=Path)
    parser.add_argument("--data", nargs="+", help="all by default, of UCI with a folder")
    parser.add_argument("--splits", dest="seeds", type=int, default=3, help="the same as --seeds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = args.data or [*BUNDLED, *(UCI if args.data_home else ())]
    if args.quick:
        names, args.seeds = ["linnerud 0"], 1
    jobs = [(name, method, split) for name in names for method in [*OTHERS, "KSIVI"] for split in range(args.seeds)]
    rows = results(args, jobs, partial(run, folder=args.data_home))["rows"]
    heads = ("Data", "Rows", *OTHERS, "KSIVI", "Behind", "In 90%", "Seconds")
    show_tables(args, {"regression": rst(heads, lines(rows))})


if __name__ == "__main__":
    main()
