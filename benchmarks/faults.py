"""What happens when things go wrong: each fault of a list provoked many times and counted.

python benchmarks/faults.py [--quick] [--faults NAME ...]   a table: fault, tried, told, right, wrong
python benchmarks/faults.py --quality [--faults]            and what numpy and detached scores cost: KL and time

Told: an error or a warning that names the cause. Right: the result is right all the same, of interrupted and of
simultaneous fits bit for bit. What is neither is wrong, and described on stderr. The random choices are those
of fixed seeds; the moments of kills and signals are those of the clock.

The second table fits the banana and the X by the defaults and by settings like the paper's with 5,000 iterations,
from four kinds of the same score, and once from a detached one with the check of its graph taken out.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import os
import pickle
import random
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from posteriors import POSTERIORS
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from toys import PAPER, exact

import skksivi
from skksivi import HKSIVIApproximator, KSIVIApproximator, datasets
from skksivi.baselines import Laplace
from skksivi.datasets._uci import RECIPES
from skksivi.kernels import KERNELS
from skksivi.metrics import kl_divergence
from skksivi.score import _probe
from skksivi.targets import Banana, XShaped, from_score_fn

TOLD, RIGHT = "told", "right"

#: A batch size that no other call of the score has, so that a score can count iterations.
ODD = 23
SMALL = {"whiten": None, "batch_size": ODD, "max_iter": 30, "hidden_layer_sizes": (8,), "random_state": 0}
SHORT = KSIVIApproximator(**SMALL)
EVERY = [SHORT, HKSIVIApproximator(**SMALL, n_layers=2), Laplace(random_state=0)]

#: Fits of about a second, from the pilot to the end.
PILOTED = {"whiten_budget": 20_000, "batch_size": ODD, "max_iter": 300, "random_state": 3}
KILLED = [KSIVIApproximator(**PILOTED), HKSIVIApproximator(**PILOTED, n_layers=2, hidden_layer_sizes=(8,))]


class FailureError(Exception):
    """What a score raises here."""


def normal_score(x):
    return 1 - x


def of_float64(target):
    """Return the score of a target that takes points of any type, and its dimension."""
    score_fn = target.to(dtype=torch.float64).score_fn
    return (lambda x: score_fn(x.double()).to(x)), target.n_features


def attempt(act, *arguments, **named):
    """Return the result of a call, or the error that it raised, and the texts of errors and warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = act(*arguments, **named)
        except Exception as error:
            return error, [f"{type(error).__name__}: {error}", *(str(w.message) for w in caught)]
    return result, [str(w.message) for w in caught]


def tells(act, *words):
    """Tell whether a call raises or warns in one of these words."""
    result, texts = attempt(act)
    found = any(word in text for word in words for text in texts)
    return TOLD if found else f"gave {result!r:.60}, said {texts!r:.200}"


def verdict(is_right, description):
    return RIGHT if is_right else description


def is_normal(q, d):
    """Tell whether draws have the mean and standard deviation of N(1, I), of which q is a fit."""
    X = q.sample(4000, random_state=0).astype(float)
    return X.shape == (4000, d) and np.abs(X.mean(0) - 1).max() < 0.15 and np.abs(X.std(0) - 1).max() < 0.15


def equal(q, other):
    """Tell whether two fits are the same, bit for bit."""
    draws = [a.sample(50, random_state=0) for a in (q, other)]
    return np.array_equal(*draws) and np.array_equal(q.loss_curve_, other.loss_curve_, equal_nan=True)


def in_process(act, *arguments):
    """Return what a call gives in a process of its own."""
    with PROCESSES.Pool(1) as pool:
        return pool.apply(act, arguments)


PROCESSES = multiprocessing.get_context("forkserver")


# Scores that are wrong

RESULTS = {
    "(n,)": lambda x: -x.sum(1),
    "(n, 1, d)": lambda x: -x[:, None],
    "(n, d, 1)": lambda x: -x[..., None],
    "(n, d + 1)": lambda x: -torch.cat([x, x[:, :1]], 1),
    "(n - 1, d)": lambda x: -x[1:],
    "(d, n)": lambda x: -x.mT,
    "a scalar": lambda x: -x.sum(),
    "(n,) of an array": lambda x: -np.linalg.norm(np.asarray(x.detach()), axis=1),
    "nothing": lambda _: None,
    "a pair": lambda x: (x.sum(), -x),
    "a list": lambda x: (-x).tolist(),
    "complex": lambda x: -x * 1j,
    "integers": lambda x: -x.long(),
    "truth values": lambda x: x > 0,
    "strings": lambda x: np.full(tuple(x.shape), "a"),
    "objects": lambda x: np.full(tuple(x.shape), None),
    "its input, changed": lambda x: x.neg_(),
}

