"""How often 95% intervals of what the package says of a posterior hold the true number, over default fits.

python benchmarks/coverage.py [--names ...] [--seeds 3] [--repeats 50] [--jobs 2] [--out FILE.json]
python benchmarks/coverage.py --show benchmarks/coverage.json --manual doc      the table of the manual

Cases are the posteriors of benchmarks/posteriors.py, the shapes of benchmarks/_shapes.py and a banana whose moments
are known; this one and the bioassay are fitted --repeats times. A run resumes where it was stopped, and --names are
its parts. Columns: intervals of means, sds and 5%, 50% and 95% quantiles by weighted draws like those of the judge of
a fit, four times as many; of the means of x and x^2 by `expectation` and by `importance_sample`; and of log Z by
`evidence` where it is known. The last are the share of the intervals that are refused or infinite, the median of half
their widths (in sd, of all but x^2 and log Z) and of calls of one `expectation`. True numbers are those of reference
draws, whose own standard error is added, a million numbers where the sampler is exact.
"""

from __future__ import annotations

import math
from functools import singledispatch

import numpy as np
import torch
from _harness import command, exact, of, results, rst, select, show_tables, watched
from _shapes import SHAPES, Normals, SquaredChain, Students, WideBanana, normals
from posteriors import POSTERIORS, Blobs, Gaussian, LogGamma, StudentT
from reference import reference

from skksivi import KSIVIApproximator, expectation, importance_sample
from skksivi.families._weights import weighted_draws
from skksivi.judge._numbers import Numbers
from skksivi.score._target import compared_score
from skksivi.targets import Target

LEVELS, MANY = np.array([0.05, 0.5, 0.95]), 1_000_000
COLUMNS = ("means", "sds", "quantiles", "expectation", "importance", "evidence")


class HalfBanana(Target):
    """x_1 ~ N(0, 1), x_2 | x_1 ~ N(x_1^2 / 2, 1/4)."""

    n_features = 2

    def log_prob(self, x):
        return -(x[:, 0].square() + 4 * (x[:, 1] - x[:, 0].square() / 2).square()) / 2

    def sample(self, n, generator):
        x = normals(n, 2, generator)
        x[:, 1] = x[:, 0].square() / 2 + x[:, 1] / 2
        return x


MAKE = {
    "half banana": HalfBanana,
    **{name: posterior.make for name, posterior in POSTERIORS.items()},
    **{f"{name} (shape)" if name in POSTERIORS else name: make for name, make in SHAPES.items()},
}
REPEATED = ("half banana", "bioassay")


@singledispatch
def log_z(target):
    """Return the logarithm of the integral of p, None where it is unknown."""


@log_z.register
def _(target: Gaussian):
    return target.n_features / 2 * math.log(2 * math.pi) + float(target.root.diag().log().sum())


@log_z.register
def _(target: StudentT):
    return log_z_of_t(target.df, target.n_features) + float(target.root.diag().log().sum())


@log_z.register
def _(target: LogGamma):
    return float(target.a.lgamma().sum() + torch.linalg.slogdet(target.A).logabsdet)


@log_z.register
def _(target: Blobs):
    return math.log(len(target.means)) + target.n_features / 2 * math.log(2 * math.pi)


@log_z.register
def _(target: Normals):
    return target.n_features / 2 * math.log(2 * math.pi)


@log_z.register
def _(target: WideBanana):
    return target.n_features / 2 * math.log(2 * math.pi) + math.log(10)


@log_z.register
def _(_: HalfBanana):
    return math.log(2 * math.pi) - math.log(2)


@log_z.register
def _(_: SquaredChain):
    return 1.5 * math.log(2 * math.pi) + 2 * math.log(0.3)


@log_z.register
def _(target: Students):
    d = target.n_features
    return log_z_of_t(target.df, d) if target.joint else d * log_z_of_t(target.df, 1)


def log_z_of_t(df, d):
    return math.lgamma(df / 2) + d / 2 * math.log(df * math.pi) - math.lgamma((df + d) / 2)


def intervals(value, se, true, true_se, sd=None):
    """Return how many finite intervals there are, how many hold the true values, of how many, and their half widths
    in units of sd.
    """
    value, se, true, true_se = np.broadcast_arrays(*np.atleast_1d(value, se, true, true_se))
    finite = np.isfinite(se) & np.isfinite(value)
    held = finite & (np.abs(value - true) <= 1.96 * np.hypot(np.where(finite, se, 0), true_se))
    row = {"finite": int(finite.sum()), "held": int(held.sum()), "all": se.size}
    return row | ({} if sd is None else {"widths": (1.96 * se / sd)[finite].tolist()})


