"""The default settings, and others, on posteriors that people bring, against exact reference draws.

python benchmarks/defaults.py [--names ...] [--methods ...] [--seeds 3] [--jobs 2] [--out FILE.json]
python benchmarks/defaults.py --variants       other choices of single settings, by which the defaults were chosen
python benchmarks/defaults.py --show benchmarks/defaults.json --manual doc      the table of the manual

Reference draws are made at the first run (`benchmarks/reference.py posteriors`, ten minutes) and kept in
build/reference. Each row of the table is a posterior; of the seeds the worst is shown, of the sliced Wasserstein
distance the mean, of calls and seconds the median; full-rank ADVI and the paper's settings, which are slow, run once.
The distance is computed in coordinates whitened by the reference's covariance, 1,000 draws a side, and divided by its
floor, the same between two parts of the reference. A fit is accurate where every mean is within 0.1 sd and every sd
within 10%, of coordinates and, beyond the noise, of the directions of benchmarks/_accuracy.py.
"""

from __future__ import annotations

import math
import time
import warnings
from functools import partial

import numpy as np
import torch
from _accuracy import along_directions, is_accurate, moments
from _harness import command, print_table, results, rst, write_tables
from posteriors import POSTERIORS
from reference import reference

from skksivi import KSIVIApproximator, paper_settings
from skksivi.baselines import Laplace
from skksivi.metrics import sliced_wasserstein
from skksivi.parameters import Pilot
from skksivi.score._probe import in_double

PAPER = paper_settings("waveform") | {"gradient_estimator": "u-statistic"}
#: Parts of 1,000 draws.
PARTS = 4

#: One setting changed at a time.
VARIANTS = {
    "defaults": {},
    "imq": {"kernel": "imq"},
    "median width": {"bandwidth": "median"},
    "no moment penalty": {"whiten": Pilot(weight=0.0)},
    "moment penalty 0.1": {"whiten": Pilot(weight=0.1)},
    "normal mixing": {"mixing": "normal"},
    "learning rate 5e-3": {"learning_rate": 5e-3},
    "learning rate 1e-3": {"learning_rate": 1e-3},
    "batch 256": {"batch_size": 256},
    "6,000 iterations": {"max_iter": 6000},
    "whiten laplace": {"whiten": "laplace"},
    "whiten bam": {"whiten": "bam"},
}


def by_ksivi(parameters):
    def sample(target, n, seed):
        q = KSIVIApproximator(**parameters, random_state=seed).fit(target)
        return q.sample(n), {"score_calls": q.n_score_calls_ + q.n_products_, "n_iter": q.n_iter_}

    return sample


def by_laplace(target, n, seed):
    return Laplace(random_state=seed).fit(target).sample(n), {}


def by_pilot_gaussian(target, n, seed):
    """N(m, L L^T) with the pilot's moments."""
    whitening = KSIVIApproximator(max_iter=1, random_state=seed).fit(target).whitening_
    noise = np.random.RandomState(seed).standard_normal((n, target.n_features))
    return whitening.m + noise @ whitening.L.T, {"score_calls": whitening.n_score_calls}


def by_advi(target, n, seed, n_iter=20_000, n_draws=10):
    """Full-rank Gaussian variational inference by the reparametrised gradient, Adam at .01 with a cosine decay."""
    d = target.n_features
    score_fn, generator = in_double(target.score_fn, d), torch.Generator().manual_seed(seed)
    m = torch.zeros(d, dtype=torch.float64, requires_grad=True)
    T = torch.zeros(d, d, dtype=torch.float64, requires_grad=True)  # its diagonal is the logarithm of L's
    optimizer = torch.optim.Adam([m, T], lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_iter)
    for _ in range(n_iter):
        L = T.tril(-1) + T.diagonal().exp().diag()
        x = m + torch.randn(n_draws, d, generator=generator, dtype=torch.float64) @ L.mT
        s = score_fn(x.detach()).nan_to_num(0.0, 0.0, 0.0)
        optimizer.zero_grad()
        (-(s * x).sum() / n_draws - T.diagonal().sum()).backward()
        torch.nn.utils.clip_grad_norm_([m, T], 1e3)
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        L = T.tril(-1) + T.diagonal().exp().diag()
        x = m + torch.randn(n, d, generator=generator, dtype=torch.float64) @ L.mT
    return x.numpy(), {"score_calls": n_iter * n_draws}


METHODS = {
    "defaults": by_ksivi({}),
    "pilot Gaussian": by_pilot_gaussian,
    "Laplace": by_laplace,
    "full-rank ADVI": by_advi,
    "the paper's settings": by_ksivi(PAPER),
}


#: Slow methods run once.
ONE_SEED = {"full-rank ADVI", "the paper's settings"}


def measure(X, R):
    """Return errors of draws X against reference draws R, in standard deviations."""
    if not np.isfinite(X).all():
        return {"w2": math.inf, **moments(X, R), **along_directions(X, R), "quantile": math.inf}
    u, v = whitened(X, R), whitened(R, R)
    quantiles, true = (np.quantile(draws, [0.01, 0.99], 0) for draws in (X, R))
    return {
        "w2": sliced(u, v, [(i, i) for i in range(PARTS)]),
        **moments(X, R),
        **along_directions(X, R),
        "quantile": float(np.abs((quantiles - true) / R.std(0)).max()),
    }


def floor(R):
    """Return the sliced distance between parts of the reference."""
    v = whitened(R, R)
    return sliced(v, v, [(i, j) for i in range(PARTS) for j in range(i)])