TYPES = {
    "float16": lambda x: 1 - x.half(),
    "bfloat16": lambda x: 1 - x.bfloat16(),
    "float64": lambda x: 1 - x.double(),
    "float32": lambda x: 1 - x.float(),
    "array": lambda x: 1 - np.asarray(x.detach()),
    "float32 array": lambda x: 1 - np.asarray(x.detach()).astype(np.float32),
    "float16 array": lambda x: 1 - np.asarray(x.detach()).astype(np.float16),
    "array of an array": lambda X: np.subtract(np.ones(1), X, dtype=float),
    "detached": lambda x: 1 - x.detach(),
    "masked array": lambda x: np.ma.masked_invalid(1 - np.asarray(x.detach())),
}


def wrong_results(share):
    for q in EVERY:
        for score_fn in RESULTS.values():
            for d in (1, 2, 3, 7)[:: 1 if share == 1 else 3]:
                yield tells(partial(clone(q).fit, score_fn, n_features=d), "`score_fn`")


def other_types(share):
    for q in (clone(SHORT).set_params(whiten="laplace"), Laplace(random_state=0)):
        for name, score_fn in TYPES.items():
            for d in (1, 2, 3)[: 3 if share == 1 else 1]:
                fitted, texts = attempt(clone(q).fit, score_fn, n_features=d)
                yield verdict(not texts and is_normal(fitted, d), f"{name}: {texts}")


def other_devices(_share):
    """Where there is a GPU: data of the score, or what it returns, on the other device."""
    if not torch.cuda.is_available():
        return
    data = torch.ones(3)
    for device in ("cpu", "cuda"):
        for score_fn in (lambda x: data - x.cpu(), lambda x: data.cuda() - x.cuda(), lambda x: data - x):
            q = clone(SHORT).set_params(whiten="laplace", device=device)
            fitted, texts = attempt(q.fit, score_fn, n_features=3)
            yield TOLD if "Raised by `score_fn`" in str(texts) else verdict(is_normal(fitted, 3), str(texts))


def some_posteriors(share):
    names = list(POSTERIORS)[:: 1 if share == 1 else 8]
    return [(name, *of_float64(POSTERIORS[name].make())) for name in names]


def last_output_detached(score_fn):
    def partly(x):
        s = score_fn(x)
        return torch.cat([s[:, :-1], s[:, -1:].detach()], 1)

    return partly


def last_input_detached(score_fn):
    return lambda x: score_fn(torch.cat([x[:, :-1], x[:, -1:].detach()], 1))


def under_parameters(score_fn):
    one = torch.nn.Parameter(torch.ones(()))
    return lambda x: one.to(x) * score_fn(x.detach())


def detached(score_fn):
    return lambda x: score_fn(x.detach())


HOLES = [last_output_detached, last_input_detached, under_parameters, detached]
ONE_STEP = clone(SHORT).set_params(max_iter=1, batch_size=4)


def holes(share):
    """A graph with a hole: refused by name if autograd is insisted on, else the fit is that by differences."""
    insisting, judging, forced = (
        clone(ONE_STEP).set_params(hvp=hvp, dtype="float64", max_iter=3)
        for hvp in ("autograd", "auto", "finite-difference")
    )
    for name, score_fn, d in some_posteriors(share):
        for hole in HOLES:
            yield tells(partial(clone(insisting).fit, hole(score_fn), n_features=d), "`hvp`")
            fits = [attempt(clone(q).fit, hole(score_fn), n_features=d) for q in (judging, forced)]
            (a, texts), (b, other) = fits
            if isinstance(b, Exception):  # of the score itself, at N(0, I)
                yield verdict(texts == other, f"{name}: {texts} in the place of {other}")
            else:
                yield verdict(equal(a, b), f"{name}, {hole.__name__}: not the fit by differences")


ALARMS = ("`hvp`", "points away from the origin", "not symmetric", "other values")


def right_scores(share):
    """No score of a density is told to be something else."""
    for name, score_fn, d in some_posteriors(share):
        for hvp in ("autograd", "finite-difference"):
            texts = attempt(clone(ONE_STEP).set_params(hvp=hvp).fit, score_fn, n_features=d)[1]
            false = [text for text in texts if any(word in text for word in ALARMS)]
            yield verdict(not false, f"{name}: {false}")


def minus(score_fn):
    return lambda x: -score_fn(x)


def wrong_signs(share):
    """Told by the check before the training, or by a fit with default settings."""
    for name, score_fn, d in some_posteriors(share):
        for q in (ONE_STEP, KSIVIApproximator(max_iter=50, random_state=0)):
            outcome = tells(partial(clone(q).fit, minus(score_fn), n_features=d), "wrong sign")
            if outcome == TOLD:
                break
        yield outcome if outcome == TOLD else f"{name} {outcome}"


