"""How often 95% intervals of what the package says of a posterior hold the true number, over default fits.

python benchmarks/intervals.py [--names ...] [--seeds 3] [--repeats 50] [--jobs 2] [--out FILE.json]
python benchmarks/intervals.py --show benchmarks/intervals.json --manual doc      the table of the manual

Cases are the posteriors of benchmarks/posteriors.py, the shapes of benchmarks/_shapes.py and a banana whose moments
are known; this one and the bioassay are fitted --repeats times. "wrong starts" and "trained starts" are those of
benchmarks/training.py before and after a training, "wrong fits" those of benchmarks/diagnose.py. A run resumes where
it was stopped, and --names are its parts. Columns: intervals of means, sds and 5%, 50% and 95% quantiles by the
weighted draws that a fit has kept, of others by four times as many as the judge begins with; of the means of x and
x^2 by `expectation` and by `importance_sample`; and of log Z by `evidence` where it is known. The last are the share
of the intervals that are refused or infinite, the median of half their widths (in sd, of all but x^2 and log Z) and
of calls of one `expectation`. True numbers are those of reference draws, whose own standard error is added, a million
numbers where the sampler is exact.
"""

from __future__ import annotations

import math
from functools import singledispatch

import numpy as np
import torch
from _harness import command, exact, results, rst, select, show_tables, watched
from _shapes import SHAPES, Labels, Normals, SquaredChain, Students, WideBanana, normals
from diagnose import FAULTS, KINDS, Known
from posteriors import POSTERIORS, Blobs, Gaussian, LogGamma, StudentT
from reference import reference
from training import NAMES, STARTS, start

from skksivi import KSIVIApproximator, expectation, importance_sample
from skksivi.families._weights import weighted_draws
from skksivi.judge import Numbers
from skksivi.score._target import compared_score
from skksivi.targets import Target

LEVELS, MANY = np.array([0.05, 0.5, 0.95]), 1_000_000
COLUMNS = ("means", "sds", "quantiles", "expectation", "importance", "evidence")
HEADS = ("Fits", "Number", *(c.capitalize() for c in COLUMNS), "Refused", "Width", "Expectation's", "Calls")

#: Faults that leave no draws where a part of the target is.
LOST = ("a mode lost", "neck lost", "arc lost")


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

#: The groups of fits, by their method.
GROUPS = {
    "defaults": "Default fits",
    "wrong starts": "Wrong starts",
    "trained starts": "The same, trained",
    "wrong fits": "Wrong fits",
}


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
    return row | ({} if sd is None else {"widths": (1.96 * se / sd)[finite].round(4).tolist()})


def refused(n):
    return {"finite": 0, "held": 0, "all": n}