def refused(n):
    return {"finite": 0, "held": 0, "all": n}


def run(case, method, seed):
    torch.set_num_threads(1)
    target = MAKE[case]()
    d = target.n_features
    R = exact(target, MANY // d, 1) if hasattr(target, "sample") else reference(case.removesuffix(" (shape)"))
    true = Numbers.of_draws(R, LEVELS)
    squares = np.column_stack([R, R**2])
    moments = squares.mean(0), squares.std(0) / math.sqrt(len(R))
    with watched() as costs:
        q = KSIVIApproximator(random_state=seed, **({"max_iter": 50} if method == "quick" else {})).fit(target)
        score = compared_score(target, d, q.dtype, q.device)
        with torch.no_grad():
            rows = weighted_draws(q.sampler_, score, seed, times=4)
        controlled = expectation(q, target, lambda X: np.column_stack([X, X**2]), random_state=seed)
        sample = importance_sample(q, target, random_state=seed)
    row = dict.fromkeys(("means", "sds"), refused(d)) | {"quantiles": refused(3 * d), "importance": refused(2 * d)}
    if rows is not None and rows.trusted:
        found = rows.rows.numbers(rows.X, rows.draws, LEVELS)
        row["means"] = intervals(found.mean, found.mean_se, true.mean, true.mean_se, true.sd)
        row["sds"] = intervals(found.sd, found.sd_se, true.sd, true.sd_se, true.sd)
        row["quantiles"] = intervals(found.quantiles, found.quantiles_se, true.quantiles, true.quantiles_se, true.sd)
    row["expectation"] = intervals(controlled.value, controlled.se, *moments)
    half = 1.96 * controlled.se[:d] / true.sd
    row["expectation"]["widths"] = half[np.isfinite(half)].tolist()
    if sample.trusted:
        row["importance"] = intervals(*sample.expectation(lambda X: np.column_stack([X, X**2])), *moments)
    if log_z(target) is not None:
        row["evidence"] = intervals(*sample.evidence().log_z, log_z(target), 0.0)
    return {"d": d, "k": sample.k, "calls": controlled.n_score_calls, **row, "warned": costs["warned"]}


def share(rows, column):
    """Return the share of finite intervals that hold the true numbers, as a cell."""
    found = of(rows, column)
    n = sum(f["finite"] for f in found)
    return f"{sum(f['held'] for f in found) / n:.2f}" if n else "-"


def line(name, rows):
    found = [f for column in COLUMNS for f in of(rows, column)]
    refusals = 1 - sum(f["finite"] for f in found) / sum(f["all"] for f in found)
    widths = [
        np.concatenate([f.get("widths", []) for c in columns for f in of(rows, c)])
        for columns in (COLUMNS[:3], COLUMNS[3:4])
    ]
    cells = (f"{np.median(w):.3f}" if len(w) else "-" for w in widths)
    calls = f"{np.median(of(rows, 'calls')):,.0f}"
    return (name, len(rows), *(share(rows, c) for c in COLUMNS), f"{refusals:.2f}", *cells, calls)


def table(rows):
    heads = ("Case", "Fits", *(c.capitalize() for c in COLUMNS), "Refused", "Width", "Expectation's", "Calls")
    cases = dict.fromkeys(row["case"] for row in rows)
    return rst(heads, [line("All", rows), *(line(case, select(rows, case=case)) for case in cases)])


def main():
    parser = command(__doc__, seeds=3, jobs=2, names=list(MAKE))
    parser.add_argument("--repeats", type=int, default=50, help="fits of the cases that are repeated")
    args = parser.parse_args()
    method = "quick" if args.quick else "defaults"
    seeds = {name: args.repeats if name in REPEATED and not args.quick else args.seeds for name in args.names}
    jobs = [(name, method, seed) for name in args.names for seed in range(seeds[name])]
    if not args.show:
        for name in args.names:
            if not hasattr(MAKE[name](), "sample"):
                reference(name.removesuffix(" (shape)"))
    document = results(args, jobs, run, n_jobs=args.jobs)
    show_tables(args, {"coverage": table(document["rows"])})


if __name__ == "__main__":
    main()
