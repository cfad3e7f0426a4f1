"""Targets over several processes: sums are those of one, faults are told by rank, fits go on with other numbers."""

import os
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from plain_targets import normal, resolved
from ranks import POINTS

from skksivi import KSIVIApproximator
from skksivi.estimators._checkpoint import fingerprint
from skksivi.estimators._start import known
from skksivi.targets import BayesianMultinomialRegression, Minibatches, Sharded
from skksivi.targets._sharded import FIRST, HEAD

WHOLE = ranks.regression(0, 1)


@pytest.fixture
def group():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def close(actual, expected):
    torch.testing.assert_close(torch.as_tensor(actual), expected, rtol=1e-10, atol=1e-10)


# One process


def test_a_rank_alone_has_the_target_that_it_holds(group):
    target = Sharded(ranks.regression)
    assert torch.equal(target.score_fn(POINTS), WHOLE.score_fn(POINTS))
    assert torch.equal(target.log_prob(POINTS), WHOLE.log_prob(POINTS))
    s, pull = target.score_vjp(POINTS)
    close(s, WHOLE.score_fn(POINTS))
    close(pull(POINTS), WHOLE.score_vjp(POINTS)[1](POINTS))
    assert (target.rank, target.n_ranks, target.names) == (0, 1, None)
    assert target.traffic.n_calls == target.traffic.n_messages == 4
    assert target.traffic.n_bytes == 4 * 8 * FIRST
    x = normal(FIRST, 3)
    assert torch.equal(target.to(dtype=torch.float32).score_fn(x.float()), WHOLE.score_fn(x.float()))
    assert target.traffic.n_messages == 6
    assert target.traffic.n_bytes == 8 * (5 * FIRST + x.numel() - (FIRST - HEAD))


def test_the_prior_of_a_target_is_that_of_no_rows():
    multinomial = BayesianMultinomialRegression(ranks.X, np.arange(len(ranks.X)) % 3, prior_precision=1.0)
    for target in (WHOLE, multinomial):
        x, prior = normal(7, target.n_features), target.subset(torch.zeros(0, dtype=torch.long))
        s, pull = prior.score_vjp(x)
        close(prior.log_prob(x), -x.square().sum(-1) / 2)
        for of_prior in (prior.score_fn(x), s, pull(x)):
            close(of_prior, -x)


def test_a_process_without_a_group_is_told_to_make_one():
    with pytest.raises(ValueError, match=r"`group` is missing: .* torchrun, and call torch.distributed.init_process"):
        Sharded(WHOLE)


def test_a_checkpoint_knows_a_sum_over_ranks_by_six_digits(group):
    score = resolved(Sharded(WHOLE))
    alone = resolved(WHOLE)
    s = normal(50, 3) * 10.0 ** torch.arange(-20, 30)[:, None]
    s[3, 1], s[4, 0] = torch.nan, torch.inf
    rounded, kept = torch.as_tensor(known(s, score)), s.isfinite()
    np.testing.assert_array_equal(known(s, alone), s)
    np.testing.assert_array_equal(rounded, known(s * (1 + 2.0**-52), score))
    largest = s.where(kept, 0).abs().amax(1, keepdim=True).expand_as(s)
    assert ((rounded - s).abs()[kept] <= 2.0**-20 * largest[kept]).all()
    assert torch.equal(rounded.isfinite(), kept)
    est = KSIVIApproximator(mixing="normal", max_iter=5)._resolved()
    assert fingerprint(est, score, 0) != fingerprint(est, alone, 0)


def test_minibatches_of_a_rank_alone_are_those_that_it_holds(group):
    target, alone = Sharded(ranks.minibatches), ranks.minibatches(0, 1)
    assert (target.n_rows, target.batch_size) == (240, 30)
    assert target.log_prob is None
    draws = [torch.Generator().manual_seed(0) for _ in range(2)]
    assert torch.equal(target.minibatch(draws[0]).score_fn(POINTS), alone.minibatch(draws[1]).score_fn(POINTS))
    assert torch.equal(target.part(50).score_fn(POINTS), alone.part(50).score_fn(POINTS))
    assert Sharded(ranks.regression).minibatch is None
    assert target.rewind is None
    streams = Sharded(ranks.stream), ranks.stream(0, 1)
    for stream in streams:
        stream.rewind(3)
    assert torch.equal(*(stream.minibatch(torch.Generator()).score_fn(POINTS) for stream in streams))
    with pytest.raises(TypeError, match="is a Sharded, whose rows lie elsewhere; give `Sharded` a function"):
        Minibatches(target, batch_size=10)


# Several


