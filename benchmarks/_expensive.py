"""Three posteriors whose score takes long and two hierarchies, on parameters that are about N(0, 1) a priori.

Their reference draws are made by `python benchmarks/reference.py posteriors`, like those of benchmarks/posteriors.py,
but from fewer or shorter chains, with the settings of `hmc`.
"""

from __future__ import annotations

import math
from types import MappingProxyType

import numpy as np
import torch
from posteriors import normal, tensor, wide
from torch.nn.functional import softplus

from skksivi.targets import Target

#: Of hares and lynxes, in thousands, 1900 to 1920 (Howard, 2009).
PELTS = (
    "30 47.2 70.2 77.4 36.3 20.6 18.1 21.4 22 25.4 27.1 40.3 57 76.6 52.3 19.5 11.2 7.6 14.6 16.2 24.7",
    "4 6.1 9.8 35.2 59.4 41.7 19 13 8.3 9.1 7.4 8 12.3 19.5 45.7 51.1 29.7 15.8 9.7 10.1 8.6",
)


class LotkaVolterra(Target):
    """Hares u and lynxes v, d log u = alpha - beta v, d log v = delta u - gamma, by two Runge-Kutta steps a year.

    Pelts of the Hudson's Bay Company, log y ~ N(log(u, v), sigma^2); x = the logs of (alpha, gamma, beta, delta,
    u_0, v_0, sigma_u, sigma_v), each less its prior mean and over its prior sd.
    """

    n_features = 8
    n_steps = 2
    hmc = MappingProxyType({"n_warmup": 20, "n_rounds": 20, "n_trajectories": 10})

    def __init__(self):
        self.log_y = tensor(np.log([np.array(series.split(), float) for series in PELTS])).mT
        self.centre = tensor([-0.6, -0.2, -3.6, -3.7, 3.0, 2.0, -1.0, -1.0])
        self.scale = tensor([0.3, 0.3, 0.3, 0.3, 0.7, 0.7, 0.5, 0.5])

    def log_prob(self, x):
        rates, products, z, log_sd = (self.centre + self.scale * x).split(2, -1)
        a = rates.exp() * tensor([1, -1])
        b = products.exp() * tensor([-1, 1])
        h = 1 / self.n_steps

        def slope(z):
            return a + b * z.flip(-1).exp()

        years = [z]
        for _ in range(len(self.log_y) - 1):
            for _ in range(self.n_steps):
                k1 = slope(z)
                k2 = slope(z + h / 2 * k1)
                k3 = slope(z + h / 2 * k2)
                z = z + h / 6 * (k1 + 2 * (k2 + k3) + slope(z + h * k3))
            years.append(z)
        return normal(self.log_y - torch.stack(years, -2), log_sd[:, None]).sum((-2, -1)) + wide(x, 1.0)


class GaussianProcessARD(Target):
    """y ~ N(0, a^2 exp(-sum_j (t_j - t'_j)^2 / 2 l_j^2) + s^2 I), five inputs; x = (log l + ..., log a, log s + 1).

    The first two inputs matter, the others do not.
    """

    n_features = 7
    n_points = 150
    hmc = MappingProxyType({"n_chains": 200, "n_warmup": 10, "n_rounds": 20, "n_trajectories": 3})

    def __init__(self):
        rng = np.random.RandomState(20)
        t = rng.uniform(-1, 1, (self.n_points, 5))
        y = np.sin(4 * t[:, 0]) + t[:, 1] ** 2 - t[:, 1] + 0.3 * rng.standard_normal(self.n_points)
        self.y = tensor(y)
        self.squares = (tensor(t)[:, None] - tensor(t)).square().flatten(0, 1).mT

    def log_prob(self, x):
        log_l, log_a, log_s = x.split([5, 1, 1], -1)
        n = self.n_points
        K = (2 * log_a - (-2 * log_l).exp() @ self.squares / 2).exp().reshape(-1, n, n)
        L = torch.linalg.cholesky_ex(K + torch.diag_embed((2 * log_s - 2).exp().expand(-1, n))).L
        z = torch.linalg.solve_triangular(L, self.y.expand(len(x), -1)[..., None], upper=False)[..., 0]
        return wide(z, 1.0) - L.diagonal(dim1=-2, dim2=-1).log().sum(-1) + wide(x, 1.0)


