"""A grid of bandwidths and learning rates, judged by the target's score, against reference draws that it never saw.

python benchmarks/search.py [--targets waveform diffusion] [--whiten laplace] [--replicates 2] [--out search.json]
python benchmarks/search.py --criteria [--out criteria.json]       the power of each criterion against known errors
python benchmarks/search.py [--criteria] --show FILE.json --manual doc      the table of the manual

The fits start from the Laplace approximation: from the default start these targets need no training, so that no
candidate differs from another. The search knows the target alone; the sliced Wasserstein distance to reference draws
is taken beside the criterion. --check searches again in two processes and on a cluster of two dask workers: the
tables must be equal to the last bit.
"""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import torch
from _harness import VERSIONS, command, read, results, rst, save, show_tables
from joblib import parallel_config
from reference import hmc, waveform_target
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV

from skksivi import KSIVIApproximator
from skksivi.datasets import load_waveform_posterior
from skksivi.metrics import noise_floor, sliced_wasserstein
from skksivi.model_selection import Replicates, neg_distance_scorer, neg_ksd_scorer
from skksivi.targets import ConditionedDiffusion, from_score_fn

#: In units of the square root of the dimension.
BANDWIDTHS = [0.25, 0.5, 1.0]
LEARNING_RATES = [5e-4, 2e-3, 8e-3]
DEFAULTS = (0.5, 2e-3)


def distance(X, Y):
    return sliced_wasserstein(X, Y, random_state=0)


def diffusion(quick):
    target = ConditionedDiffusion(n_features=50)
    n = 200 if quick else 2000
    return target, hmc(target, n, n_chains=n // 2, n_rounds=4 if quick else 40)[0].numpy()


TARGETS = {"waveform": lambda _: (waveform_target(), load_waveform_posterior()), "diffusion 50": diffusion}


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
    """Return the scores (candidates, replicates)."""
    return np.stack([search.cv_results_[f"split{k}_test_{name}"] for k in range(search.n_splits_)], -1)


def study(name, _method, _seed, args):
    """Return the row of a target."""
    target, reference = TARGETS[name](args.quick)
    search = search_of(args, target.n_features)
    scorers = {"ksd": neg_ksd_scorer(), "distance": neg_distance_scorer(reference, metric=distance)}
    measured = clone(search).set_params(refit="ksd", scoring=scorers)
    seconds = {"one process": timed(measured, target)}
    if args.check:
        in_two, elsewhere = clone(search).set_params(n_jobs=2, refit=False), clone(search).set_params(refit=False)
        seconds |= {"two processes": timed(in_two, target), "two dask workers": on_a_cluster(elsewhere, target)}
        for other in (in_two, elsewhere):
            np.testing.assert_array_equal(folds(measured, "ksd"), folds(other))
    floor = noise_floor(distance, reference, len(reference) // 2, random_state=0)
    return {
        "d": target.n_features,
        "selected": int(measured.best_index_),
        "candidates": measured.cv_results_["params"],
        "ksd": (-folds(measured, "ksd")).tolist(),
        "distance": (-folds(measured, "distance")).tolist(),
        "floor": floor._asdict(),
        "seconds": seconds,
    }


def grid(rows):
    """Return the table of the manual: the candidates of each target, means over replicates."""
    lines = []
    for row in rows:
        for i, parameters in enumerate(row["candidates"]):
            b, rate = parameters["bandwidth"] / row["d"] ** 0.5, parameters["learning_rate"]
            notes = [", selected"] * (i == row["selected"]) + [", defaults"] * ((b, rate) == DEFAULTS)
            cells = f"{b:.2f}", f"{rate:g}", f"{np.mean(row['ksd'][i]):.4f}", f"{np.mean(row['distance'][i]):.4f}"
            lines.append((row["case"] + "".join(notes), *cells))
    return rst(("Target", "Bandwidth", "Rate", "KSD^2", "Distance"), lines)


def sentences(rows):
    """Yield what the distances and the seconds of each target are."""
    for row in rows:
        distances, floor = np.mean(row["distance"], 1), row["floor"]
        seconds = ", ".join(f"{value:.0f} s with {name}" for name, value in row["seconds"].items())
        yield (
            f"{row['case']}: the distance of the selected candidate is {distances[row['selected']]:.4f}, of the best "
            f"one {distances.min():.4f}, of exact draws {floor['mean']:.4f} with a standard deviation of "
            f"{floor['sd']:.4f}; {seconds}."
        )


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
        return read(args.out if args.show is True else args.show)
    n, n_repeats = (100, 2) if args.quick else (2000, 16)
    rows = [row for d in (2, 22) for row in power(d, n, n_repeats)]
    document = {"settings": {"quick": args.quick}, "rows": rows, "versions": VERSIONS}
    save(args.out, document)
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
    parser = command(__doc__, seeds=1)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--whiten", choices=["auto", "laplace"], default="laplace")
    parser.add_argument("--replicates", type=int, default=2)
    parser.add_argument("--max-iter", type=int, default=2000)
    parser.add_argument("--check", action="store_true", help="search again elsewhere, and compare")
    parser.add_argument("--criteria", action="store_true")
    args = parser.parse_args()
    if args.criteria:
        show_tables(args, {"criteria": table(criteria(args)["rows"])})
        return
    args.bandwidths, args.learning_rates = BANDWIDTHS, LEARNING_RATES
    if args.quick:
        args.bandwidths, args.learning_rates, args.max_iter = BANDWIDTHS[:2], [2e-3], 50
    settings = {name: getattr(args, name) for name in ("whiten", "replicates", "max_iter")}
    rows = results(args, [(name, "grid", 0) for name in args.targets], partial(study, args=args), **settings)["rows"]
    show_tables(args, {"search": grid(rows)})
    print(*sentences(rows), sep="\n")


if __name__ == "__main__":  # the workers import this file
    main()