def asymmetric_scores(share):
    """Linear fields with an antisymmetric part of 5% to 100% of the curvature, and without."""
    rng = np.random.RandomState(0)
    for _ in times(60, share):
        d, size = rng.randint(2, 21), 10 ** rng.uniform(-2, 2)
        root = size * (np.eye(d) + np.tril(rng.normal(size=(d, d)), -1) / d)
        precision = np.linalg.inv(root @ root.T)
        scale = np.sqrt(np.diag(precision))
        twist = np.triu(rng.uniform(0.05, 1, (d, d)), 1) * np.outer(scale, scale)
        for part in (twist - twist.T, 0):
            A = torch.as_tensor(precision + part)
            words = attempt(clone(ONE_STEP).fit, lambda x, A=A: -x @ A.to(x).mT, n_features=d)[1]
            found = any("not symmetric" in text for text in words)
            expected = not np.isscalar(part)
            yield (TOLD if found else RIGHT) if found == expected else f"d = {d}, told: {found}"


# Numbers that are not finite, and what ends a fit


class Ending:
    """The score of N(1, I), which does `act` in one iteration of the training, told by its number of points."""

    def __init__(self, iteration, act):
        self.left = iteration
        self.act = act

    def __call__(self, x):
        self.left -= len(x) == ODD
        return self.act(normal_score(x)) if self.left == -1 and len(x) == ODD else normal_score(x)


def spoil(value, rows):
    return lambda s: s.index_fill(0, torch.as_tensor(rows), value)


def raising(error):
    def act(_):
        raise error

    return act


def spoilt_iterations(share):
    """One iteration's score not finite in some rows: raised, or skipped and told, with the same finite draws."""
    rng = np.random.RandomState(0)
    for _ in times(40, share):
        k, value = rng.randint(30), rng.choice([np.nan, np.inf, -np.inf])
        act = spoil(float(value), rng.choice(ODD, rng.randint(1, ODD), replace=False))
        whiten = [None, "laplace"][rng.randint(2)]
        fits = [clone(SHORT).set_params(nonfinite=rule, whiten=whiten) for rule in ("raise", "skip")]
        texts = [attempt(q.fit, Ending(k, act), n_features=2)[1] for q in fits]
        finite = all(np.isfinite(q.sample(100)).all() for q in fits)
        named = f"at iteration {k}:" in texts[0][0] and "1 of 30 iterations were skipped" in str(texts[1])
        yield TOLD if named and finite and equal(*fits) else f"iteration {k}: {texts}"


def spoilt_region(share):
    """A score without a value in a part of space: told, finite draws kept."""
    rng = np.random.RandomState(0)
    for _ in times(20, share):
        bound, value, rule = rng.uniform(0, 3), rng.choice([np.nan, np.inf]), ["raise", "skip"][rng.randint(2)]

        def score_fn(x, bound=bound, value=value):
            return torch.where(x[:, :1] > bound, float(value), normal_score(x))

        q = clone(SHORT).set_params(nonfinite=rule)
        texts = attempt(q.fit, score_fn, n_features=2)[1]
        words = ("not finite", "were skipped", "not being finite")
        named = any(word in text for word in words for text in texts)
        yield TOLD if named and np.isfinite(q.sample(100)).all() else f"x_1 > {bound:.2f}, {rule}: {texts}"


def nan_derivatives(_share):
    """A finite score whose automatic derivative is NaN, everywhere or in a part: told, or done by differences."""

    def everywhere(x):
        return torch.where(x.abs() < 1e3, 4 * (1 - x), x * torch.sqrt(x - 1e6))

    def outside(x):
        r = x.norm(dim=1, keepdim=True)
        return 4 * (1 - x) + torch.where(r < 1.5, 0, 0 * torch.sqrt(r - 1.5))

    for score_fn in (everywhere, outside):
        for whiten in (None, "laplace", "auto"):
            q = KSIVIApproximator(whiten=whiten, max_iter=1000, random_state=0)
            fitted, texts = attempt(q.fit, score_fn, n_features=2)
            if any(word in text for word in ("derivative", "Jacobian", "iterations were skipped") for text in texts):
                yield TOLD
                continue
            sd = np.inf if isinstance(fitted, Exception) else fitted.sample(4000).std(0)
            yield verdict(np.abs(sd - 0.5).max() < 0.1, f"whiten={whiten}, {score_fn.__name__}: sd {sd}, {texts}")


