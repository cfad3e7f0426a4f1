"""Scores that are remembered: served exactly, whatever a kill, another process or another target does to the file."""

import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_targets import normal_array
from sklearn.base import clone

from skksivi import KSIVIApproximator
from skksivi.score import autograd_pullback
from skksivi.targets import Banana, from_log_prob, from_score_fn, remembered


class Counted:
    """A score of tensors or arrays that counts its points and may stop."""

    def __init__(self, most=10**9):
        self.n, self.most = 0, most

    def __call__(self, x):
        self.n += len(x)
        if self.n > self.most:
            raise KeyboardInterrupt
        return -x - 0.1 * (torch.sin(x) if isinstance(x, torch.Tensor) else np.sin(x))


@given(rows=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=9), min_size=1, max_size=6))
def test_each_point_is_evaluated_once_and_served_exactly(rows):
    f = Counted()
    target, X = remembered(from_score_fn(f, 3)), normal_array(5, 3)
    for some in rows:
        for x in (X[some], torch.as_tensor(X[some]), torch.as_tensor(X[some]).requires_grad_()):
            found = target.score_fn(x)
            assert type(found) is type(x)
            np.testing.assert_array_equal(torch.as_tensor(found).detach(), f(X[some]))
            f.n -= len(some)
    assert f.n == 2 * len({i for some in rows for i in some})  # of arrays and of tensors


def test_products_are_those_of_the_target():
    target, x, v = Banana(), torch.as_tensor(normal_array(7, 2)), torch.as_tensor(normal_array(7, 2, seed=1))
    kept = remembered(target)
    for _ in range(2):
        for a, b in zip(*(autograd_pullback(t.score_fn, x) for t in (target, kept)), strict=True):
            torch.testing.assert_close(*(f(v) if callable(f) else f for f in (a, b)), rtol=0, atol=0)
        torch.testing.assert_close(kept.log_prob(x), target.log_prob(x), rtol=0, atol=0)
    assert kept.up_to_constant == target.up_to_constant
    assert kept.n_features == 2


def test_a_fit_that_was_stopped_is_repeated_bit_for_bit_without_a_call_twice(tmp_path):
    """A checkpoint remembers what comes after the checks."""
    q, whole = KSIVIApproximator(random_state=0), Counted()
    first = clone(q).fit(from_score_fn(whole, 3)).sample(9)
    for checkpoint, n_saved in ((None, 1500), (tmp_path / "fit", 1000)):
        q.set_params(checkpoint=checkpoint)
        counted = Counted()
        stopped, rest = (from_score_fn(f, 3) for f in (Counted(2500), counted))
        if checkpoint is None:
            stopped, rest = (remembered(target, tmp_path / "scores") for target in (stopped, rest))
        with pytest.raises(KeyboardInterrupt):
            q.fit(stopped)
        np.testing.assert_array_equal(q.fit(rest).sample(9), first)
        assert counted.n < whole.n - n_saved
    assert [path.name for path in tmp_path.iterdir()] == ["scores"]
    again = remembered(from_score_fn(Counted(30), 3), tmp_path / "scores")  # but for products at trial points
    KSIVIApproximator(random_state=0).fit(pickle.loads(pickle.dumps(again)))  # noqa: S301


def test_a_file_is_cut_where_a_kill_has_left_it_and_shared(tmp_path):
    path, X = tmp_path / "scores", normal_array(6, 3)
    one, other = (remembered(from_score_fn(f, 3), path) for f in (Counted(), Counted(2)))
    one.score_fn(X[:4])
    size = path.stat().st_size
    other.score_fn(X[4:])  # takes what the first has added
    other.score_fn(X)
    path.write_bytes(path.read_bytes()[:-5])
    f = Counted()
    remembered(from_score_fn(f, 3), path).score_fn(X)
    assert f.n == 3  # one of them to see that the file is of this target
    content = bytearray(path.read_bytes())
    content[size - 3] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is damaged at byte \d+; remove it"):
        remembered(from_score_fn(f, 3), path)


def test_what_is_no_file_of_the_target_is_refused(tmp_path):
    path = tmp_path / "scores"
    remembered(from_score_fn(Counted(), 3), path)
    other = from_log_prob(lambda x: -x.square().sum(1), 3)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}' holds the scores of another target"):
        remembered(other, path)
    data, of_data = [1.0], from_score_fn(lambda X: data[0] - X, 3)
    remembered(of_data, tmp_path / "data").score_fn(np.zeros((1, 3)))
    data[0] = 5.0
    with pytest.raises(ValueError, match=r"at x = \[0, 0, 0\] the score is \[1, 1, 1\] there, \[5, 5, 5\] now"):
        remembered(of_data, tmp_path / "data")
    path.write_text("a note of somebody")
    with pytest.raises(ValueError, match="holds no remembered scores; name another file"):
        remembered(other, path)
    with pytest.raises(TypeError, match="`target` must be a Target or its score function, got a int"):
        remembered(3)