def launch(n, task, folder):
    """Run tasks of `ranks` in n processes; return their exit statuses."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        common = {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    common |= {"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ranks.__file__, task, str(folder)]
    environments = [os.environ | common | {"RANK": str(k)} for k in range(n)]
    processes = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for env in environments]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    statuses = [process.returncode for process in processes]
    assert all(status in (0, -signal.SIGKILL) for status in statuses), "\n".join(errors)
    return statuses


def left(folder, n):
    """Return what n ranks have left, which must be the same of all."""
    first, *others = [dict(np.load(folder / f"{k} of {n}.npz")) for k in range(n)]
    for other in others:
        np.testing.assert_equal(other, first)
    return first


needs_gloo = pytest.mark.skipif(sys.platform == "win32", reason="needs gloo on the loopback address")


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """The folder in which two ranks have left what they found, and what went wrong on purpose."""
    folder = tmp_path_factory.mktemp("ranks")
    assert launch(2, "fit,faults", folder) == [0, 0]
    return folder


@pytest.mark.slow
@needs_gloo
def test_two_ranks_are_as_one(group, of_two):
    ranks.fit(of_two)
    one, two = (left(of_two, n) for n in (1, 2))
    for name, numbers in one.items():
        if "own draws" in name:  # each rank has minibatches of its own
            off = (two[name].mean(0) - one["draws"].mean(0)) / one["draws"].std(0)
            assert np.abs(off).max() < 0.15, name
        else:
            np.testing.assert_allclose(two[name], numbers, rtol=1e-9, atol=1e-9, err_msg=name)
    score, product = WHOLE.score_fn(POINTS), WHOLE.score_vjp(POINTS)[1](POINTS.flip(0))
    exact = {
        "score": score,
        "score by class": score,
        "plain score": score,
        "product": product,
        "plain product": product,
    }
    exact |= {"score of many": WHOLE.score_fn(ranks.MANY), "log_prob": WHOLE.log_prob(POINTS)}
    for name, numbers in exact.items():
        close(one[name], numbers)
    n_calls, n_messages, n_bytes = two["traffic"]
    assert n_calls <= n_messages <= 2 * n_calls
    assert n_bytes <= 8 * (FIRST * n_messages + ranks.D * 5 * len(ranks.MANY))


FAULTS = {
    "features": "ValueError: `target_of_rows` of rank 1 has n_features = 2, but rank 0 has 3; all must have",
    "prior": "ValueError: `target_of_rows` of rank 1 has prior = [2.0, 1.25,",
    "kind": "ValueError: `target_of_rows` makes another kind of target on rank",
    "empty": "Found array with 0 sample(s) (shape=(0, 3))",
    "no rows": "ValueError: The target has no rows; use fewer ranks or shards.",
    "no prior": "TypeError: `prior` of LogisticDensity is not known (AttributeError: 'LogisticDensity' object has no",
    "no target": "TypeError: `target_of_rows` returned a NoneType, expected a target.",
    "batches": "ValueError: `target_of_rows` of rank 1 has batch_size = 31, but rank 0 has 30; all must have",
    "version": "ValueError: `target_of_rows` of rank 1 has version of skksivi = '0.1', but rank 0 has '0.0'",
    "settings": "ConnectionError: The 2 ranks are out of step: they evaluate the score at different points. Give all",
    "seed": "ConnectionError: The 2 ranks are out of step: they evaluate the score at different points. Give all of",
    "raises": "OSError: no rows there Raised on rank 1 of 2.",
    "rejects": "nothing",  # all ranks halve the points in step
}


@pytest.mark.slow
@needs_gloo
def test_faults_are_told_on_all_ranks(of_two):
    for rank in range(2):
        lines = (of_two / f"{rank}.txt").read_text().splitlines()
        told = dict(line.split("| ", 1) for line in lines)
        assert told.keys() == FAULTS.keys()
        for name, message in FAULTS.items():
            assert message in told[name], (rank, name)
    assert "`target_of_rows` has failed on rank 1. ValueError: Found array" in (of_two / "0.txt").read_text()


@pytest.mark.slow
@needs_gloo
def test_a_killed_rank_is_named_and_another_number_of_ranks_goes_on(group, tmp_path):
    assert launch(2, "kill", tmp_path) == [0, -signal.SIGKILL]
    message, n_iter, is_finite = (tmp_path / "0.txt").read_text().split("\n")
    assert message.startswith("ConnectionError: Rank 0 of 2 has lost rank 1: a process has ended or does not answer")
    assert 10 <= int(n_iter) < ranks.EST.max_iter
    assert is_finite == "True"
    ranks.resume(tmp_path)
    whole, resumed = ranks.fitted(WHOLE), left(tmp_path, 1)
    assert resumed["had_file"]
    assert whole.n_iter_ == resumed["n_iter"] == ranks.EST.max_iter
    np.testing.assert_allclose(resumed["draws"], whole.sample(50, random_state=0), rtol=1e-9, atol=1e-9)
    assert not (tmp_path / "fit.ckpt").exists()