def interrupts(share):
    """Ctrl-C in a random iteration gives the fit of fewer iterations."""
    rng = np.random.RandomState(0)
    q = clone(SHORT).set_params(learning_rate_decay=None)
    for _ in times(30, share):
        k = rng.randint(1, 30)
        interrupted = clone(q)
        try:
            interrupted.fit(Ending(k, raising(KeyboardInterrupt)), n_features=2)
        except KeyboardInterrupt:
            shorter = clone(q).set_params(max_iter=k).fit(normal_score, n_features=2)
            yield verdict(equal(interrupted, shorter), f"iteration {k}: not a shorter fit")
        else:
            yield f"iteration {k}: swallowed"


def signals(share):
    """Ctrl-C at a random moment: unfitted before the training, then a fit of so many iterations, by one."""
    rng = np.random.RandomState(0)
    q = clone(SHORT).set_params(whiten="laplace", max_iter=400, learning_rate_decay=None)
    start = time.perf_counter()
    whole = clone(q).fit(normal_score, n_features=2)
    seconds = time.perf_counter() - start
    for _ in times(30, share):
        interrupted, score_fn = clone(q), Ending(1000, None)
        try:
            with alarm(rng.uniform(0, seconds)):
                interrupted.fit(score_fn, n_features=2)
        except KeyboardInterrupt:
            yield consistent(interrupted, 1000 - score_fn.left, q)
        else:
            yield verdict(equal(interrupted, whole), "another fit, without an interrupt")


class alarm:  # noqa: N801
    """Raise KeyboardInterrupt in so many seconds, wherever the program is then."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __enter__(self):
        self.before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)


def consistent(q, n_calls, settings):
    """Judge a fit that was interrupted after so many calls for a batch."""
    if not hasattr(q, "n_features_in_"):
        return verdict(n_calls == 0, f"unfitted after {n_calls} iterations")
    n = q.n_iter_
    shorter = [clone(settings).set_params(max_iter=k).fit(normal_score, n_features=2) for k in {max(n, 1), n + 1}]
    X = q.sample(50, random_state=0)
    same = any(np.array_equal(X, other.sample(50, random_state=0)) for other in shorter)
    is_right = n_calls - n in (0, 1) and (same or n == 0)
    return verdict(is_right, f"{n} iterations of {n_calls}, as a shorter fit: {same}")


class Counting:
    """The score of N(1, I), which raises at one of its calls."""

    def __init__(self, call=-1, error=FailureError):
        self.n_calls = 0
        self.call = call
        self.error = error

    def __call__(self, x):
        self.n_calls += 1
        if self.n_calls - 1 == self.call:
            raise self.error("on fire")
        return normal_score(x)


def exceptions(share):
    """An error at a random call, the first and the last among them: it is raised, and a whole fit is left."""
    rng = np.random.RandomState(0)
    for q in EVERY:
        whole = clone(q).fit(counting := Counting(), n_features=2)
        n, earlier = counting.n_calls, clone(q).fit(lambda x: -x, n_features=3)
        fits = [fit.sample(50, random_state=0) for fit in (earlier, whole)]
        for call in [*range(n)[:5], *range(n)[-5:], *(rng.randint(n) for _ in times(20, share))]:
            error = [FailureError, OSError, MemoryError, RuntimeError, ZeroDivisionError][call % 5]
            refitted = copy.deepcopy(earlier)
            result, texts = attempt(refitted.fit, Counting(call, error), n_features=2)
            if result is refitted:  # another way to call it was tried, with success
                yield verdict(refitted.sample(4).shape == (4, 2), f"call {call} of {n}: no fit")
                continue
            X, others = attempt(refitted.sample, 50, random_state=0)
            kept = not others and any(np.array_equal(X, Y) for Y in fits)
            yield TOLD if kept and "on fire" in texts[0] else f"call {call} of {n}: {texts}, then {others}"


def late_warnings(_share):
    """A warning at the end that is made an error: what was trained is kept, or its checkpoint."""
    for q in EVERY[:2]:
        for every in (10, 1000):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "fit.ckpt"
                fitted = clone(q).set_params(checkpoint=path, checkpoint_every=every)
                raised = error_of_warning(fitted, lambda x: -x / x.new_tensor([1.0, 1e-3]) ** 2)
                kept = hasattr(fitted, "n_features_in_") or path.exists()
                yield verdict(kept and raised, f"{type(q).__name__}: no fit, no checkpoint after the last iteration")


def error_of_warning(q, score_fn):
    """Fit with warnings made errors; tell whether an error was raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            q.fit(score_fn, n_features=2)
        except (UserWarning, FloatingPointError):
            return True
    return False


def bad_starts(share):
    """No whitening and scales that are off by 30 to 10,000: told that the draws are too narrow or wide."""
    rng = np.random.RandomState(0)
    for _ in times(30, share):
        d, scale = rng.randint(1, 6), 10 ** (rng.choice([-1, 1]) * rng.uniform(1.5, 4))
        q = clone(SHORT)
        texts = attempt(q.fit, lambda x, scale=scale: -x / scale**2, n_features=d)[1]
        named = any("The draws are too" in text or "not finite" in text for text in texts)
        finite = np.isfinite(q.sample(100)).all()
        yield TOLD if named and finite else f"scale {scale:.2g} in {d} dimensions: {texts}"


