"""Size and power of the goodness-of-fit test `ksd_test`.

python benchmarks/ksd_test.py [--dimensions 1 2 10 22] [--draws 200] [--quick] [--output ksd_test.png]

The target is N(0, I) in d dimensions. Size: the share of 1,000 exact samples that are rejected. Power: the share of
200 samples that are rejected at 5% when all coordinates are shifted, the length of the shift the same for each d;
when all are scaled; and when all are Student t of unit variance, by their excess kurtosis. The dashed line is the
best test of the shift there is, of one that is known but for its sign.
"""

from __future__ import annotations

import argparse
import math

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
from scipy.stats import norm

from skksivi.metrics import ksd_test

LEVEL = 0.05


def standard_score(x):
    return -x


def shifted(rng, shape, length):
    return rng.standard_normal(shape) + length / math.sqrt(shape[1])


def scaled(rng, shape, factor):
    return factor * rng.standard_normal(shape)


def heavy_tailed(rng, shape, kurtosis):
    """Draw Student t of unit variance; its excess kurtosis is 6 / (df - 4)."""
    if not kurtosis:
        return rng.standard_normal(shape)
    df = 4 + 6 / kurtosis
    return rng.standard_t(df, shape) * math.sqrt((df - 2) / df)


DEPARTURES = {
    "length of the shift": (shifted, [0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8]),
    "scale": (scaled, [0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3]),
    "excess kurtosis": (heavy_tailed, [0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0]),
}


def p_values(draw, value, d, args, n_samples):
    rng = np.random.RandomState(d)
    shape = args.draws, d
    return np.array(
        [
            ksd_test(draw(rng, shape, value), standard_score, n_bootstrap=args.bootstrap - 1, random_state=rng).pvalue
            for _ in range(n_samples)
        ]
    )


def print_size(args):
    print(f"Share of {args.samples} exact samples of {args.draws} draws rejected, +- its standard error")
    print(f"{'d':>4}" + "".join(f"{f'at {level:.0%}':>18}" for level in (0.01, LEVEL, 0.1)))
    for d in args.dimensions:
        p = p_values(shifted, 0.0, d, args, args.samples)
        shares = [(p <= level).mean() for level in (0.01, LEVEL, 0.1)]
        shown = [f"{share:.3f} +- {math.sqrt(share * (1 - share) / len(p)):.3f}" for share in shares]
        print(f"{d:>4}" + "".join(f"{s:>18}" for s in shown), flush=True)


def plot_power(ax, name, args):
    draw, values = DEPARTURES[name]
    print(f"\nPower at {LEVEL:.0%} by {name}\n{'d':>4}" + "".join(f"{v:>7.1f}" for v in values))
    for d in args.dimensions:
        p = [p_values(draw, v, d, args, args.power_samples) for v in values]
        power = np.array([(some <= LEVEL).mean() for some in p])
        print(f"{d:>4}" + "".join(f"{v:>7.2f}" for v in power), flush=True)
        error = np.sqrt(power * (1 - power) / args.power_samples)
        ax.errorbar(values, power, error, marker="o", markersize=3, capsize=2, label=f"d = {d}")
    if draw is shifted:
        x, c = np.linspace(0, values[-1], 100), norm.isf(LEVEL / 2)
        best = norm.sf(c - math.sqrt(args.draws) * x) + norm.cdf(-c - math.sqrt(args.draws) * x)
        ax.plot(x, best, "k--", linewidth=0.8, label="best possible")
    ax.axhline(LEVEL, color="0.6", linewidth=0.8)
    ax.set(xlabel=name, ylabel="share rejected", ylim=(-0.02, 1.02))
    ax.legend(fontsize=8)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dimensions", nargs="+", type=int, default=[1, 2, 10, 22])
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--power-samples", type=int, default=200)
    parser.add_argument("--bootstrap", type=int, default=500)
    parser.add_argument("--quick", action="store_true", help="10 samples each of 20 draws")
    parser.add_argument("--output", default="ksd_test.png")
    args = parser.parse_args()
    if args.quick:
        args.draws, args.samples, args.power_samples, args.bootstrap = 20, 10, 10, 100
    print_size(args)
    figure, axes = plt.subplots(1, len(DEPARTURES), figsize=(4 * len(DEPARTURES), 3.6), layout="constrained")
    for ax, name in zip(axes, DEPARTURES, strict=True):
        plot_power(ax, name, args)
    figure.savefig(args.output, dpi=110)
    print(f"\nFigure in {args.output}")


if __name__ == "__main__":
    main()
