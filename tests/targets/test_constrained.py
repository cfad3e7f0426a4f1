"""Densities of parameters with bounds: change of variables, draws, names and mistakes."""

import math
import pickle

import numpy as np
import torch
from members import every, refused
from plain_targets import normal
from torch import distributions as dist

import skksivi
from skksivi.baselines import Laplace
from skksivi.targets import constrained, from_log_prob


def moved(law, shift, scale):
    return dist.TransformedDistribution(law, dist.AffineTransform(shift, scale))


#: The density of each support, with numbers of which a member is a function.
CASES = {
    "real": ("real", dist.Normal(1.0, 2.0)),
    "positive": ("positive", dist.Gamma(3.0, 2.0)),
    "unit interval": ("unit interval", dist.Beta(2.0, 3.0)),
    "above": (("above", -2.0), moved(dist.Gamma(3.0, 2.0), -2.0, 1.0)),
    "below": (("below", 3.0), moved(dist.Gamma(3.0, 2.0), 3.0, -1.0)),
    "interval": (("interval", -1, 2), moved(dist.Beta(2.0, 3.0), -1.0, 3.0)),
    "simplex": (("simplex", 3), dist.Dirichlet(torch.tensor([2.0, 3.0, 4.0]))),
    "correlation cholesky": (("correlation cholesky", 3, 3), dist.LKJCholesky(3, 2.0)),
    "positives": (("positive", 2), dist.Independent(dist.Gamma(torch.tensor([3.0, 5.0]), 2.0), 1)),
    "matrix": (("interval", 0.0, 1.0, 2, 2), dist.Independent(dist.Beta(torch.full((2, 2), 2.0), 3.0), 2)),
    "simplices": (("simplex", 2, 3), dist.Independent(dist.Dirichlet(torch.full((2, 3), 2.0)), 1)),
}

#: Supports without a distribution in torch, with numbers that single out the free entries of a parameter.
OTHERS = {
    "ordered": ("ordered", 3), "positive ordered": ("positive ordered", 3), "ordered rows": ("ordered", 2, 3),
    "cholesky": ("cholesky", 3, 3), "cholesky of one": ("cholesky", 1, 1),
}  # fmt: skip


def made(case):
    support, law = CASES[case]
    return constrained(lambda theta: law.log_prob(theta.float()).to(theta), {"theta": support})


def free_entries(theta, d):
    """d entries of a parameter of which the others are functions: those that move, in a row."""
    entries = theta.flatten()
    if theta.dim() == 2 and d == 3 and len(entries) == 9:  # of correlations, below the diagonal
        return entries[[3, 6, 7]]
    if theta.dim() == 2 and len(entries) == d + 3:
        return theta[torch.tril_indices(3, 3).unbind()]
    if len(entries) > d:
        return theta[..., :-1].flatten()
    return entries


def log_volume(target, x):
    """The log-Jacobian of the free entries of theta at x (d,), by autograd."""

    def entries(x):
        (part,) = target._parts.values()
        return free_entries(part.value(x[None])[0], target.n_features)

    return torch.linalg.slogdet(torch.autograd.functional.jacobian(entries, x)).logabsdet


@every("case", list(CASES))
def test_the_density_is_that_of_the_change_of_variables(case):
    target, (_, law) = made(case), CASES[case]
    for x in normal(20, target.n_features):
        theta = torch.as_tensor(target.constrain(x[None])["theta"][0])
        expected = law.log_prob(theta.float()).double() + log_volume(target, x)
        torch.testing.assert_close(target.log_prob(x[None])[0], expected, rtol=1e-4, atol=1e-4)


def test_sparse_shares_are_exact():
    """The sum of the shares before the last is one to the last bit, and some are below 1e-30."""
    a = torch.tensor([0.1, 0.1, 2.1, 0.1, 0.1], dtype=torch.float64)
    target = constrained(lambda p: ((a.to(p) - 1) * p.log()).sum(1), {"p": ("simplex", 5)})
    X = 8 * normal(20, 4).numpy()
    np.testing.assert_allclose(target.unconstrain(target.constrain(X)), X, rtol=1e-9)
    q = skksivi.KSIVIApproximator(random_state=0).fit(target)
    found, law = target.constrain(q.sample(20_000))["p"], dist.Dirichlet(a)
    np.testing.assert_allclose(found.std(0), law.stddev, rtol=0.05)
    np.testing.assert_allclose(found.mean(0), law.mean, atol=0.05 * law.stddev.min().item())
    assert q.n_score_calls_ < 5000


@every("support", OTHERS)
def test_the_volume_is_that_of_autograd(support):
    target = constrained(lambda theta: theta.flatten(1).sum(1), {"theta": support})
    for x in normal(20, target.n_features):
        theta = torch.as_tensor(target.constrain(x[None])["theta"][0])
        torch.testing.assert_close(target.log_prob(x[None])[0], theta.sum() + log_volume(target, x))


