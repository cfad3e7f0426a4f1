"""Milliseconds per iteration and peak memory of training, against a plain reference step.

python benchmarks/speed.py --out speed.json      ratios on the paper's tasks, one thread
python benchmarks/speed.py --show benchmarks/speed.json --manual doc
python benchmarks/speed.py --device cuda --out speed.json      the same on a GPU, in rows of its own
python benchmarks/speed.py --memory              peak memory above the bare process, each case in its own process

Three steps are timed in turn, block by block, and the median of blocks is taken:

stand-in   written from the paper as plainly as research code is: (N, N, d) differences, (N, rows, d) products in
           the score, two network passes, a median of all pairs, Adam parameter by parameter. It stands in for the
           method authors' public code, which is not ours to ship, operation by operation: <f, f'> is a product of
           matrices but for the diffusion, the scores are closed forms, Adam and the schedule those of torch.
plain      this package's specification under automatic differentiation: `_stein.vanilla`, `score_fn`.
ours       `KSIVIApproximator`; "ours, U" with the U-statistic.

The floor is modelled: the matrix products, exponentials and normal draws of our vanilla step at the rates that large
arrays reach in the same run.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
import warnings
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from _harness import command, results, rst, show_tables
from reference import waveform_target
from torch import nn

from skksivi import KSIVIApproximator, paper_settings
from skksivi.families._layer import gaussian_layer
from skksivi.kernels import Gaussian
from skksivi.mixing import NormalDraws
from skksivi.parameters import Adam, Scale
from skksivi.stein._estimators import GRADIENT_ESTIMATORS
from skksivi.targets import Banana, ConditionedDiffusion
from skksivi.training._loop import Objective, by_autograd, minimise

# Scores as research code has them: closed forms under automatic differentiation, with products over (N, rows, d).


def naive_logistic(target):
    X, y = target._X.float(), target._y.float()

    def score_fn(beta):
        p = torch.sigmoid(X @ beta.mT)
        return y @ X - (p[:, :, None] * X[:, None]).sum(0) - target.prior_precision * beta

    return score_fn


def naive_banana(_):
    precision = torch.tensor([[1.0, -0.9], [-0.9, 1.0]]) / 0.19

    def score_fn(x):
        v = torch.stack([x[:, 0], x[:, 1] - x[:, 0] ** 2 - 1], 1) @ precision.to(x)
        return -torch.stack([v[:, 0] - 2 * x[:, 0] * v[:, 1], v[:, 1]], 1)

    return score_fn


def naive_diffusion(target):
    return target.score_fn


#: Nothing beside the estimate and Adam.
PLAIN = {"optimizer": Adam(decay=(0.9, 1000), ema=None), "terms": (), "random_state": 0}
CASES = {
    "banana": (Banana, naive_banana, paper_settings("banana") | PLAIN),
    "waveform": (waveform_target, naive_logistic, paper_settings("waveform") | PLAIN),
    **{
        f"diffusion {d}": (partial(ConditionedDiffusion, d), naive_diffusion, paper_settings("diffusion") | PLAIN)
        for d in (50, 100)
    },
}


def stand_in(target, naive, n, own, device):
    """Return a function that runs k steps of the plain reference loop."""
    target = target.to(dtype=torch.float32, device=device)
    score_fn, by_entries = naive(target), naive is naive_diffusion
    sizes = [own["latent_dim"], *own["hidden_layer_sizes"].hidden_layer_sizes, target.n_features]
    layers = [m for i, o in pairwise(sizes) for m in (nn.Linear(i, o), nn.ReLU())]
    mu = nn.Sequential(*layers[:-1]).to(device)
    log_variance = nn.Parameter(torch.full((target.n_features,), 2 * math.log(own["initial_scale"]), device=device))
    optimizer = torch.optim.Adam([*mu.parameters(), log_variance], lr=own["learning_rate"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000, 0.9)

    def draw():
        z = torch.randn(n, own["latent_dim"], device=device)
        xi = torch.randn(n, target.n_features, device=device)
        sigma = torch.exp(log_variance / 2)
        x = mu(z) + sigma * xi
        return x, score_fn(x) + xi / sigma

    def run(k):
        for _ in range(k):
            (x1, f1), (x2, f2) = draw(), draw()
            squared = (x1[:, None] - x2[None]).square().sum(-1)
            h2 = squared.flatten().median() / (2 * math.log(n + 1))
            kernel = torch.exp(-squared / (2 * h2))
            inner = (f1[:, None] * f2[None]).sum(-1) if by_entries else f1 @ f2.mT
            loss = (kernel * inner).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()

    return run


def plain(target, n, own, device):
    """Return a function that runs k steps of the specification under automatic differentiation."""
    target = target.to(dtype=torch.float32, device=device)
    generator = torch.Generator(device).manual_seed(0)
    family = gaussian_layer(
        torch.full((target.n_features,), own["initial_scale"], dtype=torch.float32, device=device),
        scale=Scale(),
        mixing=NormalDraws(own["latent_dim"]),
        hidden_layer_sizes=own["hidden_layer_sizes"].hidden_layer_sizes,
        generator=generator,
    )
    estimate, n_batches = GRADIENT_ESTIMATORS["vanilla"]

    def loss_fn():
        x, conditional = family.draw(n_batches * n, generator)
        return estimate(x, target.score_fn(x) - conditional, Gaussian())

    def run(k):
        objective, rate = Objective(by_autograd(loss_fn, family)), own["learning_rate"]
        minimise(objective, family, own["optimizer"], generator, learning_rate=rate, max_iter=k)

    return run


def ours(target, n, own, device, estimator="vanilla"):
    """Return a function that runs k steps of a warm-started fit."""
    settings = own | {"batch_size": n, "gradient_estimator": estimator, "device": device}
    q = KSIVIApproximator(**settings, warm_start=True)

    def run(k):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the start of a training is far from the target
            q.set_params(max_iter=k).fit(target)
        run.engine = q.engine_
        run.seconds = sum(stage.seconds for stage in q.stages_ if stage.name == "training")

    return run


#: Multiply-adds of the score and its product for one draw, where they count.
SCORE_WORK = {"waveform": 4 * 400 * 22}


def modelled_floor(name, d, n, own):
    """Return the milliseconds of an iteration that did only its matrix products, exponentials and normal draws.

    The rates of the three are measured here and now, on large arrays.
    """

    def rate(work, function):
        times = []
        for _ in range(9):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        return work / min(times)

    a, b = torch.randn(512, 512), torch.randn(2**17)
    multiply_adds = rate(512**3, lambda: a @ a)
    exponentials, normals = rate(len(b), b.exp), rate(len(b), lambda: torch.randn(len(b)))
    sizes = [own["latent_dim"], *own["hidden_layer_sizes"].hidden_layer_sizes, d]
    layers = [i * o for i, o in pairwise(sizes)]
    network = 2 * n * (3 * sum(layers) - layers[0])  # forward, weights, inputs; nothing is sent back into z
    kernel = 6 * n * n * d  # distances, <f, f'>, and each factor of the estimate from either side
    products = network + kernel + 2 * n * SCORE_WORK.get(name, 0)
    return 1e3 * (products / multiply_adds + n * n / exponentials + 2 * n * (sizes[0] + d) / normals)


def named(device):
    """Return the device in words, a GPU by its name."""
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def seconds_a_step(run, k, device):
    """Return the seconds of one of k steps, less what a run costs before and after its steps."""

    def seconds(k):
        start = time.perf_counter()
        run(k)
        if device == "cuda":
            torch.cuda.synchronize()
        return getattr(run, "seconds", time.perf_counter() - start)  # those of the training, where they are known

    once = seconds(1)
    return (seconds(1 + k) - once) / k


def compare(name, args):
    """Return median milliseconds of a case, the steps interleaved block by block, and the ratios of the blocks."""
    make, naive, own = CASES[name]
    target, n, device = make(), own["batch_size"], args.device
    steps = {
        "stand-in": stand_in(target, naive, n, own, device),
        "plain": plain(target, n, own, device),
        "ours": ours(target, n, own, device),
        "ours, U": ours(target, n, own, device, "u-statistic"),
    }
    k = {"stand-in": 10, "plain": 100, "ours": 400, "ours, U": 400}
    if device == "cuda":
        k = {key: 10 * steps for key, steps in k.items()}  # what records the graph is a part of them
    if args.quick:
        k = {key: max(5, steps // 5) for key, steps in k.items()}
    blocks = 1 if args.quick else args.blocks
    times = {key: [] for key in steps}
    for block in range(blocks + 1):
        for key, run in steps.items():
            t = seconds_a_step(run, k[key], device)
            if block:
                times[key].append(1e3 * t)
    ratios = {key: np.divide(times["stand-in"], times[key]) for key in ("ours", "ours, U")}
    return {
        "N": n,
        **{key: float(np.median(t)) for key, t in times.items()},
        **{f"ratio, {key}": np.percentile(ratio, [25, 50, 75]).tolist() for key, ratio in ratios.items()},
        "engine": steps["ours"].engine,
        "floor": modelled_floor(name, target.n_features, n, own) if device == "cpu" else None,
    }


def table(rows):
    """Return the table of the manual: milliseconds, and how many of our steps the stand-in's takes."""
    keys = ("stand-in", "plain", "ours", "ours, U", "floor")
    heads = [
        "Task",
        "Device",
        "N",
        "Stand-in",
        "Plain",
        "Ours",
        "Ours, U-stat.",
        "Floor",
        "Ratio",
        "Ratio, U-stat.",
        "Over plain",
    ]
    return rst(
        heads,
        [
            [r["case"], r["method"], r["N"], *(digits(r[key]) for key in keys), *ratios(r), over_plain(r)]
            for r in rows
        ],
    )


