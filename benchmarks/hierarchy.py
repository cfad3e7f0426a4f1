"""Many modes and heavy tails: rings of Gaussians, the paper's Student target, and harder ones of known law.

python benchmarks/hierarchy.py [rings student hard] [--seeds 3] [--max-iter 3000] [--quick]

Rings: the share of each mode against its weight (largest relative error), the standard deviations within modes (1 is
right), the share of draws beyond 5 from every mode, and, for modes that `skksivi.modes` has re-weighted, the largest
relative error of the weights it found. The paper's ring, the same shifted by 5 and by 10, and unequal weights.
Student: squared Wasserstein distance in the boxes [-a, a]^2, 1,000 draws against 10,000 exact ones, means over three
sets. Hard: a mixture of four Gaussians (d = 10), a banana (d = 20) and Neal's funnel (d = 10), by sliced Wasserstein
distance at 2,000 draws and the worst mean and standard deviation. Exact draws give the floor, in the same units.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skksivi import HKSIVIApproximator, KSIVIApproximator, mixing, modes, paper_settings
from skksivi.baselines import SIVI
from skksivi.kernels import Riesz
from skksivi.metrics import sliced_wasserstein, wasserstein_in_box
from skksivi.targets import EightGaussians, StudentT, Target

WEIGHTS = [0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05]
RINGS = {
    "ring": EightGaussians(),
    "shifted by 5": EightGaussians(shift=5.0),
    "shifted by 10": EightGaussians(shift=10.0),
    "unequal": EightGaussians(weights=WEIGHTS),
    "unequal, shifted by 10": EightGaussians(shift=10.0, weights=WEIGHTS),
}
#: The single layer of the paper, from N(0, I) and without whitening, trained as by default.
LAYER = (
    "whiten", "mixing", "latent_dim", "hidden_layer_sizes", "linear_skip", "initial_scale", "kernel", "bandwidth"
)  # fmt: skip
PAPER = {name: paper_settings("x-shaped")[name] for name in LAYER}
#: Of the Student target: what the tails need is a heavy-tailed mixing distribution; the start is narrow.
STUDENT = {"kernel": Riesz(), "bandwidth": "median", "whiten": "laplace", "batch_size": 500, "learning_rate": 1e-3}
STUDENT_METHODS = {
    "HKSIVI, Riesz, pilot": lambda: HKSIVIApproximator(kernel=Riesz()),
    "HKSIVI, t base": lambda: HKSIVIApproximator(mixing=mixing.StudentT(2.0), bridge="none", **STUDENT),
    "HKSIVI, normal base": lambda: HKSIVIApproximator(mixing="normal", bridge="none", **STUDENT),
    "KSIVI, Riesz, pilot": lambda: KSIVIApproximator(kernel=Riesz()),
    "KSIVI, Riesz, t mixing": lambda: KSIVIApproximator(mixing=mixing.StudentT(2.0), **STUDENT),
    "KSIVI, Riesz, normal": lambda: KSIVIApproximator(mixing="normal", **STUDENT),
    "KSIVI, Gaussian, normal": lambda: KSIVIApproximator(mixing="normal", **{**STUDENT, "kernel": "gaussian"}),
    "KSIVI, defaults": lambda: KSIVIApproximator(),
    "SIVI": lambda: SIVI(whiten=None),
}


class Mixture(Target):
    """Four Gaussians in ten dimensions, of different weights, scales and correlations."""

    n_features = 10

    def __init__(self) -> None:
        rng = np.random.RandomState(3)
        self.weights = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
        self.means = torch.as_tensor(8 * rng.normal(size=(4, 10)) / np.sqrt(10) * 2)
        self.roots = torch.linalg.cholesky(
            torch.stack(
                [torch.as_tensor((A := rng.normal(size=(10, 10))) @ A.T / 10 + 0.3 * np.eye(10)) for _ in "1234"]
            )
        )

    def log_prob(self, x: Tensor) -> Tensor:
        u = torch.linalg.solve_triangular(
            self.roots.to(x), (x.unsqueeze(-2) - self.means.to(x)).unsqueeze(-1), upper=False
        )
        heights = self.weights.log() - self.roots.diagonal(dim1=1, dim2=2).log().sum(1)
        return (heights.to(x) - u.squeeze(-1).square().sum(-1) / 2).logsumexp(-1)

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        k = torch.multinomial(self.weights, n, replacement=True, generator=generator)
        xi = torch.randn(n, 10, 1, generator=generator, dtype=torch.float64)
        return self.means[k] + (self.roots[k] @ xi).squeeze(-1)


class Banana20(Target):
    """Ten pairs, each a banana of curvature a half."""

    n_features = 20

    def log_prob(self, x: Tensor) -> Tensor:
        a, b = x[..., ::2], x[..., 1::2]
        return -(a.square() + (b - a.square() / 2).square()).sum(-1) / 2

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        a, b = torch.randn(2, n, 10, generator=generator, dtype=torch.float64)
        return torch.stack([a, b + a.square() / 2], -1).flatten(1)


class Funnel(Target):
    """Neal's funnel in the non-centred form that its own scale v gives: x_i = e^(v/2) z_i."""

    n_features = 10

    def log_prob(self, x: Tensor) -> Tensor:
        return -x[..., 0].square() / 18 - x[..., 1:].square().sum(-1) / 2

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        x = torch.randn(n, 10, generator=generator, dtype=torch.float64)
        x[:, 0] *= 3
        return x

    @staticmethod
    def centred(X: np.ndarray) -> np.ndarray:
        return np.column_stack([X[:, 0], X[:, 1:] * np.exp(X[:, :1] / 2)])


