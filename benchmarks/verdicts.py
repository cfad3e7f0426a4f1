"""Whether "good" is a bound: verdicts on fits whose errors are known.

python benchmarks/verdicts.py [--cases ...] [--seeds 10] [--jobs 2] [--out FILE.json]
python benchmarks/verdicts.py --show benchmarks/verdicts.json

A fit draws from its target, moved by so many sd along its first coordinate or scaled by a factor in all of them. It
is judged as a fit of KSIVI is, by weighted draws, twice as many until no error is near its limit, up to 8,192. The
true error is the largest of means, 5% and 95% quantiles, in sd, and of log sds, by a million draws. Columns: that
error, and of the fits how many are good, rough and wrong, and how many errors are within the bound of the verdict.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from _harness import command, exact, print_table, results, select
from diagnose import Bent, LogGamma, Mixture, Moved, Normal, Quartic, StudentT, WithDensity

from skksivi.estimators._judge import LEVELS, is_open, of_weights
from skksivi.families._weights import weighted_draws
from skksivi.judge import Errors, Grade, Numbers
from skksivi.score import resolve_score

TARGETS = {
    "normal, 3": lambda: Normal(3),
    "normal, 20": lambda: Normal(20),
    "Student t, 8": lambda: StudentT(2, 8),
    "log gamma": lambda: LogGamma([2.0, 5.0, 20.0]),
    "quartic": lambda: Quartic(4),
    "bent": lambda: Bent(2, 0.4),
    "two modes": lambda: Mixture([Normal(2), Moved(Normal(2), [5.0, 0.0], 0.5 * np.eye(2))], [0.7, 0.3]),
    "correlated": lambda: Moved(Normal(6), np.zeros(6), np.linalg.cholesky(np.full((6, 6), 0.9) + 0.1 * np.eye(6))),
}
#: Moved by so many sd, or scaled.
ERRORS = {
    "right": (0.0, 1.0),
    "+0.15 sd": (0.15, 1.0),
    "+0.3 sd": (0.3, 1.0),
    "x 1.2": (0.0, 1.2),
    "x 0.8": (0.0, 0.8),
}

MANY = 1_000_000


def run(case, error, seed):
    """Return the true error, the grade and the bound of a fit that is wrong in a known way."""
    target, (shift, scale) = TARGETS[case](), ERRORS[error]
    d, X = target.n_features, exact(target, MANY, 0)
    m, sd = X.mean(0), X.std(0)
    move = (1 - scale) * m + shift * sd * (np.arange(d) == seed % d)
    fit = Moved(target, move, scale * np.eye(d))
    true = Errors.between(Numbers.of_draws(X * scale + move, LEVELS), Numbers.of_draws(X, LEVELS))
    if error == "right":
        true = true._replace(mean=0 * true.mean, sd=0 * true.sd, quantiles=0 * true.quantiles)
    worst = max(np.abs(part).max() for part in (true.mean, true.sd, true.quantiles))
    score = resolve_score(target, d, dtype=torch.float64, device=torch.device("cpu"), warns=False)
    for draws in weighted_draws(WithDensity(fit, d), score.double, seed, (1, 2, 4, 8, 16, 32)):
        verdict = of_weights(draws, score)
        if not is_open(verdict, draws):
            break
    within = verdict.within if math.isfinite(verdict.within) else None
    return {"error": float(worst), "grade": verdict.grade.name, "within": within, "calls": len(draws.X)}


def show(document):
    lines = []
    for error in ERRORS:
        rows = select(document["rows"], method=error)
        if rows:
            found = [row["grade"] for row in rows]
            grades = [found.count(grade.name) for grade in (Grade.GOOD, Grade.ROUGH, Grade.WRONG)]
            held = sum(row["within"] is not None and row["error"] <= row["within"] for row in rows)
            least, most = (f(row["error"] for row in rows) for f in (min, max))
            calls = f"{np.median([row['calls'] for row in rows]):,.0f}"
            lines.append([error, f"{least:.2f} to {most:.2f}", *map(str, grades), f"{held} of {len(rows)}", calls])
    print_table(["Fit", "Error", "Good", "Rough", "Wrong", "Within the bound", "Draws"], lines)


def main():
    args = command(__doc__, seeds=10, jobs=2, cases=TARGETS).parse_args()
    jobs = [(case, error, seed) for case in args.cases for error in ERRORS for seed in range(args.seeds)]
    show(results(args, jobs, run, n_jobs=args.jobs))


if __name__ == "__main__":
    main()
