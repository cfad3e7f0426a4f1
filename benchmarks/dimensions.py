"""What whitening costs and finds as the dimension grows.

python benchmarks/dimensions.py [--dimensions 100 300 1000 3000 10000]

The target is a Gaussian of d coordinates on scales from 1e-2 to 1e2, tied together by ten common factors of standard
deviations 2 to 15, its mean ten units off the origin. Shown for the fit before any training: seconds, points at which
the score was evaluated, the range of the ratios of standard deviations of coordinates and of factors, and the seconds
of a training iteration. The floor is the same range for as many exact draws.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from skksivi import KSIVIApproximator
from skksivi.targets import Target

N_DRAWS, N_ITER = 4000, 300


class FactorModel(Target):
    """N(mean, S (I + W diag(lam) W^T) S) with orthonormal W (d, k)."""

    def __init__(self, d, k=10, seed=0):
        rng = np.random.RandomState(seed)
        self.n_features = d
        self.mean = torch.tensor(10 * rng.standard_normal(d))
        self.S = torch.tensor(10 ** rng.uniform(-2, 2, d))
        self.W = torch.linalg.qr(torch.tensor(rng.standard_normal((d, k)))).Q
        self.lam = torch.linspace(2, 15, k, dtype=torch.float64).square()

    def score_fn(self, x):
        v = (x - self.mean) / self.S
        return -(v - (v @ self.W * (self.lam / (1 + self.lam))) @ self.W.mT) / self.S

    def sample(self, n, generator):
        options = {"generator": generator, "dtype": torch.float64}
        common = torch.randn(n, len(self.lam), **options) * self.lam.sqrt()
        return self.mean + self.S * (torch.randn(n, self.n_features, **options) + common @ self.W.mT)

    def ratios(self, X):
        """Return the standard deviations of coordinates and of factors over the true ones."""
        v = (torch.as_tensor(X, dtype=torch.float64) - self.mean) / self.S
        return v.std(0) / (1 + self.W.square() @ self.lam).sqrt(), (v @ self.W).std(0) / (1 + self.lam).sqrt()


def timed(function, *arguments):
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dimensions", nargs="+", type=int, default=[100, 300, 1000, 3000, 10_000])
    args = parser.parse_args()
    print(f"{'d':>6}{'s':>8}{'calls':>9}{'coordinates':>16}{'floor':>14}{'factors':>14}{'floor':>14}{'ms / it':>9}")
    for d in args.dimensions:
        target = FactorModel(d)
        q = KSIVIApproximator(max_iter=1, random_state=0)
        seconds = timed(q.fit, target)
        exact = target.sample(N_DRAWS, torch.Generator().manual_seed(0))
        ranges = [
            r for pair in zip(target.ratios(q.sample(N_DRAWS)), target.ratios(exact), strict=True) for r in pair
        ]
        q.set_params(warm_start=True)
        short, long = (timed(q.set_params(max_iter=k).fit, target) for k in (1, 1 + N_ITER))
        shown = "".join(f"{r.min():>9.2f}-{r.max():.2f}" for r in ranges)
        print(
            f"{d:>6}{seconds:>8.1f}{q.whitening_.n_score_calls:>9}  {shown}{1e3 * (long - short) / N_ITER:>9.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