class Districts(Target):
    """logit P(y) = m + X b + tau_1 z_j + tau_2 w_j t, 248 districts j, eight people in each; 500 parameters.

    x = (m, b, log tau_1 + 1, log tau_2 + 1, z, w), all N(0, 1) a priori.
    """

    n_districts, n_people, n_features = 248, 8, 500
    hmc = MappingProxyType({"dense": False, "n_warmup": 12, "n_rounds": 12, "n_trajectories": 8})

    def __init__(self):
        rng = np.random.RandomState(21)
        shape = self.n_districts, self.n_people
        age, t = rng.standard_normal((2, *shape))
        z, w = rng.standard_normal((2, self.n_districts, 1))
        logits = -0.5 + 0.6 * age + 0.8 * z + 0.4 * w * t
        self.age, self.t = tensor(age), tensor(t)
        self.y = tensor(rng.uniform(size=shape) < 1 / (1 + np.exp(-logits)))

    def log_prob(self, x):
        top, z, w = x.split([4, self.n_districts, self.n_districts], -1)
        m, b, tau_1, tau_2 = top.split(1, -1)
        z, w = (tau_1 - 1).exp() * z, (tau_2 - 1).exp() * w
        logits = m[..., None] + b[..., None] * self.age + z[..., None] + w[..., None] * self.t
        return (self.y * logits - softplus(logits)).sum((-2, -1)) + wide(x, 1.0)


class Counties(Target):
    """y ~ N(a_j + b_j t, s^2), a_j = m_1 + tau_1 z_j, b_j = m_2 + tau_2 w_j, 38 counties j; 81 parameters.

    Between 2 and 60 houses in each, t tells those without a basement; x = (m, log tau, log s, z, w).
    """

    n_counties, n_features = 38, 81
    hmc = MappingProxyType({"dense": False, "n_warmup": 20, "n_rounds": 20, "n_trajectories": 10})

    def __init__(self):
        rng = np.random.RandomState(22)
        sizes = np.clip(np.exp(rng.normal(2.5, 0.8, self.n_counties)), 2, 60).astype(int)
        self.county = torch.as_tensor(np.repeat(np.arange(self.n_counties), sizes))
        t = rng.uniform(size=len(self.county)) < 0.2
        a, b = 1.4 + 0.3 * rng.standard_normal(self.n_counties), -0.7 + 0.2 * rng.standard_normal(self.n_counties)
        county = self.county.numpy()
        self.t, self.y = tensor(t), tensor(a[county] + b[county] * t + 0.7 * rng.standard_normal(len(t)))

    def log_prob(self, x):
        top, z, w = x.split([5, self.n_counties, self.n_counties], -1)
        m_1, m_2, tau_1, tau_2, log_s = top.split(1, -1)
        a, b = m_1 + tau_1.exp() * z, m_2 + tau_2.exp() * w
        r = self.y - a[..., self.county] - b[..., self.county] * self.t
        return normal(r, log_s).sum(-1) + wide(x, 1.0)


class Horseshoe(Target):
    """y ~ N(X b, s^2), b_j = l_j tau z_j, l_j ~ C+(0, 1), tau ~ C+(0, .1), 50 columns; 102 parameters.

    x = (log s, log tau, log l, z), s and z N(0, 1) a priori.
    """

    n_rows, n_columns, n_features = 100, 50, 102
    hmc = MappingProxyType({"dense": False, "n_warmup": 40, "n_rounds": 40, "n_trajectories": 20})

    def __init__(self):
        rng = np.random.RandomState(23)
        X = rng.standard_normal((self.n_rows, self.n_columns))
        b = np.zeros(self.n_columns)
        b[:5] = 2, -1.5, 1, 1, -0.5
        self.X, self.y = tensor(X), tensor(X @ b + rng.standard_normal(self.n_rows))

    def log_prob(self, x):
        log_s, log_tau, log_l, z = x.split([1, 1, self.n_columns, self.n_columns], -1)
        r = self.y - ((log_l + log_tau).exp() * z) @ self.X.mT
        scales = log_l - softplus(2 * log_l)
        overall = log_tau - softplus(2 * (log_tau - math.log(0.1)))
        return normal(r, log_s).sum(-1) + scales.sum(-1) + overall[..., 0] + wide(z, 1.0) + wide(log_s, 1.0)


EXPENSIVE = {
    "predators": LotkaVolterra,
    "process_of_five": GaussianProcessARD,
    "districts": Districts,
    "counties": Counties,
    "horseshoe": Horseshoe,
}