# Kills and files


def train(q, path, begun):
    """Fit with a checkpoint, in a process that will be killed."""
    torch.set_num_threads(1)
    begun.set()
    q.set_params(checkpoint=path).fit(Banana())


def started(q, path):
    begun = PROCESSES.Event()
    process = PROCESSES.Process(target=train, args=(clone(q), path, begun))
    process.start()
    begun.wait()
    return process


def kills(share):
    """SIGKILL at a random moment, half of them in a run that writes all the time; then the same call."""
    rng = np.random.RandomState(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fit.ckpt"
        for q in KILLED:
            whole = clone(q).fit(Banana())
            for every in (2, 50):
                process, start = started(q.set_params(checkpoint_every=every), path), time.perf_counter()
                process.join()
                seconds = time.perf_counter() - start
                for _ in times(10, share):
                    process = started(q, path)
                    time.sleep(rng.uniform(0, seconds))
                    process.kill()
                    process.join()
                    name = "a checkpoint" if path.exists() else "the start"
                    resumed = clone(q).set_params(checkpoint=path).fit(Banana())
                    yield verdict(equal(resumed, whole), f"{type(q).__name__} from {name}: another fit")


class Bomb:
    """A pickle that makes a folder when it is opened."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def damaged(content, rng, n, bomb):
    """Yield names and contents: n cut at random, n with a flipped bit, n with bytes put over, and some others."""
    for _ in range(n):
        yield "cut", content[: rng.randint(len(content))]
    for _ in range(n):
        flipped = bytearray(content)
        flipped[rng.randint(len(content))] ^= 1 << rng.randint(8)
        yield "a bit flipped", bytes(flipped)
    for _ in range(n):
        i, length = rng.randint(len(content)), rng.randint(1, 64)
        yield "bytes put over", content[:i] + rng.bytes(length) + content[i + length :]
    yield "a pickle", pickle.dumps(bomb)
    yield "a pickle of torch", content[:0] + torch_pickle(bomb)
    yield "empty", b""
    yield "noise", rng.bytes(1000)
    yield "a header of 2^62 bytes", (2**62).to_bytes(8, "little") + content[8:]
    yield "of another version", content.replace(b'"format":"1"', b'"format":"9"', 1)


def torch_pickle(value):
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"settings": value}, Path(folder) / "p")
        return (Path(folder) / "p").read_bytes()


def damaged_saves(share):
    """Each damaged file of `save` is refused by its name, and nothing in it is run."""
    rng = np.random.RandomState(0)
    with tempfile.TemporaryDirectory() as folder:
        path, bomb = Path(folder) / "q.safetensors", Bomb(Path(folder) / "bomb")
        for q in (clone(SHORT), Laplace(random_state=0)):
            skksivi.save(q.fit(normal_score, n_features=2), path)
            for name, content in damaged(path.read_bytes(), rng, len(times(200, share)), bomb):
                if content != path.read_bytes():
                    other = path.with_name("damaged")
                    other.write_bytes(content)
                    told = tells(partial(skksivi.load, other), f"ValueError: {str(other)!r}")
                    yield told if not bomb.path.exists() else f"{name}: was run"


def left_behind(path, **parameters):
    """Leave the checkpoint of a fit that was ended; return what it holds."""
    q = clone(SHORT).set_params(checkpoint=path, checkpoint_every=10, **parameters)
    attempt(q.fit, Ending(25, raising(FailureError)), n_features=2)
    return path.read_bytes()


def damaged_checkpoints(share):
    """Each damaged checkpoint is refused by its name, or does not matter; nothing in it is run."""
    rng = np.random.RandomState(0)
    whole = clone(SHORT).fit(normal_score, n_features=2)
    with tempfile.TemporaryDirectory() as folder:
        path, bomb = Path(folder) / "fit.ckpt", Bomb(Path(folder) / "bomb")
        content = left_behind(path)
        cases = list(damaged(content, rng, len(times(100, share)), bomb))
        path.unlink()
        skksivi.save(whole, path)
        cases.append(("a file of save", path.read_bytes()))
        for name, changed in cases:
            path.write_bytes(changed)
            resumed, texts = attempt(clone(SHORT).set_params(checkpoint=path).fit, normal_score, n_features=2)
            if bomb.path.exists():
                yield f"{name}: was run"
            elif isinstance(resumed, Exception):
                yield TOLD if "ValueError: `checkpoint`" in texts[0] else f"{name}: {texts[0]}"
            else:
                yield verdict(equal(resumed, whole), f"{name}: another fit, nothing told")


def other_settings(_share):
    """A checkpoint of another fit is refused by the name of the parameter."""
    others = {"learning_rate": 0.5, "max_iter": 31, "kernel": "imq", "batch_size": 24, "dtype": "float64"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fit.ckpt"
        left_behind(path)
        for name, value in others.items():
            q = clone(SHORT).set_params(checkpoint=path, **{name: value})
            yield tells(partial(q.fit, normal_score, n_features=2), f"belongs to a fit with {name}")
        q = clone(SHORT).set_params(checkpoint=path)
        yield tells(partial(clone(q).fit, minus(normal_score), n_features=2), "score_fn at")
        yield tells(partial(clone(q).fit, normal_score, n_features=3), "n_features")


# Threads, processes, sizes

KINDS = [
    normal_score,
    lambda x: 1 - np.asarray(x.detach()),
    lambda x: 1 - x.detach(),
    lambda X: np.subtract(1, X, dtype=float),
]


def threads(share):
    """Four fits in four threads equal the same in sequence, new and from checkpoints."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(4) as pool:
        path = Path(folder)
        content = left_behind(path / "left")
        for i in times(20, share):
            fits = [clone(SHORT).set_params(random_state=4 * i + k, whiten="laplace") for k in range(4)]
            jobs = [pool.submit(clone(q).fit, f, n_features=2) for q, f in zip(fits, KINDS, strict=True)]
            threaded = [job.result() for job in jobs]
            for q, f, other in zip(fits, KINDS, threaded, strict=True):
                yield verdict(equal(q.fit(f, n_features=2), other), "a fit in a thread differs")
        whole = clone(SHORT).fit(normal_score, n_features=2)
        for _ in times(20, share):
            paths = [path / str(k) for k in range(4)]
            for one in paths:
                one.write_bytes(content)
            resume = [clone(SHORT).set_params(checkpoint=one).fit for one in paths]
            for job in [pool.submit(attempt_quietly, fit, normal_score) for fit in resume]:
                resumed = job.result()
                yield verdict(isinstance(resumed, KSIVIApproximator) and equal(resumed, whole), f"{resumed!r:.200}")


def attempt_quietly(fit, score_fn):
    try:
        return fit(score_fn, n_features=2)
    except Exception as error:
        return error


def processes(share):
    """A search gives the same with one process and with two."""
    grid = {"random_state": list(range(4)), "kernel": ["gaussian", "imq"][: 2 if share == 1 else 1]}
    cv, target = [(np.arange(1), np.arange(1))], from_score_fn(normal_score, 2)
    q = clone(SHORT).set_params(whiten="laplace")
    scores = [
        GridSearchCV(q, grid, cv=cv, n_jobs=n, refit=False).fit(target).cv_results_["mean_test_score"] for n in (1, 2)
    ]
    for one, other in zip(*scores, strict=True):
        yield verdict(one == other and np.isfinite(one), f"{one} with one process, {other} with two")


def half_precision(_share):
    """Kernels and their median widths of half-precision points are those of the same points in double."""
    for name, make in KERNELS.items():
        for dtype in (torch.float16, torch.bfloat16):
            for size in (1e-2, 1.0, 300.0):  # 300 squared is beyond float16
                x = (size * torch.randn(40, 5, generator=torch.Generator().manual_seed(0))).to(dtype)
                k = [make()(y).double() for y in (x, x.double())]
                yield verdict(torch.allclose(*k, rtol=1e-4, atol=1e-4 * k[1].abs().max()), f"{name}, {dtype}, {size}")


def one_dimension(share):
    for kernel in KERNELS:
        for whiten in (None, "laplace", "bam", "auto")[: 4 if share == 1 else 2]:
            q = KSIVIApproximator(kernel=kernel, whiten=whiten, max_iter=500, whiten_budget=20_000, random_state=0)
            yield verdict(is_normal(q.fit(normal_score, n_features=1), 1), f"{kernel}, {whiten}")


def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def memory_of_fit(parameters, d):
    """Return the memory that a fit takes beyond that of a small one, in MB, and whether its losses are finite."""
    torch.set_num_threads(1)
    KSIVIApproximator(max_iter=2).fit(normal_score, n_features=2)
    before = peak_mb()
    q = KSIVIApproximator(**parameters, random_state=0)
    attempt(q.fit, normal_score, n_features=d)
    return peak_mb() - before, np.isfinite(q.loss_curve_).all()


def memory_of_draws(n, d):
    """Return the memory that draws take beyond their own, in MB, and whether they are fine."""
    torch.set_num_threads(1)
    q = attempt(KSIVIApproximator(whiten=None, max_iter=2).fit, normal_score, n_features=d)[0]
    before = peak_mb()
    X = q.sample(n)
    return peak_mb() - before - X.nbytes / 1e6, X.shape == (n, d) and np.isfinite(X).all()


def sizes(share):
    """Memory below half a matrix of all pairs of draws, one of pairs of coordinates, and 1 GB beside the draws."""
    n, d = (20_000, 10_000) if share == 1 else (10_000, 5000)
    one_step = {"whiten": None, "max_iter": 2, "batch_size": n}
    cases = [
        (n * n * 4 / 2e6, memory_of_fit, one_step, 20),
        (n * n * 4 / 2e6, memory_of_fit, {**one_step, "gradient_estimator": "vanilla"}, 20),
        (d * d * 8 / 1e6, memory_of_fit, {"max_iter": 5}, d),
        (1000, memory_of_draws, 10_000_000 if share == 1 else 1_000_000, 1),
        (1000, memory_of_draws, 1000, d),
    ]
    for limit, act, *arguments in cases:
        extra, fine = in_process(act, *arguments)
        yield verdict(fine and extra < limit, f"{arguments}: {extra:.0f} MB of {limit:.0f}, finite: {fine}")


def wrong_numbers_of_draws(_share):
    for q in [clone(q).fit(normal_score, n_features=2) for q in EVERY]:
        for n in (-1, -(10**9), 2.5, np.nan, np.inf, "3", None, [3], np.array([3, 4])):
            yield tells(partial(q.sample, n), "n_samples")
        for n in (0, 1, np.int64(3), 1001):
            yield verdict(q.sample(n).shape == (n, 2), f"{n} draws")
        yield tells(clone(q).sample, "not fitted")


def downloads(_share):
    """No file, a wrong file in its place, no connection: told, with the name of the file to put there."""
    rng = np.random.RandomState(0)
    for name, recipe in RECIPES.items():
        file = recipe.originals[0]
        nowhere = replace(recipe, urls=tuple(f"http://127.0.0.1:9/{file}" for _ in recipe.urls))
        with tempfile.TemporaryDirectory() as home, mock.patch.dict(RECIPES, {name: nowhere}):
            fetch = partial(getattr(datasets, f"fetch_{name}"), data_home=home)
            yield tells(partial(fetch, download_if_missing=False), f"Put {file!r}")
            yield tells(partial(fetch, n_retries=1, delay=0.0), "could not be downloaded")
            for content in (b"", b"1,2,3\n" * 500, pickle.dumps([1.0] * 5000), rng.bytes(9999)):
                (Path(home) / file).write_bytes(content)
                yield tells(partial(fetch, download_if_missing=False), "does not hold")


def global_state():
    """Return what no call of the package may change."""
    return {
        "generator of torch": torch.get_rng_state().numpy().tobytes(),
        "generator of numpy": repr(np.random.get_state()),
        "generator of Python": random.getstate(),
        "threads of torch": torch.get_num_threads(),
        "default type": torch.get_default_dtype(),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        "determinism": torch.are_deterministic_algorithms_enabled(),
        "globals that torch may load": set(torch.serialization.get_safe_globals()),
        "errors of numpy": np.geterr(),
        "handler of Ctrl-C": signal.getsignal(signal.SIGINT),
        "environment": os.environ.copy(),
        "filters of warnings": list(warnings.filters),
    }


FAULTS = {
    "score of a wrong shape or kind": wrong_results,
    "score of another type, arrays": other_types,
    "score on another device": other_devices,
    "score detached, in full or part": holes,
    "right score: false alarms": right_scores,
    "score with the sign flipped": wrong_signs,
    "score that is no gradient": asymmetric_scores,
    "NaN, infinity in an iteration": spoilt_iterations,
    "NaN, infinity in a region": spoilt_region,
    "NaN in the derivative only": nan_derivatives,
    "scale of the start off": bad_starts,
    "Ctrl-C in an iteration": interrupts,
    "Ctrl-C at any moment": signals,
    "exception at any call": exceptions,
    "warning made an error": late_warnings,
    "SIGKILL at any moment": kills,
    "checkpoint of other settings": other_settings,
    "checkpoint damaged": damaged_checkpoints,
    "saved file damaged": damaged_saves,
    "four fits in four threads": threads,
    "one and two processes": processes,
    "points in half precision": half_precision,
    "one dimension": one_dimension,
    "many dimensions, many draws": sizes,
    "sample(n) of a wrong n": wrong_numbers_of_draws,
    "no data, no connection": downloads,
}


def times(n, share):
    return range(max(2, round(n * share)))


def count(names, share):
    """Print the table, and on stderr what went wrong."""
    changes = Counter()
    print_row("Fault", "Tried", "Told", "Right", "Wrong")
    for name in names:
        before, outcomes = global_state(), Counter()
        for outcome in FAULTS[name](share):
            after = global_state()
            changed = [part for part in before if before[part] != after[part]]
            changes[bool(changed)] += 1
            outcomes[outcome if outcome in (TOLD, RIGHT) else "wrong"] += 1
            for wrong in [outcome] * (outcome not in (TOLD, RIGHT)) + changed:
                print(f"{name}: {wrong}", file=sys.stderr, flush=True)
        print_row(name, outcomes.total(), *(outcomes[kind] for kind in (TOLD, RIGHT, "wrong")))
    print_row("global state after each", changes.total(), 0, changes[False], changes[True])


def print_row(name, *numbers):
    print(f"{name:<33}" + "".join(f"{n:>7}" for n in numbers), flush=True)


# What a score without a graph costs


def banana_of_arrays(X):
    v1, v2 = X[:, 0], X[:, 1] - X[:, 0] ** 2 - 1
    g1, g2 = (0.9 * v2 - v1) / 0.19, (0.9 * v1 - v2) / 0.19
    return np.column_stack([g1 - 2 * v1 * g2, g2])


PRECISION = np.linalg.inv([[2.0, 1.8], [1.8, 2.0]])


def x_shaped_of_arrays(X):
    scores = [-X @ PRECISION, -X @ (PRECISION * [[1, -1], [-1, 1]])]
    logits = [(s * X).sum(1) / 2 for s in scores]
    share = 1 / (1 + np.exp(logits[1] - logits[0]))[:, None]
    return share * scores[0] + (1 - share) * scores[1]


def unguarded():
    """Leave the products to autograd, whatever the check finds, as an implementation without the check does."""
    check = _probe.choose_product

    def blind(score, *arguments):
        score, asymmetry = check(score, *arguments)
        return replace(score, by_differences=False), asymmetry

    return mock.patch.object(_probe, "choose_product", blind)


def scores_of(target, of_arrays):
    own = {"own product": target} if target.score_vjp is not None else {}
    detached = {"detached": lambda x: target.score_fn(x.detach())}
    return own | {"autograd": target.score_fn, "numpy": of_arrays} | detached


def quality(seeds, max_iter, n_draws):
    """Print KL(q || p) and the time, in units of that of autograd, of each kind of score."""
    print(f"\n{'Target, settings':<21}{'Score':<23}{'KL, mean +- sd':>19}{'Floor':>8}{'Time':>7}{'Told':>6}")
    like_paper = {**PAPER, "max_iter": max_iter}
    for target, of_arrays in ((Banana(), banana_of_arrays), (XShaped(), x_shaped_of_arrays)):
        truth = exact(target, n_draws, 0)
        floor = kl_divergence(exact(target, n_draws, 1), truth)
        start = {"initial_scale": 0.5} if isinstance(target, Banana) else {}
        for settings, parameters in (("defaults", {}), ("like the paper's", {**like_paper, **start})):
            if max_iter < 2000:  # a quick run
                parameters = {"whiten_budget": 20_000, **parameters, "max_iter": max_iter}
            scores = scores_of(target, of_arrays)
            if parameters.get("whiten", "auto") is None:
                scores["detached, unguarded"] = scores["detached"]
            runs = {name: [] for name in scores}
            for seed in range(seeds):
                for name, score_fn in scores.items():
                    runs[name].append(run(score_fn, parameters, seed, truth, blind="unguarded" in name))
            for name, results in runs.items():
                kl, seconds, told = zip(*results, strict=True)
                ratio = np.median(np.divide(seconds, [r[1] for r in runs["autograd"]]))
                label = f"{type(target).__name__}, {settings}"
                spread = f"{np.mean(kl):.3f} +- {np.std(kl):.3f}"
                print(f"{label:<26}{name:<21}{spread:>16}{floor:>8.3f}{ratio:>7.2f}{sum(told):>6}", flush=True)


def run(score_fn, parameters, seed, truth, *, blind):
    """Return the KL to exact draws, the seconds of the fit, and whether a warning was given."""
    q, start = KSIVIApproximator(**parameters, random_state=seed), time.process_time()
    with unguarded() if blind else mock.patch.dict({}):
        fitted, texts = attempt(q.fit, score_fn, **({} if hasattr(score_fn, "n_features") else {"n_features": 2}))
    seconds = time.process_time() - start
    return kl_divergence(fitted.sample(len(truth)), truth), seconds, bool(texts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=list(FAULTS), metavar="NAME")
    parser.add_argument("--quality", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.faults:
        clone(SHORT).fit(normal_score, n_features=2)  # what torch imports late brings filters of warnings
        count(args.faults, 0.05 if args.quick else 1)
    if args.quality:
        quality(1 if args.quick else args.seeds, 50 if args.quick else 5000, 2000 if args.quick else 100_000)


if __name__ == "__main__":
    main()
