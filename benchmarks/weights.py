"""Density, certificate and importance weights of default fits, on the posteriors of benchmarks/posteriors.py.

python benchmarks/weights.py [--names ...] [--seeds 3] [--jobs 2] [--out FILE.json]

Columns: how far two estimates of log q by other random numbers are apart (their standard deviation, in nats); the
shape k-hat of the importance ratios and the effective share of the draws; the certificate, the same with exact draws
of the target for its second mean, and how many of their common standard errors apart the two are; then the largest
error of a mean, in sd, and the range of the ratios of sds, of draws of the fit and of draws by the weights. Reference
draws are those of benchmarks/defaults.py.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import torch
from _harness import command, print_table, results
from defaults import measure
from posteriors import POSTERIORS
from reference import reference

from skksivi import KSIVIApproximator, importance_sample

#: Draws that are weighed, and those of them whose density is estimated twice.
N_WEIGHED, N_REPEATED = 4000, 500

#: The most features.
MAX_FEATURES = 60


def is_accurate(errors):
    return errors["mean"] < 0.1 and errors["sd_min"] > 0.9 and errors["sd_max"] < 1.1


def in_words(errors):
    return f"{errors['mean']:.3f}  {errors['sd_min']:.2f} - {errors['sd_max']:.2f}" if errors else "-"


def run(name, method, seed):
    torch.set_num_threads(1)
    target, R = POSTERIORS[name].make(), reference(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        q = KSIVIApproximator(random_state=seed, **({"max_iter": 50} if method == "quick" else {})).fit(target)
        sample = importance_sample(q, target, n_samples=N_WEIGHED, random_state=seed)
    x = torch.as_tensor(sample.X[:N_REPEATED])
    sampler = replace(q.sampler_, seed=q.sampler_.seed + 1)
    gaps = sampler.log_density(x).value - q.sampler_.log_density(x).value
    found = sample.certificate()
    under_p = q.score_samples(R) - target.log_prob(torch.as_tensor(R)).numpy()
    under_q = -sample.log_ratios[sample.of_fit]
    exact = under_q.mean() - under_p.mean()
    se = np.hypot(under_q.std() / len(under_q) ** 0.5, under_p.std() / len(under_p) ** 0.5)
    before = measure(q.sample(len(R), random_state=seed), R)
    after = measure(sample.sample(len(R), random_state=seed), R) if sample.trusted else None
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
    lines = []
    for r in rows:
        apart = abs(r["divergence"] - r["exact"]) / np.hypot(r["se"], r["exact_se"])
        errors = [
            f"{e['mean']:.3f}  {e['sd_min']:.2f} - {e['sd_max']:.2f}" if e else "-" for e in (r["before"], r["after"])
        ]
        own = f"{r['divergence']:.3f} ± {r['se']:.3f}", f"{r['exact']:.3f} ± {r['exact_se']:.3f}", f"{apart:.1f}"
        k = f"{r['k']:.2f}{'' if r['trusted'] else '*'}", f"{r['share']:.2f}"
        lines.append((r["case"], r["seed"], r["d"], f"{r['repeat_sd']:.4f}", *k, *own, *errors))
    print_table(("", "seed", "d", "log q", "k-hat", "share", "certificate", "exact", "se", "fit", "weighed"), lines)
    weighed = [r for r in rows if r["after"]]
    accurate = [(is_accurate(r["before"]), is_accurate(r["after"])) for r in weighed]
    print(
        f"{len(weighed)} of {len(rows)} trusted; * is not. Of these {sum(a for a, _ in accurate)} fits are accurate, "
        f"{sum(b for _, b in accurate)} after weighing; {sum(a and not b for a, b in accurate)} were made inaccurate."
    )


def main():
    parser = command(__doc__, seeds=1)
    small = [name for name, posterior in POSTERIORS.items() if posterior.make().n_features <= MAX_FEATURES]
    parser.add_argument("--names", nargs="+", choices=small, default=small)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    if not args.show:
        for name in args.names:
            reference(name)
    method = "quick" if args.quick else "defaults"
    jobs = [(name, method, seed) for name in args.names for seed in range(args.seeds)]
    show(results(args, jobs, run, n_jobs=args.jobs)["rows"])


if __name__ == "__main__":
    main()
