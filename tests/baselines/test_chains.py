"""Chains: what they leave invariant, what they adapt, keep and draw, and how mixing is told."""

import math
import sys

import numpy as np
import pytest
import torch
from approximators import good_fit
from linear_family import z_scores
from members import every, refused
from misbehaving import Misbehaving, raising
from plain_targets import GaussianScore, generator, normal
from sklearn.exceptions import ConvergenceWarning, NotFittedError

from skksivi.base import LEAST_WIDTH
from skksivi.baselines import MALA, SGLD
from skksivi.baselines._chains import step_sizes
from skksivi.coordinates._lines import along_chord
from skksivi.families._samplers import Chains
from skksivi.pilot._chains import ChainState, mala_step
from skksivi.targets import Banana, BayesianLogisticRegression, Minibatches, XShaped

both = every("cls", [MALA, SGLD])


def stein_z_scores(x, s):
    """Of the identities E s = 0, E[s_i x_j] = -delta_ij and E[s_i x_i^2] = -2 E x_i."""
    products = s[:, :, None] * x[:, None]
    return torch.cat([
        z_scores(s, 0.0), z_scores(products, -torch.eye(x.shape[1])).flatten(), z_scores(s * x**2 + 2 * x, 0.0)
    ])  # fmt: skip


RATIOS = {
    "density": lambda target: lambda u, _, v, __: target.log_prob(v) - target.log_prob(u),
    "score": lambda target: lambda u, s_u, v, s_v: along_chord(target.score_fn, u, s_u, v, s_v),
}


@pytest.mark.parametrize(("target", "h", "ratio"), [(Banana(), 0.05, "density"), (XShaped(), 0.3, "score")])
def test_metropolis_leaves_the_target_invariant(target, h, ratio):
    """From exact draws, moments and Stein's identities stay those of the target; without the test they leave it."""
    log_ratio, h = RATIOS[ratio](target), torch.tensor(h, dtype=torch.float64)
    x, exact = target.sample(20_000, generator()), target.sample(20_000, generator(1))
    adjusted = unadjusted = ChainState(x, target.score_fn(x))
    g, always = generator(2), lambda u, *_: torch.full_like(u[:, 0], torch.inf)
    for _ in range(30):
        adjusted, alpha = mala_step(adjusted, target.score_fn, log_ratio, h, g)
        unadjusted, _ = mala_step(unadjusted, target.score_fn, always, h, g)
    assert 0.2 < alpha.mean() < 0.95
    u = adjusted.u
    assert (u != x).any(1).double().mean() > 0.99
    assert stein_z_scores(*adjusted).max() < 4
    assert stein_z_scores(*unadjusted).max() > 8
    gaps = (u.mean(0) - exact.mean(0)) / (u.var(0) / len(u) + exact.var(0) / len(exact)).sqrt()
    assert gaps.abs().max() < 4


def test_a_proposal_where_the_density_is_not_known_is_refused():
    state, h = ChainState(*torch.zeros(2, 50, 1).double()), torch.tensor(1.0, dtype=torch.float64)
    for ratio, slope in ((torch.nan, -1.0), (-torch.inf, -1.0), (0.0, torch.nan)):
        log_ratio = lambda u, *_, r=ratio: torch.full_like(u[:, 0], r)  # noqa: E731
        kept, alpha = mala_step(state, lambda x, a=slope: a * x, log_ratio, h, generator())
        assert not alpha.any()
        assert kept.u.equal(state.u)


@pytest.mark.slow
def test_the_step_is_adapted_to_the_acceptance():
    p = GaussianScore(10, log10_condition=2, size=3.0, seed=10)
    q = MALA(target_acceptance=0.8, n_draws=20, random_state=0).fit(p.score_fn, n_features=10)
    assert q.acceptance_rate_ == pytest.approx(0.8, abs=0.03)
    assert q.acceptance_curve_.shape == (q.n_iter_,) == (700,)
    assert q.acceptance_rate_ == pytest.approx(q.acceptance_curve_[500:].mean())


def test_a_given_step_is_not_adapted():
    q = MALA(step_size=0.123, n_warmup=10, n_draws=2, random_state=0).fit(lambda x: -x, n_features=1)
    assert q.step_size_ == 0.123


def test_a_run_that_hardly_moves_is_told():
    with pytest.warns(ConvergenceWarning, match=r"Only 0\.\d% of the steps were accepted"):
        MALA(step_size=1e6, n_warmup=0, n_draws=5, random_state=0).fit(lambda x: -x - x**3, n_features=5)


# SGLD


def test_step_sizes_fall_as_said():
    assert step_sizes(0.3)(0) == step_sizes(0.3)(10**6) == 0.3
    assert step_sizes((0.5, 10, 0.55))(90) == pytest.approx(0.5 * 100**-0.55)


@pytest.mark.slow
def test_minibatches_add_neither_noise_nor_bias():
    """Noise of variance n_rows / batch_size = 20 in u would make the variance larger by 20 eps / 4, about."""
    X = np.random.RandomState(0).normal(size=(200, 2))
    target = BayesianLogisticRegression(X, X[:, 0] > 0.5 * np.random.RandomState(1).normal(size=200))
    settings = {"n_chains": 200, "n_warmup": 100, "n_draws": 20, "step_size": 0.1, "random_state": 0}
    whole, part = (SGLD(**settings).fit(t).chains_ for t in (target, Minibatches(target, batch_size=10)))
    sd = whole.std((0, 1))
    assert (np.abs(whole.mean((0, 1)) - part.mean((0, 1))) / sd).max() < 0.1
    assert np.abs(part.std((0, 1)) / sd - 1).max() < 0.05


