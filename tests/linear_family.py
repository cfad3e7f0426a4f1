"""Semi-implicit families that are Gaussian, and what is known of them."""

import math

import torch
from plain_targets import generator, normal

from skksivi.baselines._critics import Critics
from skksivi.families._layer import gaussian_layer
from skksivi.mixing import NormalDraws
from skksivi.parameters import Scale
from skksivi.score._probe import in_double
from skksivi.training._loop import Scheduled, flatten


def layer(mixing, d=2, sizes=(8,), *, sigma=0.7, scale=Scale(floor=0.1), skip=None):  # noqa: B008
    """A semi-implicit family of d features with one initial scale."""
    return gaussian_layer(
        torch.full((d,), sigma, dtype=torch.float64), scale=scale, mixing=mixing, hidden_layer_sizes=sizes,
        generator=generator(), skip=skip,
    )  # fmt: skip


class LinearFamily:
    """The family of mu(z) = A z + b and one sigma, which is N(b, A A^T + sigma^2 I), ready for training."""

    def __init__(self, d=2, latent_dim=2, sigma=0.7):
        skip = torch.eye(d, latent_dim)
        self.family = layer(NormalDraws(latent_dim), d, (3,), sigma=sigma, scale=Scale(), skip=skip)
        self.A, self.b = self.family.mean.A, self.family.mean.network.layers[-1].bias  # its last weights are zero
        with torch.no_grad():
            self.A.copy_(normal(d, latent_dim, seed=1))
            self.b.copy_(normal(d, seed=2))
        flatten(self.family)

    def law(self):
        """The Gaussian, with a graph to A, b and a = log(sigma^2 - floor^2)."""
        sigma = self.family.sigma(self.A.new_zeros(1, 1))
        return torch.distributions.MultivariateNormal(self.b, self.A @ self.A.mT + torch.diag(sigma**2))

    def kl_divergence(self, p):
        """KL(q || p) to another Gaussian."""
        return torch.distributions.kl_divergence(self.law(), p)

    def score_fn(self, x):
        q = self.law()
        return torch.linalg.solve(q.covariance_matrix, (q.loc - x).mT).mT.detach()

    @property
    def parameters(self):
        return self.A, self.b, self.family.log_variance.value


COVARIANCE = torch.tensor([[1.0, 0.4], [0.4, 0.6]]).double()
TARGET = torch.distributions.MultivariateNormal(torch.tensor([1.0, -0.5]).double(), COVARIANCE)


def target_score(x):
    return (TARGET.loc.to(x) - x) @ TARGET.precision_matrix.to(x)


def objective_of(est, q):
    """What an estimator descends from a linear family to the Gaussian above, at the start of a training."""
    temperature = Scheduled("annealing", 1.0, q.b)
    objective = est._objective(in_double(target_score, 2), temperature, q.family, generator())
    objective.advance(0.0)
    return objective


def evaluated(objective, family):
    """The loss at the start of a training, and its gradient in each parameter of a family."""
    objective.advance(0.0)
    with torch.no_grad():
        loss = objective()
    return loss, [p.grad.clone() for p in family.parameters()]


def gradients(objective, parameters, n):
    """n estimates of the gradient in some parameters, one a row."""
    rows = []
    with torch.no_grad():
        for _ in range(n):
            objective()
            rows.append(torch.cat([p.grad.flatten() for p in parameters]))
    return torch.stack(rows)


def exact_gradient(q):
    return torch.cat([g.flatten() for g in torch.autograd.grad(q.kl_divergence(TARGET), q.parameters)])


def z_scores(rows, expected=0.0):
    """How many standard errors the means of rows are from what is expected."""
    return ((rows.mean(0) - expected) / (rows.std(0) / math.sqrt(len(rows)))).abs()


def spied_critics(module, monkeypatch, again):
    """Critics of a module that are remembered when they are made, and the states of a generator after each ascent."""
    made, states = [], []

    class Spy(Critics):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

        def ascend(self, *args):
            super().ascend(*args)
            states.append(again.get_state())

    monkeypatch.setattr(module, "Critics", Spy)
    return made, states
