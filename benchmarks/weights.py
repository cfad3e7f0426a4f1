"""Density, certificate and weights of default and Laplace fits, on the posteriors of benchmarks/posteriors.py.

python benchmarks/weights.py [--names ...] [--seeds 3] [--jobs 2] [--out FILE.json]

Columns: how far two estimates of log q by other random numbers are apart (their standard deviation, in nats); the
shape k-hat of the importance ratios and the effective share of the draws; the certificate, the same with exact draws
of the target for its second mean, and how many of their common standard errors apart the two are; then the largest
error of a mean, in sd, and the range of the ratios of sds, of draws of the fit and of the refined fit. A fit is
accurate within 0.1 sd and 10% of each sd, a certificate right within two standard errors or 0.001 nats. Reference
draws are those of benchmarks/defaults.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from _accuracy import is_accurate
from _harness import command, print_table, results, select, watched
from defaults import measure
from posteriors import POSTERIORS
from reference import reference

from skksivi import KSIVIApproximator, importance_sample, refine
from skksivi._utils.psis import standard_error
from skksivi.baselines import Laplace

#: Draws that are weighed, and those of them whose density is estimated twice.
N_WEIGHED, N_REPEATED = 4000, 500

#: What is fitted.
METHODS = {"defaults": KSIVIApproximator, "Laplace": Laplace, "quick": partial(KSIVIApproximator, max_iter=50)}

#: The most features.
MAX_FEATURES = 60


def in_words(errors):
    return f"{errors['mean']:.3f}  {errors['sd_min']:.2f} - {errors['sd_max']:.2f}" if errors else "-"


def apart(row):
    """Return how many standard errors there are between the certificate and that by exact draws."""
    return abs(row["divergence"] - row["exact"]) / np.hypot(row["se"], row["exact_se"])


def is_right(row):
    return apart(row) < 2 or abs(row["divergence"] - row["exact"]) < 0.001


def run(name, method, seed):
    torch.set_num_threads(1)
    target, R = POSTERIORS[name].make(), reference(name)
    with watched():
        q = METHODS[method](random_state=seed).fit(target)
        sample = importance_sample(q, target, n_samples=N_WEIGHED, random_state=seed)
    x = torch.as_tensor(sample.X[:N_REPEATED])
    again = replace(q.sampler_, seed=q.sampler_.seed + 1) if hasattr(q.sampler_, "seed") else q.sampler_
    gaps = again.log_density(x).value - q.sampler_.log_density(x).value
    found = sample.certificate()
    under_p = q.score_samples(R, return_std=True)[0] - target.log_prob(torch.as_tensor(R)).numpy()
    under_q = -sample.log_ratios[sample.of_fit]
    exact = under_q.mean() - under_p.mean()
    se = np.hypot(standard_error(under_q), standard_error(under_p))
    before, after = measure(q.sample(len(R), random_state=seed), R), None
    if sample.trusted:
        refined = refine(q, target, n_samples=N_WEIGHED, random_state=seed)
        after = measure(refined.sample(len(R), random_state=seed), R)
    return {
        "d": target.n_features,
        "repeat_sd": float(gaps.std() / 2**0.5),
        "k": found.k,
        "share": found.share,
        "trusted": sample.trusted,
        "divergence": found.divergence,
        "se": found.se,
        "exact": float(exact),
        "exact_se": float(se),
        "before": before,
        "after": after,
    }


def show(rows):
    for method in dict.fromkeys(row["method"] for row in rows):
        print(method)
        show_method(select(rows, method=method))


def show_method(rows):
    lines = []
    for r in rows:
        errors = map(in_words, (r["before"], r["after"]))
        own = f"{r['divergence']:.3f} ± {r['se']:.3f}", f"{r['exact']:.3f} ± {r['exact_se']:.3f}", f"{apart(r):.1f}"
        k = f"{r['k']:.2f}{'' if r['trusted'] else '*'}", f"{r['share']:.2f}"
        lines.append((r["case"], r["seed"], r["d"], f"{r['repeat_sd']:.4f}", *k, *own, *errors))
    print_table(("", "seed", "d", "log q", "k-hat", "share", "certificate", "exact", "se", "fit", "refined"), lines)
    refined = [r for r in rows if r["after"]]
    accurate = [is_accurate(r["after"]) for r in refined if is_accurate(r["before"])]
    others = [is_accurate(r["after"]) for r in refined if not is_accurate(r["before"])]
    right = sum(map(is_right, refined))
    print(f"{len(refined)} of {len(rows)} are trusted, * is not. {right} certificates of these are right.")
    before, after = (f"{sum(made)} of {len(made)} that were" for made in (accurate, others))
    print(f"Accurate when refined: {before}, {after} not.")


def main():
    small = [name for name, posterior in POSTERIORS.items() if posterior.make().n_features <= MAX_FEATURES]
    args = command(__doc__, seeds=1, jobs=2, names=small).parse_args()
    if not args.show:
        for name in args.names:
            reference(name)
    methods = ["quick"] if args.quick else ["defaults", "Laplace"]
    jobs = [(name, method, seed) for method in methods for name in args.names for seed in range(args.seeds)]
    show(results(args, jobs, run, n_jobs=args.jobs)["rows"])


if __name__ == "__main__":
    main()
