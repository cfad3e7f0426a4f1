"""Semi-implicit families that are Gaussian, and what is known of them."""

import torch
from plain_targets import generator, normal

from skksivi.families._layer import gaussian_layer
from skksivi.mixing import NormalDraws
from skksivi.parameters import Scale
from skksivi.training._loop import flatten


class LinearFamily:
    """The family of mu(z) = A z + b and one sigma, which is N(b, A A^T + sigma^2 I), ready for training."""

    def __init__(self, d=2, latent_dim=2, sigma=0.7):
        self.family = gaussian_layer(
            torch.full((d,), sigma, dtype=torch.float64), scale=Scale(), mixing=NormalDraws(latent_dim),
            hidden_layer_sizes=(3,), generator=generator(), skip=torch.eye(d, latent_dim),
        )  # fmt: skip
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


TARGET = torch.distributions.MultivariateNormal(
    torch.tensor([1.0, -0.5]).double(), torch.tensor([[1.0, 0.4], [0.4, 0.6]]).double()
)


def target_score(x):
    return (TARGET.loc.to(x) - x) @ TARGET.precision_matrix.to(x)