def digits(value):
    return "\\-" if value is None else f"{value:#.3g}".rstrip(".")


def ratios(row):
    """Return the cells of the median ratios and their quartiles."""
    return ["{1:.1f} ({0:.1f} - {2:.1f})".format(*row[f"ratio, {key}"]) for key in ("ours", "ours, U")]


def over_plain(row):
    return f"{row['plain'] / row['ours']:.1f}"


# Memory: each case in a process of its own, its peak above that of the bare process.

MEMORY_CASES = [
    *(("ours", n, d) for n, d in ((500, 100), (2000, 100), (5000, 100), (20_000, 100), (256, 10_000))),
    *(("stand-in", n, 100) for n in (500, 1000, 2000)),
]


def peak_megabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def memory_of(kind, n, d):
    """Print the peak memory of three steps above that of the process before them."""
    own = CASES["diffusion 100"][2]
    target = ConditionedDiffusion(d)
    run = stand_in(target, naive_diffusion, n, own, "cpu") if kind == "stand-in" else ours(target, n, own, "cpu")
    before = peak_megabytes()
    run(3)
    print(json.dumps({"kind": kind, "N": n, "d": d, "before_MB": before, "extra_MB": peak_megabytes() - before}))


def memory():
    for kind, n, d in MEMORY_CASES:
        alone = [sys.executable, __file__, "--memory-of", kind, str(n), str(d)]
        r = json.loads(subprocess.run(alone, capture_output=True, text=True, check=True).stdout)
        print(
            f"{kind:<10}N={n:<7}d={d:<7}{r['extra_MB']:>9.0f} MB above the {r['before_MB']:.0f} MB before", flush=True
        )


def main():
    parser = command(__doc__, seeds=1, cases=CASES)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--memory-of", nargs=3, metavar=("KIND", "N", "D"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.memory_of:
        kind, n, d = args.memory_of
        memory_of(kind, int(n), int(d))
    elif args.memory:
        memory()
    else:
        jobs = [(name, named(args.device), 0) for name in args.cases]
        rows = results(args, jobs, lambda name, *_: compare(name, args))["rows"]
        show_tables(args, {"speed": table(rows)})


if __name__ == "__main__":
    main()
