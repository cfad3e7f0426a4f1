"""
Rows in several processes
=========================

Each process holds its rows, and all fit in step: they send each other only sums of scores, as many numbers as points
times features, whatever the number of rows. A launcher starts them, here two on this machine,

``torchrun --nproc-per-node 2 examples/two_ranks.py``,

and on several machines the same on each of them:

``torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/two_ranks.py``.

All end with the same fit. If a process dies, the others stop with an error that names it, and the next start resumes
from the checkpoint, with any number of processes.
"""

import numpy as np
import torch.distributed as dist

from skksivi import KSIVIApproximator
from skksivi.targets import BayesianLogisticRegression, Sharded

ROWS = 100_000
MAX_ITER = 500
CHECKPOINT = None  # a file that all ranks can read
# sphinx_gallery_thumbnail_path = "_static/guide/cluster.png"
# sphinx_gallery_start_ignore
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=ROWS)
parser.add_argument("--max-iter", type=int, default=MAX_ITER)
parser.add_argument("--checkpoint", default=CHECKPOINT)
args, _ = parser.parse_known_args()
ROWS = args.rows
MAX_ITER = args.max_iter
CHECKPOINT = args.checkpoint
# sphinx_gallery_end_ignore


def rows(n, first, step):
    """Return every step-th of n rows; yours come from a file of this rank."""
    rng = np.random.RandomState(0)
    X = rng.normal(size=(n, 5))
    y = rng.uniform(size=n) < 1 / (1 + np.exp(-X @ [1.0, -1.0, 0.5, 0.0, 2.0]))
    return X[first::step], y[first::step]


def main():
    dist.init_process_group("gloo")  # "nccl" where each rank has a GPU
    target = Sharded(lambda rank, n_ranks: BayesianLogisticRegression(*rows(ROWS, rank, n_ranks)))
    q = KSIVIApproximator(max_iter=MAX_ITER, checkpoint=CHECKPOINT, random_state=0).fit(target)
    if target.rank == 0:
        X = q.sample(10_000)
        print(f"{target!r}: mean {X.mean(0).round(2)}, sd {X.std(0).round(3)}")
        print(f"{target.traffic.n_messages} messages, {target.traffic.n_bytes / 1e6:.1f} MB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
