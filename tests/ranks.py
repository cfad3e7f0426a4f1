"""What a rank does in the tests of targets over several processes: python ranks.py task,task folder."""

import datetime
import os
import signal
import sys
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from plain_targets import LogisticDensity, own
from sklearn.base import clone

from skksivi import KSIVIApproximator, diagnose
from skksivi.parameters import Checkpoint
from skksivi.targets import BayesianLogisticRegression, Minibatches, Sharded, from_log_prob, from_score_fn

N, D = 240, 3
X = np.random.RandomState(0).normal(size=(N, D)) * [1.0, 0.5, 2.0]
Y = np.random.RandomState(1).uniform(size=N) < 1 / (1 + np.exp(-X @ [1.0, -1.0, 0.3]))
POINTS = torch.randn(20, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
MANY = torch.randn(5000, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
PRIOR = from_log_prob(lambda x: -x.square().sum(-1) / 2, D)
EST = KSIVIApproximator(
    method="path", whiten="laplace", mixing="normal", max_iter=40, batch_size=50, dtype="float64",
    hidden_layer_sizes=(8,), random_state=0,
)  # fmt: skip


def regression(rank, n_ranks, prior_precision=1.0):
    return BayesianLogisticRegression(X[rank::n_ranks], Y[rank::n_ranks], prior_precision=prior_precision)


def minibatches(rank, n_ranks):
    return Minibatches(regression(rank, n_ranks), batch_size=30)


def stream(rank, n_ranks):
    rows = np.arange(rank, N, n_ranks)
    batches = [(X[part], Y[part]) for part in np.split(rows, range(30, len(rows), 30))]
    return Minibatches.from_loader(batches, lambda batch: BayesianLogisticRegression(*batch, prior_precision=1.0))


def by_class(rank, n_ranks):
    """Of two ranks one lacks a class."""
    rows = np.array_split(np.argsort(Y), n_ranks)[rank]
    return BayesianLogisticRegression(X[rows], Y[rows], prior_precision=1.0)


def plain(rank, n_ranks):
    return LogisticDensity(X[rank::n_ranks], Y[rank::n_ranks])


def arrays(rank, n_ranks):
    A, y = X[rank::n_ranks], Y[rank::n_ranks]

    def score_fn(x):
        assert isinstance(x, np.ndarray)
        return (y - 1 / (1 + np.exp(-x @ A.T))) @ A - x

    return from_score_fn(score_fn, D)


def minus(x):
    return -x


def fitted(target, **parameters):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return clone(EST).set_params(**parameters).fit(target)


def found(target):
    """Return numbers of a target, and of a fit to it."""
    s, pull = target.score_vjp(POINTS)
    q = fitted(target)
    return {
        "score": target.score_fn(POINTS),
        "score of many": target.score_fn(MANY),
        "score with product": s,
        "product": pull(POINTS.flip(0)),
        "log_prob": target.log_prob(POINTS),
        "draws": q.sample(1000, random_state=0),
        "grade": q.score(target),
        "certificate": q.certificate_.divergence,
        "n_score_calls": q.n_score_calls_,
        "diagnosis": [check.value for check in diagnose(q, target, random_state=0).checks],
    }


def of_plain(target):
    """Return the scores and products of a target without a product of its own."""
    x = POINTS.clone().requires_grad_()
    s = target.score_fn(x)
    (product,) = torch.autograd.grad(s, x, POINTS.flip(0))
    return {"plain score": s.detach(), "plain product": product, "plain log_prob": target.log_prob(POINTS)}


def fit(folder):
    target = Sharded(regression)
    numbers = found(target) | of_plain(Sharded(plain, prior=PRIOR))
    numbers["score by class"] = Sharded(by_class).score_fn(POINTS)
    by_arrays = Sharded(arrays, prior=from_score_fn(minus, D))
    numbers["draws by arrays"] = fitted(by_arrays, max_iter=20).sample(5, random_state=0)
    for name, target_of_rows in {"minibatches": minibatches, "stream": stream}.items():
        parts = Sharded(target_of_rows)
        numbers[f"{name}: score"] = parts.score_fn(POINTS)
        numbers[f"{name}: own draws"] = fitted(parts, max_iter=20).sample(1000, random_state=0)
    numbers["traffic"] = [target.traffic.n_calls, target.traffic.n_messages, target.traffic.n_bytes]
    np.savez(folder / f"{target.rank} of {target.n_ranks}.npz", **numbers)


def raised(act):
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', []))}"
    return "nothing"


def fails_late(error, rank, n_ranks):
    """A target that raises on the last rank where it is asked for many points."""

    def score_fn(x):
        if rank == n_ranks - 1 and len(x) > 30:
            raise error
        return regression(rank, n_ranks).score_fn(x)

    return own(D, score_fn=score_fn)


def faults(folder):
    rank = dist.get_rank()

    def failing(error):
        return Sharded(partial(fails_late, error), prior=from_score_fn(minus, D))

    def other_version():
        with mock.patch("skksivi.targets._sharded.__version__", f"0.{rank}"):
            Sharded(regression)

    no_rows = own(D)
    no_rows.n_rows = 0
    acts = {
        "features": lambda: Sharded(lambda k, n: BayesianLogisticRegression(X[:, : 3 - k], Y)),
        "prior": lambda: Sharded(lambda k, n: regression(k, n, 1.0 + k)),
        "kind": lambda: Sharded(lambda k, n: regression(k, n) if k else plain(k, n), prior=PRIOR),
        "empty": lambda: Sharded(lambda k, n: BayesianLogisticRegression(X[: N * (1 - k)], Y[: N * (1 - k)])),
        "no rows": lambda: Sharded(lambda k, n: regression(k, n) if k else no_rows),
        "no prior": lambda: Sharded(plain),
        "no target": lambda: Sharded(lambda k, n: None),
        "batches": lambda: Sharded(lambda k, n: Minibatches(regression(k, n), batch_size=30 + k)),
        "version": other_version,
        "settings": lambda: fitted(Sharded(regression), max_iter=20 + rank),
        "seed": lambda: fitted(Sharded(regression), random_state=rank, max_iter=20),
        "raises": lambda: fitted(failing(OSError("no rows there")), random_state=0),
        "rejects": lambda: fitted(failing(ArithmeticError("no score there")), random_state=0),
    }
    (folder / f"{rank}.txt").write_text("\n".join(f"{name}| {raised(act)}" for name, act in acts.items()))


class Dying(BayesianLogisticRegression):
    """Ends its process at a score of the training, if it has only so many left."""

    n_left = 0

    def score_fn(self, x):
        if len(x) == EST.batch_size:
            Dying.n_left -= 1
            if Dying.n_left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().score_fn(x)

    score_vjp = BayesianLogisticRegression.score_vjp


def kill(folder):
    target = Sharded(lambda rank, n: Dying(X[rank::n], Y[rank::n], prior_precision=1.0))
    Dying.n_left = 30 if target.rank == 1 else 0
    q = clone(EST).set_params(checkpoint=Checkpoint(folder / "fit.ckpt", every=10))
    message = raised(lambda: q.fit(target))
    (folder / f"{target.rank}.txt").write_text(f"{message}\n{q.n_iter_}\n{np.isfinite(q.sample(9)).all()}")


def resume(folder):
    target = Sharded(regression)
    had_file = (folder / "fit.ckpt").exists()
    q = fitted(target, checkpoint=Checkpoint(folder / "fit.ckpt", every=10))
    draws = q.sample(50, random_state=0)
    np.savez(folder / f"{target.rank} of {target.n_ranks}.npz", draws=draws, had_file=had_file, n_iter=q.n_iter_)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    for task in sys.argv[1].split(","):
        {"fit": fit, "faults": faults, "kill": kill}[task](Path(sys.argv[2]))
    if sys.argv[1] != "kill":
        dist.destroy_process_group()
