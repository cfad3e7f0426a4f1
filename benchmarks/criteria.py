"""What each criterion of a search responds to: known errors in draws of N(0, I).

python benchmarks/criteria.py [--quick] [--out criteria.json]
python benchmarks/criteria.py --show benchmarks/criteria.json --manual doc      the table of the manual
"""

from __future__ import annotations

import numpy as np
import torch
from _harness import VERSIONS, command, rst, save, show_tables, shown

from skksivi.model_selection import neg_distance_scorer, neg_ksd_scorer
from skksivi.targets import from_score_fn


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
    args = command(__doc__, seeds=1, jobs=1).parse_args()
    show_tables(args, {"criteria": table(criteria(args)["rows"])})


if __name__ == "__main__":
    main()
