"""Is there anything to search? The default beside a grid of trainings, by exact draws that the search never saw.

python benchmarks/search.py [--targets ...] [--starts ...] [--jobs 1] [--out search.json]
python benchmarks/search.py --criteria [--out criteria.json]       the power of each criterion against known errors
python benchmarks/search.py [--criteria] --show FILE.json --manual doc      the table of the manual

The first candidate trains nothing; the others have two bandwidths, three learning rates, and all else at its default
but `max_iter`. They start where the default does, or are the paper's Algorithm 1 from the Laplace approximation.
Distances are sliced Wasserstein distances from reference draws, in whitened coordinates as in benchmarks/defaults.py,
over those between exact draws. Tau is Kendall's, of scores and distances over candidates.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from _harness import VERSIONS, command, results, rst, save, show_tables, shown, watched
from defaults import PARTS, floor, sliced, whitened
from posteriors import POSTERIORS
from reference import reference
from scipy.stats import kendalltau
from sklearn.model_selection import GridSearchCV

from skksivi import KSIVIApproximator
from skksivi.model_selection import Replicates, neg_distance_scorer, neg_divergence_scorer, neg_ksd_scorer
from skksivi.model_selection import within_noise as choose
from skksivi.targets import from_score_fn

TARGETS = ("banana", "x_shaped")
STARTS = {"default": {}, "Laplace": {"whiten": "laplace", "gradient_estimator": "vanilla"}}


def distance(X, R):
    return sliced(whitened(X, R), whitened(R, R), [(i, i) for i in range(PARTS)])


def study(name, start, seed, *, quick):
    """Return the row of a target: scores and distances of candidates with those of replicates, and the choices."""
    torch.set_num_threads(1)
    target, R = POSTERIORS[name].make(), reference(name)
    n = 200 if quick else 1000
    scorers = {
        "divergence": neg_divergence_scorer(n_samples=n),
        "ksd": neg_ksd_scorer(n_samples=n),
        "distance": neg_distance_scorer(R, metric=distance),
    }
    grid = {"bandwidth": [b * R.shape[1] ** 0.5 for b in (0.25, 1)], "learning_rate": [5e-4, 2e-3, 8e-3]}
    search = GridSearchCV(
        KSIVIApproximator(**STARTS[start], max_iter=20 if quick else 1000, random_state=seed),
        [{"train": [False]}, {"train": [True], **grid}],
        scoring=scorers,
        refit=partial(choose, metric="divergence"),
        cv=Replicates(2 if quick else 3),
    )
    with watched() as costs:
        search.fit(target)
    found, splits = search.cv_results_, range(search.n_splits_)
    return {
        "d": R.shape[1],
        "candidates": found["params"],
        **{key: np.stack([found[f"split{k}_test_{key}"] for k in splits], -1).tolist() for key in scorers},
        "kept": int(search.best_index_),
        "n_within_noise": int(found["within_noise_divergence"].sum()),
        "floor": floor(R),
        "seconds": costs["seconds"],
    }


def summary(row):
    """Return distances over the floor: untrained, kept, best by divergence, by KSD and by itself; and two taus."""
    scores = {key: np.mean(row[key], 1) for key in ("divergence", "ksd", "distance")}
    ratios = -scores["distance"] / row["floor"]
    by = [ratios[np.nanargmax(scores[key])] for key in ("divergence", "ksd")]
    taus = [kendalltau(scores[key], scores["distance"], nan_policy="omit")[0] for key in ("divergence", "ksd")]
    return [ratios[0], ratios[row["kept"]], *by, np.nanmin(ratios), *taus]


def table_of_search(rows):
    """Return the table of the manual."""
    heads = ("Target", "d", "Start", "Untrained", "Kept", "By divergence", "By KSD", "Best", "Tau", "Tau of KSD")
    lines = [(row["case"], row["d"], row["method"], *(f"{v:.2f}" for v in summary(row))) for row in rows]
    return rst(heads, lines)


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
    return torch.cat([5 * torch.tanh(5 * x[:, :1]) - x[:, :1], -x[:, 1:]], 1)


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


CRITERIA = {"neg_ksd": "KSD", "mmd": "MMD", "sliced_wasserstein": "Sliced W2"}


def power(d, n, n_repeats):
    """Return rows of how criteria respond to errors in d dimensions, in standard deviations at exact draws."""
    normal = from_score_fn(lambda x: -x, d), Draws(d, lambda Z, _: Z), {k: Draws(d, f) for k, f in ERRORS.items()}
    two = from_score_fn(modes_score, d), Draws(d, modes(0.5)), {k: Draws(d, modes(w)) for k, w in WEIGHTS.items()}
    rows = []
    for target, exact, wrong in (normal, two):
        R = exact.sample(n, np.random.RandomState(1))
        scorers = [neg_ksd_scorer(n_samples=n), *(neg_distance_scorer(R, metric=m) for m in list(CRITERIA)[1:])]

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
        return shown(args)
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
    parser = command(__doc__, seeds=1, jobs=1, starts=STARTS)
    parser.add_argument("--targets", nargs="+", choices=POSTERIORS, default=TARGETS)
    parser.add_argument("--criteria", action="store_true")
    args = parser.parse_args()
    if args.criteria:
        show_tables(args, {"criteria": table(criteria(args)["rows"])})
        return
    jobs = [(name, start, seed) for seed in range(args.seeds) for name in args.targets for start in args.starts]
    rows = results(args, jobs, partial(study, quick=args.quick), n_jobs=args.jobs)["rows"]
    show_tables(args, {"search": table_of_search(rows)})


if __name__ == "__main__":
    main()