class CentredFunnel(Target):
    """Neal's funnel as it stands."""

    n_features = 10

    def log_prob(self, x: Tensor) -> Tensor:
        v = x[..., 0]
        return -v.square() / 18 - (x[..., 1:].square().sum(-1) * (-v).exp() + 9 * v) / 2


def exact(target: Target, n: int, seed: int) -> np.ndarray:
    return target.sample(n, torch.Generator().manual_seed(seed)).numpy()


def shares_of(X: np.ndarray, target: EightGaussians) -> tuple[np.ndarray, np.ndarray, float]:
    squares = ((X[:, None] - target.means.numpy()) ** 2).sum(-1)
    k = squares.argmin(1)
    sd = np.array([X[k == j].std(0) if (k == j).sum() > 10 else np.full(2, np.nan) for j in range(8)])
    return np.bincount(k, minlength=8) / len(X), sd, float((squares.min(1) > 25).mean())


def ring_row(name: str, draws: list[np.ndarray], target: EightGaussians, seconds: float) -> None:
    weights = target.weights.numpy()
    shares, sds, off = zip(*(shares_of(X, target) for X in draws), strict=True)
    present = min(int((s > 0.1 * weights).sum()) for s in shares)
    error = max(np.abs(s / weights - 1).max() for s in shares)
    ratio = max(s.max() / max(s.min(), 1e-9) for s in shares)
    print(
        f"  {name:<28}{present:>6} of 8{error:>11.1%}{min(ratio, 999):>10.2f}"
        f"{np.nanmin(sds):>9.2f} -{np.nanmax(sds):>5.2f}{max(off):>10.2%}{seconds:>9.1f}"
    )


def error_of(found: Any, target: EightGaussians) -> float:  # noqa: ANN401
    """Return the largest relative error of the weights found."""
    k = ((found.centres[:, None] - target.means.numpy()) ** 2).sum(-1).argmin(1)
    return np.abs(np.bincount(k, found.weights, minlength=8) / target.weights.numpy() - 1).max()


def rings(args: argparse.Namespace) -> None:
    methods = {
        "KSIVI, one layer of the paper": lambda: KSIVIApproximator(**PAPER),
        "SIVI": lambda: SIVI(whiten=None),
        "KSIVI, defaults": lambda: KSIVIApproximator(),
        "HKSIVI, from N(0, I)": lambda: HKSIVIApproximator(whiten=None, mixing="normal"),
        "HKSIVI, defaults": lambda: HKSIVIApproximator(),
        "  the same, re-weighted": lambda: HKSIVIApproximator(),
    }
    n = 20_000
    for title, target in list(RINGS.items())[: 1 if args.quick else None]:
        print(f"{title}\n  {'':<28}{'modes':>11}{'error':>11}{'max/min':>10}{'sd':>16}{'off':>10}{'fit, s':>9}")
        ring_row("exact draws", [exact(target, n, s) for s in range(args.seeds)], target, 0)
        for name, make in list(methods.items())[-2 if args.quick else 0 :]:
            draws, errors, start = [], [], time.perf_counter()
            for seed in range(args.seeds):
                q = make().set_params(random_state=seed, max_iter=args.max_iter).fit(target)
                if "re-weighted" in name:
                    errors.append(error_of(modes(q, target, reweight=True, random_state=seed), target))
                draws.append(q.sample(n, random_state=seed).astype(float))
            ring_row(name, draws, target, (time.perf_counter() - start) / args.seeds)
            if errors:
                print(f"  {'  the weights it found':<28}{'':>11}{max(errors):>11.1%}", flush=True)


