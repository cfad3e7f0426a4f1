"""Size and power of the goodness-of-fit test `ksd_test`.

python benchmarks/ksd_test.py [--dimensions 1 2 10 22] [--out FILE.json]
python benchmarks/ksd_test.py --show benchmarks/ksd_test.json --manual doc      the tables of the manual

The target is N(0, I) in d dimensions. Size: the share of 1,000 exact samples of 200 draws that are rejected. Power:
the share of 200 samples that are rejected at 5% when all coordinates are shifted, the length of the shift the same
for each d; when all are scaled; and when all are Student t of unit variance, by their excess kurtosis.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from _harness import command, results, rst, select, show_tables

from skksivi.metrics import ksd_test

DIMENSIONS, LEVELS, LEVEL = (1, 2, 10, 22), (0.01, 0.05, 0.1), 0.05


def standard_score(x):
    return -x


def exact(rng, shape, _):
    return rng.standard_normal(shape)


def shifted(rng, shape, length):
    return rng.standard_normal(shape) + length / math.sqrt(shape[1])


def scaled(rng, shape, factor):
    return factor * rng.standard_normal(shape)


def heavy_tailed(rng, shape, kurtosis):
    """Draw Student t of unit variance; its excess kurtosis is 6 / (df - 4)."""
    df = 4 + 6 / kurtosis
    return rng.standard_t(df, shape) * math.sqrt((df - 2) / df)


DEPARTURES = {
    "shift": (shifted, (0.1, 0.2, 0.3, 0.4, 0.6)),
    "scale": (scaled, (0.7, 0.8, 0.9, 1.1, 1.2, 1.3)),
    "excess kurtosis": (heavy_tailed, (1.0, 3.0, 6.0)),
}
#: Each with what draws a sample, and its parameter.
CASES = {"exact": (exact, 0.0)} | {
    f"{name} {value:g}": (draw, value) for name, (draw, values) in DEPARTURES.items() for value in values
}


def run(case, method, _seed, *, n_draws, n_exact, n_wrong, n_bootstrap):
    """Return how many samples of a case in d dimensions are rejected at each level."""
    draw, value = CASES[case]
    d = int(method.removeprefix("d = "))
    rng, n_samples = np.random.RandomState(d), n_exact if draw is exact else n_wrong
    test = partial(ksd_test, score_fn=standard_score, n_bootstrap=n_bootstrap - 1, random_state=rng)
    p = np.array([test(draw(rng, (n_draws, d), value)).pvalue for _ in range(n_samples)])
    return {"samples": n_samples, "rejected": [int((p <= level).sum()) for level in LEVELS]}


def rejected(rows, case, method, level):
    """Return the share of the samples rejected at a level, and its standard error."""
    [row] = select(rows, case=case, method=method)
    share = row["rejected"][LEVELS.index(level)] / row["samples"]
    return share, math.sqrt(share * (1 - share) / row["samples"])


def tables(rows):
    """Return the tables of size and of power."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    wrong = [case for case in dict.fromkeys(row["case"] for row in rows) if case != "exact"]
    size = [
        (method[4:], *("{:.3f} +- {:.3f}".format(*rejected(rows, "exact", method, level)) for level in LEVELS))
        for method in methods
    ]
    power = [(case, *(f"{rejected(rows, case, method, LEVEL)[0]:.2f}" for method in methods)) for case in wrong]
    return {
        "test_size": rst(("d", *(f"At {level:.0%}" for level in LEVELS)), size),
        "test_power": rst(("Departure", *methods), power),
    }


def main():
    parser = command(__doc__, seeds=1)
    parser.add_argument("--dimensions", nargs="+", type=int, default=DIMENSIONS)
    parser.add_argument("--draws", type=int, default=200)
    args = parser.parse_args()
    settings = {"n_draws": args.draws, "n_exact": 1000, "n_wrong": 200, "n_bootstrap": 500}
    if args.quick:
        settings = {"n_draws": 20, "n_exact": 10, "n_wrong": 10, "n_bootstrap": 100}
    jobs = [(case, f"d = {d}", 0) for d in args.dimensions for case in CASES]
    document = results(args, jobs, partial(run, **settings), **settings)
    show_tables(args, tables(document["rows"]))


if __name__ == "__main__":
    main()