@every("n", [0, 7])
@every("support", {name: case[0] for name, case in CASES.items()} | OTHERS)
def test_parameters_and_points_are_one_to_one(support, n):
    target = constrained(lambda a, theta: a, {"a": "positive", "theta": support})
    X = normal(n, target.n_features).numpy()
    values = target.constrain(X)
    assert len(target.names) == len(set(target.names)) == target.n_features
    np.testing.assert_allclose(target.unconstrain(values), X, atol=1e-6)
    if n:
        first = target.unconstrain({name: value[0] for name, value in values.items()})
        np.testing.assert_allclose(first, X[0], atol=1e-6)


def test_parameters_are_in_their_supports():
    supports = {"low": ("above", 3.0, 2), "o": ("ordered", 4), "p": ("positive ordered", 4), "L": ("cholesky", 3, 3)}
    target = constrained(lambda **values: values["low"][:, 0], supports)
    low, o, p, L = target.constrain(5 * normal(100, target.n_features).numpy()).values()
    for positive in (low - 3, np.diff(o), np.diff(p), p, np.diagonal(L, axis1=1, axis2=2)):
        assert (positive > 0).all()
    assert (np.tril(L) == L).all()


def test_coordinates_have_names_that_travel():
    target = constrained(torch.add, {"input": "unit interval", "other": ("simplex", 3)})
    assert target.names == ("logit(input)", "unconstrained(other)[0]", "unconstrained(other)[1]")
    assert pickle.loads(pickle.dumps(target)).names == target.names  # noqa: S301


def test_names_and_supports_are_saved_with_a_fit_and_forgotten_with_the_next(tmp_path):
    supports = {"sd": "positive", "b": ("above", 1.0, 2)}
    target = constrained(lambda sd, b: 3 * sd.log() - 2 * sd - (b**2).sum(1), supports)
    q = Laplace(random_state=0).fit(target)
    skksivi.save(q, tmp_path / "q")
    loaded = skksivi.load(tmp_path / "q")
    assert loaded.supports_ == supports
    assert list(loaded.feature_names_in_) == ["log(sd)", "unconstrained(b)[0]", "unconstrained(b)[1]"]
    assert list(q.fit(from_log_prob(lambda x: -(x**2).sum(1), 1, names=["a"])).feature_names_in_) == ["a"]
    assert not {"supports_", "feature_names_in_"} & vars(q.fit(torch.neg, n_features=1)).keys()


MISTAKES = [
    (lambda: constrained("f", {"a": "real"}), TypeError, "`log_prob` must be callable, got a str"),
    (lambda: constrained(torch.log, ["a"]), TypeError, "`supports` must be a dict"),
    (lambda: constrained(torch.log, {}), TypeError, "`supports` must be a dict"),
    (lambda: constrained(lambda a: a, {"b": "real"}), TypeError, "must take the names in `supports`, b"),
    (lambda: constrained(lambda a: a, {"a": "Real"}), ValueError, "'Real' for 'a', expected one of 'real', 'posit"),
    (lambda: constrained(lambda a: a, {"a": 3}), ValueError, "3 for 'a', expected one of 'real'"),
    (lambda: constrained(lambda a: a, {"a": ()}), ValueError, "for 'a', expected one of 'real'"),
    (lambda: constrained(lambda a: a, {"a": ("above", "b")}), ValueError, "1 finite, increasing bounds of 'a'"),
    (lambda: constrained(lambda a: a, {"a": "simplex"}), ValueError, r"a shape \(..., k\) for 'a'"),
    (lambda: constrained(lambda a: a, {"a": ("cholesky", 2, 3)}), ValueError, "square shape"),
    (lambda: constrained(lambda a: a, {"a": ("interval", 1)}), ValueError, "2 finite, increasing bounds of 'a'"),
    (lambda: constrained(lambda a: a, {"a": ("interval", 1, 1)}), ValueError, "2 finite, increasing bounds of 'a'"),
    (lambda: constrained(lambda a: a, {"a": ("above", math.nan)}), ValueError, "1 finite, increasing bounds"),
    (lambda: constrained(lambda a: a, {"a": ("positive", 1.5)}), TypeError, "int"),
    (lambda: constrained(lambda a: a, {"a": ("positive", 0)}), ValueError, "supports"),
    (lambda: constrained(lambda a: a, {"a": ("simplex", 1)}), ValueError, "nothing to approximate"),
    (lambda: ONE.unconstrain({"b": 1.0}), ValueError, "must have the names a; got b"),
    (lambda: ONE.unconstrain({"a": 1.5}), ValueError, "outside of its support"),
    (lambda: ONE.unconstrain({"a": [[0.5]]}), ValueError, r"shape \(1, 1\) for 'a'"),
    (lambda: constrained(torch.sum, {"input": "real"}).log_prob(normal(3, 1)), ValueError, r"shape \(\), expected"),
]
ONE = constrained(lambda a: a.log(), {"a": "unit interval"})


@every("call, error, message", MISTAKES)
def test_a_mistake_is_named(call, error, message):
    refused(error, message, call)