def whitened(X, R):
    """Return X in the coordinates in which R has mean zero and unit covariance."""
    return np.linalg.solve(np.linalg.cholesky(np.atleast_2d(np.cov(R.T))), (X - R.mean(0)).T).T


def sliced(u, v, pairs):
    """Return the mean over pairs (i, j) of the distance between part i of u and part j of v, of 1,000 draws each."""
    return float(np.mean([sliced_wasserstein(u[i::PARTS], v[j::PARTS], random_state=0) for i, j in pairs]))


def run(name, method, seed, methods):
    torch.set_num_threads(1)
    target, R = POSTERIORS[name].make(), reference(name)
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            X, more = methods[method](target, len(R), seed)
            failed = ""
        except (ValueError, FloatingPointError) as error:
            X, more, failed = np.full_like(R, np.nan), {}, str(error)
    seconds = time.perf_counter() - start
    warned = sorted({w.category.__name__ for w in caught})
    row = {**measure(X, R), "floor": floor(R), "seconds": seconds, "failed": failed, "warned": warned}
    return {**row, **more}


def summary(rows, name, method):
    of = [r for r in rows if r["case"] == name and r["method"] == method]
    worst = {
        "w2": np.mean([r["w2"] / r["floor"] for r in of]),
        "mean": max(r["mean"] for r in of),
        "sd_min": min(r["sd_min"] for r in of),
        "sd_max": max(r["sd_max"] for r in of),
        "quantile": max(r["quantile"] for r in of),
        "shift_along": max(r.get("shift_along", 0.0) for r in of),
        "scale_along": max(r.get("scale_along", 0.0) for r in of),
        "seconds": np.median([r["seconds"] for r in of]),
        "score_calls": np.median([r.get("score_calls", 0) for r in of]),
        "n_iter": np.median([r.get("n_iter", 0) for r in of]),
        "warned": sum(bool(r["warned"]) for r in of),
    }
    worst["accurate"] = is_accurate(worst)
    return worst


def show(rows):
    methods = list(dict.fromkeys(r["method"] for r in rows))
    names = list(dict.fromkeys(r["case"] for r in rows))
    lines = []
    for name in names:
        every = [summary(rows, name, method) for method in methods]
        a = every[0]
        own = f"{a['mean']:.3f}", f"{a['sd_min']:.2f} - {a['sd_max']:.2f}", f"{a['quantile']:.2f}"
        w2 = (f"{s['w2']:.3g}{'' if s['accurate'] else '*'}" for s in every)
        warned = "warned" if a["warned"] else ""
        lines.append((name, *own, f"{a['score_calls']:.0f}", f"{a['seconds']:.1f}", *w2, warned))
    print_table((methods[0], "mean", "sd ratio", "1%, 99%", "calls", "s", *methods, ""), lines)
    print("Columns named as methods are W2 / floor; * is not accurate. Calls are scores and products.")
    for method in methods:
        every = [summary(rows, name, method) for name in names]
        near = np.mean([a["w2"] <= 1.3 for a in every])
        print(
            f"{method:<24}accurate on {sum(a['accurate'] for a in every):>2} of {len(names)}, within 1.3 floors on "
            f"{near:>4.0%}, geometric mean of W2 / floor {np.exp(np.mean(np.log([a['w2'] for a in every]))):.3g}, "
            f"median {np.median([a['seconds'] for a in every]):.1f} s and "
            f"{np.median([a['score_calls'] for a in every]):,.0f} calls; "
            f"{sum(a['n_iter'] > 0 for a in every)} were trained"
        )
    for row in rows:
        if row["failed"]:
            print(f"{row['case']}, {row['method']}, seed {row['seed']}: {row['failed']}")


def table(rows):
    """Return the table of the manual, of the defaults."""
    lines = []
    for name in dict.fromkeys(r["case"] for r in rows):
        a = summary(rows, name, "defaults")
        calls = f"{a['score_calls'] / 1000:,.{0 if a['score_calls'] >= 10_000 else 1}f}k"
        sds, w2 = f"{a['sd_min']:.2f} - {a['sd_max']:.2f}", f"{a['w2']:.2f}{'' if a['accurate'] else '*'}"
        errors = f"{a['mean']:.2f}", sds, f"{a['quantile']:.2f}"
        lines.append((name.replace("_", " "), *errors, w2.replace("*", r"\*"), calls, f"{a['seconds']:.1f}"))
    return rst(("Posterior", "Mean", "Sd ratio", "1%, 99%", "W2 / floor", "Calls", "Seconds"), lines)


def main():
    parser = command(__doc__)
    parser.add_argument("--names", nargs="+", choices=POSTERIORS, default=list(POSTERIORS))
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--max-iter", type=int, help="of every fit, for a quick look")
    args = parser.parse_args()
    args.max_iter = args.max_iter or (50 if args.quick else None)
    quick = {} if args.max_iter is None else {"max_iter": args.max_iter}
    methods = {k: by_ksivi({**v, **quick}) for k, v in VARIANTS.items()} if args.variants else METHODS
    if quick and not args.variants:
        methods = {**METHODS, "defaults": by_ksivi(quick), "the paper's settings": by_ksivi({**PAPER, **quick})}
    methods = {m: methods[m] for m in args.methods or methods}
    if not args.show:
        for name in args.names:
            reference(name)
    jobs = [
        (name, method, seed)
        for name in args.names
        for method in methods
        for seed in range(1 if method in ONE_SEED else args.seeds)
    ]
    rows = results(args, jobs, partial(run, methods=methods), n_jobs=args.jobs, max_iter=args.max_iter)["rows"]
    show(rows)
    if args.manual:
        write_tables(args.manual, {"defaults": table(rows)})


if __name__ == "__main__":
    main()
