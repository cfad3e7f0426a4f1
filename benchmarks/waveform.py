"""The paper's settings, and the defaults, on the waveform posterior against exact reference draws.

python benchmarks/waveform.py [--data waveform.mat --reference draws.npz] [--seeds 3] [--max-iter 20000]

Without --data the packaged waveform posterior is used. With it, the training split of the file (X_train with a
column of ones, y_train); its reference draws are made by `benchmarks/reference.py mat FILE OUT.npz`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from reference import mat_target, waveform_target

from skksivi import KSIVIApproximator, paper_settings
from skksivi.baselines import Laplace
from skksivi.datasets import load_waveform_posterior
from skksivi.metrics import sliced_wasserstein

PAPER = paper_settings("waveform")
#: The paper starts sigma^2 at e^-5; its public code starts the U-statistic at e^-2.
METHODS = {
    "paper, vanilla": PAPER,
    "paper, U-statistic": PAPER | {"gradient_estimator": "u-statistic"},
    "U-statistic from e^-2": paper_settings("waveform-u-statistic"),
    "defaults": {},
}


def accuracy(X, reference):
    """Return sliced W2 (1,000 against 1,000), the largest standardised mean error and the range of sd ratios."""
    mean, sd = reference.mean(0), reference.std(0)
    ratio = X.std(0) / sd
    return {
        "sliced_w2": sliced_wasserstein(X[:1000], reference[:1000], random_state=0),
        "mean_error": float(np.abs((X.mean(0) - mean) / sd).max()),
        "sd_ratio_min": float(ratio.min()),
        "sd_ratio_max": float(ratio.max()),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--reference")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-iter", type=int, default=20_000)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    target = mat_target(args.data) if args.data else waveform_target()
    reference = np.load(args.reference)["draws"] if args.data else load_waveform_posterior()

    rows = [{"method": "noise floor", **accuracy(reference[1000:], reference)}]
    rows.append({"method": "Laplace", **accuracy(Laplace(random_state=0).fit(target).sample(10_000), reference)})
    for name in args.methods:
        parameters = {**METHODS[name], "max_iter": args.max_iter} if name != "defaults" else METHODS[name]
        for seed in range(args.seeds):
            start = time.perf_counter()
            q = KSIVIApproximator(**parameters, random_state=seed).fit(target)
            seconds = time.perf_counter() - start
            rows.append(
                {
                    "method": name,
                    "seed": seed,
                    "n_iter": q.n_iter_,
                    **accuracy(q.sample(10_000), reference),
                    "seconds": seconds,
                }
            )
            print(rows[-1], flush=True)
    print_table(rows)
    if args.out:
        args.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))


def print_table(rows):
    print(f"\n{'method':<20}{'sliced W2 (mean, sd over seeds)':>33}{'mean error':>12}{'sd ratio':>15}{'seconds':>9}")
    for name in dict.fromkeys(row["method"] for row in rows):
        of = {key: [r[key] for r in rows if r["method"] == name and key in r] for key in rows[-1]}
        w2, seconds = of["sliced_w2"], of["seconds"]
        print(
            f"{name:<20}{np.mean(w2):>24.4f} +-{np.std(w2):>6.4f}{np.max(of['mean_error']):>12.3f}"
            f"{np.min(of['sd_ratio_min']):>8.2f} -{np.max(of['sd_ratio_max']):>5.2f}"
            + (f"{np.median(seconds):>9.1f}" if seconds else f"{'-':>9}")
        )
    print("sliced W2: 1,000 draws a side; mean error in sd, sd ratio: worst coordinate of all seeds; median seconds.")


if __name__ == "__main__":
    main()