def run(case, method, seed):
    torch.set_num_threads(1)
    if method in ("defaults", "quick"):
        return of_default_fit(case, method, seed)
    kind, what = case.split(", ", 1) if method == "wrong fits" else case.rsplit(", ", 1)
    if method == "wrong fits":
        rng = np.random.RandomState([seed, list(KINDS).index(kind), list(FAULTS).index(what)])
        target = KINDS[kind](rng)
        q, R = Known(FAULTS[what][0](target, rng)), exact(target, MANY // target.n_features, 1)
    else:
        target, R = POSTERIORS[kind].make(), reference(kind)
        whiten = start(what, R, np.random.RandomState(seed))
        by = "path" if method == "trained starts" else "start"
        q = KSIVIApproximator(random_state=seed, whiten=whiten, mixing="normal", method=by)
    with watched() as costs:
        q.fit(target)
        score = compared_score(target, target.n_features, q.dtype, q.device)
    return {
        "d": target.n_features,
        **by_weights(q, score, seed, Numbers.of_draws(R, LEVELS)),
        "warned": costs["warned"],
    }


def by_weights(q, score, seed, true):
    """Return intervals of means, sds and quantiles by weighted draws like those of the judge."""
    rows = getattr(q, "weighted_draws_", None) or next(weighted_draws(q.sampler_, score, seed, times=(4,)), None)
    if rows is None or not rows.trusted:
        d = len(true.mean)
        return dict.fromkeys(("means", "sds"), refused(d)) | {"quantiles": refused(3 * d)}
    found = rows.numbers(rows.X, rows.draws, LEVELS)
    return {
        "means": intervals(found.mean, found.mean_se, true.mean, true.mean_se, true.sd),
        "sds": intervals(found.sd, found.sd_se, true.sd, true.sd_se, true.sd),
        "quantiles": intervals(found.quantiles, found.quantiles_se, true.quantiles, true.quantiles_se, true.sd),
    }


def of_default_fit(case, method, seed):
    target = MAKE[case]()
    d = target.n_features
    R = exact(target, MANY // d, 1) if hasattr(target, "sample") else reference(case.removesuffix(" (shape)"))
    if isinstance(target, Labels):  # of which reference draws have one order
        R = np.random.default_rng(0).permuted(R, axis=1)
    true = Numbers.of_draws(R, LEVELS)
    squares = np.column_stack([R, R**2])
    moments = squares.mean(0), squares.std(0) / math.sqrt(len(R))
    with watched() as costs:
        q = KSIVIApproximator(random_state=seed, **({"max_iter": 50} if method == "quick" else {})).fit(target)
        score = compared_score(target, d, q.dtype, q.device)
        controlled = expectation(q, lambda X: np.column_stack([X, X**2]), target, random_state=seed)
        sample = importance_sample(q, target, random_state=seed)
    row = by_weights(q, score, seed, true)
    row["expectation"] = intervals(controlled.value, controlled.se, *moments)
    half = 1.96 * controlled.se[:d] / true.sd
    row["expectation"]["widths"] = half[np.isfinite(half)].round(4).tolist()
    row["importance"] = refused(2 * d)
    if sample.trusted:
        row["importance"] = intervals(*sample.expectation(lambda X: np.column_stack([X, X**2])), *moments)
    if log_z(target) is not None:
        row["evidence"] = intervals(*sample.evidence().log_z, log_z(target), 0.0)
    return {"d": d, "k": sample.k, "calls": controlled.n_score_calls, **row, "warned": costs["warned"]}


def share(rows, column):
    """Return the share of finite intervals that hold the true numbers, as a cell."""
    found = [row[column] for row in rows if column in row]
    n = sum(f["finite"] for f in found)
    return f"{sum(f['held'] for f in found) / n:.2f}" if n else "-"


def line(name, rows):
    found = [row[column] for row in rows for column in COLUMNS if column in row]
    refusals = 1 - sum(f["finite"] for f in found) / sum(f["all"] for f in found)
    widths = [
        np.concatenate([row[c].get("widths", []) for row in rows for c in columns if c in row] or [[]])
        for columns in (COLUMNS[:3], COLUMNS[3:4])
    ]
    cells = (f"{np.median(w):.3f}" if len(w) else "-" for w in widths)
    calls = [row["calls"] for row in rows if "calls" in row]
    spent = f"{np.median(calls):,.0f}" if calls else "-"
    return (name, len(rows), *(share(rows, c) for c in COLUMNS), f"{refusals:.2f}", *cells, spent)


def table(rows):
    """Return the table of groups of fits."""
    groups = {name: select(rows, method=method) for method, name in GROUPS.items()}
    wrong = groups.pop(GROUPS["wrong fits"])
    for name, is_lost in (("Wrong fits that lost a part", True), ("Other wrong fits", False)):
        groups[name] = [row for row in wrong if (row["case"].split(", ", 1)[1] in LOST) == is_lost]
    return rst(HEADS, [line(name, some) for name, some in groups.items() if some])


def table_of_cases(rows):
    some = [row for row in rows if row["method"] in ("defaults", "quick")]
    return rst(HEADS, [line(case, select(some, case=case)) for case in dict.fromkeys(row["case"] for row in some)])


def main():
    parser = command(__doc__, seeds=3, jobs=2, names=[*MAKE, *GROUPS])
    parser.add_argument("--repeats", type=int, default=50, help="fits of the cases that are repeated")
    args = parser.parse_args()
    method = "quick" if args.quick else "defaults"
    jobs = []
    for name in args.names:
        n = args.repeats if name in REPEATED and not args.quick else args.seeds
        if name in MAKE:
            jobs += [(name, method, seed) for seed in range(n)]
        elif name == "wrong fits":
            jobs += [(f"{kind}, {fault}", name, s) for s in range(n) for fault in FAULTS for kind in FAULTS[fault][1]]
        elif name != "defaults":
            jobs += [(f"{of}, {kind}", name, s) for s in range(n) for of in NAMES for kind in STARTS]
    if not args.show:
        for name in args.names:
            if name in MAKE and not hasattr(MAKE[name](), "sample"):
                reference(name.removesuffix(" (shape)"))
    document = results(args, jobs, run, n_jobs=args.jobs)
    print(table_of_cases(document["rows"]))
    show_tables(args, {"intervals": table(document["rows"])})


if __name__ == "__main__":
    main()
