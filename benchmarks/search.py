"""A grid of bandwidths and learning rates, judged by the target's score, against reference draws that it never saw.

python benchmarks/search.py [--targets waveform diffusion] [--whiten auto] [--replicates 2] [--output search.json]
python benchmarks/search.py --criteria [--output criteria.json]       the power of each criterion against known errors
python benchmarks/search.py --criteria --show benchmarks/criteria.json --manual doc      the table of the manual

The search knows the target alone. The same fits are then made again in one process, where the sliced Wasserstein
distance to reference draws is taken beside the criterion, and on a cluster of two dask workers; the tables must be
equal to the last bit. "Gap" is by how much the distance of the selected candidate exceeds the least one; it is within
noise if it is below two standard deviations of the distance between independent exact samples.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from _harness import VERSIONS, read, rst, save, write_tables
from joblib import parallel_config
from reference import hmc, waveform_target
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV

from skksivi import KSIVIApproximator
from skksivi.datasets import load_waveform_posterior
from skksivi.metrics import noise_floor, sliced_wasserstein
from skksivi.model_selection import Replicates, neg_distance_scorer, neg_ksd_scorer
from skksivi.targets import ConditionedDiffusion, from_score_fn

#: In units of the square root of the dimension; 0.5 and 2e-3 are the defaults.
BANDWIDTHS = [0.25, 0.5, 1.0]
LEARNING_RATES = [5e-4, 2e-3, 8e-3]


def distance(X, Y):
    return sliced_wasserstein(X, Y, random_state=0)


def diffusion(quick):
    target = ConditionedDiffusion(n_features=50)
    n = 200 if quick else 2000
    return target, hmc(target, n, n_chains=n // 2, n_rounds=4 if quick else 40)[0].numpy()


TARGETS = {"waveform": lambda _: (waveform_target(), load_waveform_posterior()), "diffusion": diffusion}


def search_of(args, d):
    return GridSearchCV(
        KSIVIApproximator(whiten=args.whiten, max_iter=args.max_iter, random_state=0),
        {"bandwidth": [b * d**0.5 for b in args.bandwidths], "learning_rate": args.learning_rates},
        scoring=neg_ksd_scorer(),
        cv=Replicates(args.replicates),
    )


def timed(search, target):
    start = time.perf_counter()
    search.fit(target)
    return time.perf_counter() - start


def on_a_cluster(search, target):
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster),
        parallel_config("dask", wait_for_workers_timeout=60),
    ):
        return timed(search, target)


def folds(search, name="score"):
    """Return the grades (candidates, replicates)."""
    return np.stack([search.cv_results_[f"split{k}_test_{name}"] for k in range(search.n_splits_)], -1)


def study(name, args):
    """Search, check and print the table of a target; return it."""
    target, reference = TARGETS[name](args.quick)
    search = search_of(args, target.n_features).set_params(n_jobs=2)
    seconds = {"two processes": timed(search, target)}
    judged = clone(search).set_params(
        n_jobs=1,
        refit=False,
        scoring={"ksd": neg_ksd_scorer(), "distance": neg_distance_scorer(reference, metric=distance)},
    )
    seconds["one process"] = timed(judged, target)
    elsewhere = clone(search).set_params(n_jobs=None, refit=False)
    seconds["dask"] = on_a_cluster(elsewhere, target)
    for other, column in ((judged, "ksd"), (elsewhere, "score")):
        np.testing.assert_array_equal(folds(search), folds(other, column))

    distances, grades = -folds(judged, "distance").mean(1), -folds(search)
    floor = noise_floor(distance, reference, len(reference) // 2, random_state=0)
    print(f"\n{name}, whiten={args.whiten!r}, {args.replicates} replicates, {args.max_iter} iterations")
    print(f"{'bandwidth / sqrt(d)':>20}{'learning rate':>15}{'KSD^2':>10}{'sd':>9}{'sliced W2':>11}")
    rows = []
    for i, parameters in enumerate(search.cv_results_["params"]):
        b, rate = parameters["bandwidth"] / target.n_features**0.5, parameters["learning_rate"]
        mean, sd = grades[i].mean(), grades[i].std(ddof=1) if args.replicates > 1 else np.nan
        rows.append({"bandwidth": b, "learning_rate": rate, "ksd": mean, "sd": sd, "sliced_w2": distances[i]})
        mark = (" selected" if i == search.best_index_ else "") + (" best" if i == distances.argmin() else "")
        print(f"{b:>20.2f}{rate:>15.4f}{mean:>10.4f}{sd:>9.4f}{distances[i]:>11.4f}{mark}")
    gap = float(distances[search.best_index_] - distances.min())
    verdict = "within" if gap < 2 * floor.sd else "beyond"
    print(f"gap {gap:.4f}, {verdict} the noise; exact draws {floor.mean:.4f} with sd {floor.sd:.4f}")
    print("equal tables; seconds: " + ", ".join(f"{key} {value:.0f}" for key, value in seconds.items()), flush=True)
    return {"rows": rows, "gap": gap, "floor": floor._asdict(), "seconds": seconds}


class Draws:
    """An estimator whose draws are those of N(0, I), changed by a function."""

    def __init__(self, d, change):
        self.d = d
        self.change = change

    def sample(self, n_samples, random_state=None):
        rng = np.random.RandomState(random_state.randint(2**31))
        return self.change(rng.normal(size=(n_samples, self.d)), rng)


def in_first(change):
    """Return the change of the first coordinate alone."""
    return lambda Z, rng: np.column_stack([change(Z, rng), Z[:, 1:]])


def modes(share):
    """Return the map of N(0, I) to two modes, 10 apart, the first with this share of the draws."""
    return lambda Z, rng: Z + np.where(rng.uniform(size=(len(Z), 1)) < share, -5, 5) * np.eye(1, Z.shape[1])


def modes_score(x):
    first = x[:, :1]
    return torch.cat([5 * torch.tanh(5 * first) - first, -x[:, 1:]], 1)


ERRORS = {
    "means off by 0.1": lambda Z, _: Z + 0.1,
    "one mean off by 0.3": in_first(lambda Z, _: Z[:, 0] + 0.3),
    "sds 10% too large": lambda Z, _: 1.1 * Z,
    "sds 10% too small": lambda Z, _: 0.9 * Z,
    "one sd 30% too small": in_first(lambda Z, _: 0.7 * Z[:, 0]),
    "a correlation of 0.5": in_first(lambda Z, _: 0.5 * Z[:, 1] + 0.75**0.5 * Z[:, 0]),
    "a skewness of 1": in_first(lambda Z, rng: rng.gamma(4, size=len(Z)) / 2 - 2),
    "tails of Student t, 10": lambda Z, rng: Z * np.sqrt(8 / rng.chisquare(10, (len(Z), 1))),
}
WEIGHTS = {"modes 0.6 : 0.4": 0.6, "modes 0.9 : 0.1": 0.9, "one mode of two": 1.0}


CRITERIA = {"neg_ksd": "KSD", "energy": "Energy", "sliced_wasserstein": "Sliced W2"}


def power(d, n, n_repeats):
    """Return rows of how criteria respond to errors in d dimensions, in standard deviations at exact draws."""
    normal = from_score_fn(lambda x: -x, d), Draws(d, lambda Z, _: Z), {k: Draws(d, f) for k, f in ERRORS.items()}
    two = from_score_fn(modes_score, d), Draws(d, modes(0.5)), {k: Draws(d, modes(w)) for k, w in WEIGHTS.items()}
    rows = []
    for target, exact, wrong in (normal, two):
        reference = exact.sample(n, np.random.RandomState(1))
        distances = [neg_distance_scorer(reference, metric=metric) for metric in list(CRITERIA)[1:]]
        scorers = [neg_ksd_scorer(n_samples=n), *distances]

        def scores(q, scorers=scorers, target=target):
            return np.array([[scorer(q, target[k]) for scorer in scorers] for k in range(1, n_repeats + 1)])

        right = scores(exact)
        for name, q in wrong.items():
            response = (right.mean(0) - scores(q).mean(0)) / right.std(0, ddof=1)
            rows.append({"error": name, "d": d, **dict(zip(CRITERIA, response.tolist(), strict=True))})
    return rows


def criteria(args):
    """Return the document of the power of criteria, from a file or from a run."""
    if args.show:
        return read(args.show)
    n, n_repeats = (100, 2) if args.quick else (2000, 16)
    rows = [row for d in (2, 22) for row in power(d, n, n_repeats)]
    document = {"settings": {"quick": args.quick}, "rows": rows, "versions": VERSIONS}
    save(args.output, document)
    return document


def table(rows):
    """Return the table of the manual: a row for each error, the criteria in each dimension."""
    sizes = list(dict.fromkeys(row["d"] for row in rows))
    heads = ("Error", *(f"{criterion}, d = {d}" for d in sizes for criterion in CRITERIA.values()))
    found = {(row["error"], row["d"]): row for row in rows}
    errors = dict.fromkeys(row["error"] for row in rows)
    lines = [(error, *(f"{round(found[error, d][key])}" for d in sizes for key in CRITERIA)) for error in errors]
    return rst(heads, lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--whiten", choices=["auto", "laplace"], default="auto")
    parser.add_argument("--replicates", type=int, default=2)
    parser.add_argument("--max-iter", type=int, default=2000)
    parser.add_argument("--criteria", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--show", type=Path, metavar="FILE", help="show the power of criteria in this file")
    parser.add_argument("--manual", type=Path, metavar="FOLDER", help="write their table where the manual has it")
    args = parser.parse_args()
    if args.criteria:
        found = table(criteria(args)["rows"])
        print(found)
        if args.manual:
            write_tables(args.manual, {"criteria": found})
        return
    args.bandwidths, args.learning_rates = BANDWIDTHS, LEARNING_RATES
    if args.quick:
        args.bandwidths, args.learning_rates, args.whiten, args.max_iter = BANDWIDTHS[:2], [2e-3], "laplace", 50
    tables = {name: study(name, args) for name in args.targets}
    if args.output:
        args.output.write_text(json.dumps(tables, indent=1))


if __name__ == "__main__":  # the workers import this file
    main()