def student(args: argparse.Namespace) -> None:
    target, edges, n_sets = StudentT(), (5, 8, 10), 1 if args.quick else 3

    def boxes(X: np.ndarray) -> np.ndarray:
        parts = [X[1000 * r : 1000 * (r + 1)] for r in range(n_sets)]
        truth = [exact(target, 1000 if args.quick else 10_000, 100 + r) for r in range(n_sets)]
        pairs = list(zip(parts, truth, strict=True))
        return np.array([np.mean([wasserstein_in_box(x, y, a) for x, y in pairs]) for a in edges])

    def row(name: str, costs: list[np.ndarray], seconds: float) -> None:
        means, sds = np.mean(costs, 0), np.std(costs, 0)
        cells = "".join(f"{m:>10.4f} +- {s:.4f}" for m, s in zip(means, sds, strict=True))
        print(f"  {name:<28}{cells}{seconds:>9.1f}")

    print(f"Student\n  {'':<28}" + "".join(f"{f'a = {a}':>20}" for a in edges) + f"{'fit, s':>9}")
    row("exact draws", [boxes(exact(target, 1000 * n_sets, s)) for s in range(args.seeds)], 0)
    for name, make in list(STUDENT_METHODS.items())[: 1 if args.quick else None]:
        costs, start = [], time.perf_counter()
        for seed in range(args.seeds):
            q = make().set_params(random_state=seed)
            if "defaults" not in name:
                q.set_params(max_iter=args.max_iter)
            costs.append(boxes(q.fit(target).sample(1000 * n_sets, random_state=seed).astype(float)))
        row(name, costs, (time.perf_counter() - start) / args.seeds)


def hard(args: argparse.Namespace) -> None:
    cases = {
        "mixture of four, d = 10": (Mixture(), Mixture(), np.asarray),
        "banana, d = 20": (Banana20(), Banana20(), np.asarray),
        "funnel, non-centred, d = 10": (Funnel(), Funnel(), Funnel.centred),
        "funnel, centred, d = 10": (CentredFunnel(), Funnel(), np.asarray),
    }
    for title, (target, truth, transform) in list(cases.items())[: 1 if args.quick else None]:
        print(f"{title}\n  {'':<28}{'sliced W2':>12}{'mean error':>12}{'sd ratio':>16}{'fit, s':>9}")
        as_truth = transform if "non-centred" in title else Funnel.centred if "funnel" in title else np.asarray
        Y = as_truth(exact(truth, 2000, 1))

        def row(name: str, X: np.ndarray, seconds: float, Y: np.ndarray = Y) -> None:
            ratio, error = X.std(0) / Y.std(0), np.abs(X.mean(0) - Y.mean(0)) / Y.std(0)
            distance = sliced_wasserstein(X, Y, random_state=0)
            spread = f"{ratio.min():>9.2f} -{ratio.max():>5.2f}"
            print(f"  {name:<28}{distance:>12.3f}{error.max():>12.2f}{spread}{seconds:>9.1f}")

        row("exact draws", as_truth(exact(truth, 2000, 2)), 0)
        for name, make in (("KSIVI, defaults", KSIVIApproximator), ("HKSIVI, defaults", HKSIVIApproximator)):
            for seed in range(args.seeds):
                start = time.perf_counter()
                q = make(random_state=seed)
                if args.quick:
                    q.set_params(max_iter=args.max_iter)
                X = q.fit(target).sample(2000, random_state=seed).astype(float)
                row(f"{name}, seed {seed}", transform(X), time.perf_counter() - start)


STUDIES = {"rings": rings, "student": student, "hard": hard}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", metavar="{rings,student,hard}", help="all by default")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-iter", type=int, default=3000)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if unknown := set(arguments.studies) - STUDIES.keys():
        parser.error(f"unknown studies: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for study in arguments.studies or STUDIES:
        STUDIES[study](arguments)