def test_scores_are_cut_unless_that_is_turned_off():
    """A target of sd .01 in its own units: the cut makes its tails exponential, at the rate of the longest score."""
    settings = {"whiten": None, "step_size": 1e-4, "init": np.zeros((500, 1)), "n_draws": 20, "random_state": 0}
    fits = (SGLD(max_score=longest, **settings).fit(lambda x: -1e4 * x, n_features=1) for longest in (5.0, None))
    cut, whole = (q.chains_.std() for q in fits)
    assert whole == pytest.approx(0.01 * math.sqrt(1 / (1 - 1e-4 * 1e4 / 4)), rel=0.05)
    assert cut > 10 * whole


def test_chains_that_run_away_end_the_fit():
    with pytest.raises(FloatingPointError, match="wrong sign"):
        SGLD(whiten=None, step_size=1e307, n_draws=2).fit(lambda x: x, n_features=1)


# What all chains do


@both
def test_ctrl_c_keeps_the_states_so_far(cls):
    settings = {"n_chains": 7, "n_warmup": 20, "thin": 3, "whiten": None, "random_state": 0}
    whole = cls(n_draws=30, **settings).fit(lambda x: -x, n_features=2)
    q = cls(n_draws=30, **settings)
    with pytest.raises(KeyboardInterrupt):
        q.fit(Misbehaving(raising(KeyboardInterrupt), 60, rows=7), n_features=2)  # one row a chain
    n_kept = q.chains_.shape[1]
    assert 0 < n_kept < 30
    assert n_kept == (q.n_iter_ - 20) // 3
    np.testing.assert_array_equal(q.chains_, whole.chains_[:, :n_kept])
    assert np.isfinite(q.sample(5)).all()
    if cls is MALA:
        np.testing.assert_array_equal(q.acceptance_curve_, whole.acceptance_curve_[: q.n_iter_])


@both
def test_thinning_keeps_each_kth_state(cls):
    settings = {"n_chains": 4, "n_warmup": 20, "random_state": 0}
    all_states = cls(n_draws=12, thin=1, **settings).fit(lambda x: -x, n_features=2)
    thinned = cls(n_draws=4, thin=3, **settings).fit(lambda x: -x, n_features=2)
    assert thinned.chains_.shape == (4, 4, 2)
    assert all_states.n_iter_ == thinned.n_iter_ == 32
    np.testing.assert_array_equal(thinned.chains_, all_states.chains_[:, 2::3])


@both
def test_init_is_the_first_state(cls):
    X = np.random.RandomState(0).normal(size=(6, 2))
    tiny = {"step_size": 1e-20, "n_warmup": 0, "n_draws": 1, "thin": 1, "random_state": 0}
    q = cls(init=X, whiten=(np.ones(2), np.eye(2)), **tiny).fit(lambda x: 3 - x, n_features=2)
    np.testing.assert_allclose(q.chains_[:, 0], X, atol=1e-8)


@both
def test_draws_are_states_without_replacement_while_there_are_enough(cls, monkeypatch):
    monkeypatch.setattr("skksivi.base.CHUNK", 20 * LEAST_WIDTH)
    q = cls(n_chains=10, n_warmup=0, n_draws=5, random_state=0).fit(lambda x: -x, n_features=2)
    states = q.chains_.reshape(-1, 2)
    np.testing.assert_array_equal(np.sort(q.sample(50), axis=0), np.sort(states, axis=0))
    assert {tuple(row) for row in q.sample(500)} <= {tuple(row) for row in states}
    chains = np.arange(10.0).reshape(2, 5, 1)
    drawn = Chains(chains, None).sample(50_000, generator()).numpy().ravel().astype(int)
    assert np.abs(np.bincount(drawn) - 5000).max() < 4.5 * math.sqrt(5000 * 0.9)


# Diagnostics


def test_diagnose_tells_mixed_chains_from_others():
    q = good_fit("MALA")
    mixed = q.diagnose()
    assert [*mixed] == ["r_hat", "ess_bulk", "ess_tail"]
    assert all(value.shape == (2,) for value in mixed.values())
    assert mixed["r_hat"].max() < 1.1
    q.chains_ = normal(4, 1000, 2).numpy()
    independent = q.diagnose()
    assert independent["r_hat"].max() < 1.01
    assert np.abs([independent[name] / 4000 - 1 for name in ("ess_bulk", "ess_tail")]).max() < 0.2
    q.chains_ = normal(4, 1000, 2).numpy() + 3 * np.arange(4)[:, None, None]
    assert q.diagnose()["r_hat"].min() > 1.5


@both
def test_diagnose_says_what_it_needs(cls, monkeypatch):
    with pytest.raises(NotFittedError):
        cls().diagnose()
    settings = {"n_chains": 2, "n_warmup": 0, "random_state": 0}
    q = cls(n_draws=3, **settings).fit(lambda x: -x, n_features=1)
    refused(ValueError, "needs 4 states per chain at least, got 3; raise `n_draws`", q.diagnose)
    monkeypatch.setitem(sys.modules, "arviz_stats.base", None)
    q = cls(n_draws=4, **settings).fit(lambda x: -x, n_features=1)
    refused(ImportError, "needs arviz-stats; install it", q.diagnose)
