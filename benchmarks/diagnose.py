"""Good fits and deliberately wrong ones: what `skksivi.diagnose` says of each.

python benchmarks/diagnose.py [--seeds 3] [--first-seed 0] [--jobs 1] [--out FILE.json] [--quick]
python benchmarks/diagnose.py --show benchmarks/diagnose.json --manual doc      the table of the manual

A fit is a sampler whose draws are known: those of the target itself, or of the target moved, scaled, cut, rotated or
re-weighed, or of a simpler distribution. Each seed makes new targets: their dimensions, units, correlations and
shapes are random, and so is whether the target has a `log_prob` or a score alone, and whether the fit has a density.
A few good fits are those of KSIVI with its defaults, if all means are within a tenth of a standard deviation, and all
standard deviations within a tenth.

Printed: for each fault how many fits have it, how many of them were named, and by which checks; for each kind of
target how many good fits there are and how many were accused. The checks were developed with seeds 0 to 2; the
benchmarks/diagnose.json that ships is of --first-seed 3.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch
from _harness import command, print_table, results, rst, show_tables
from _shapes import normals
from posteriors import tensor

from skksivi import KSIVIApproximator, diagnose
from skksivi.base import BaseApproximator
from skksivi.families._density import LogDensity
from skksivi.targets import Target, from_score_fn
from skksivi.training._run import Fit

#: Draws by which the moments of a target, and its quantiles, are known.
N_MOMENTS = 20_000


# Fits of which all is known


class Drawn(NamedTuple):
    """A sampler by its draws alone."""

    target: Target
    n_features: int

    in_parts = True

    def attributes(self):
        return {}

    def sample(self, n, generator):
        return self.target.sample(n, generator)


class WithDensity(Drawn):
    """A sampler with its density."""

    def log_density(self, x):
        value = self.target.log_prob(x)
        return LogDensity(value, torch.zeros_like(value))


class Known(BaseApproximator):
    """A fit that draws from `q`, whatever its target."""

    def __init__(self, q=None, density=True, device="cpu", dtype="float64", random_state=0):
        self.q, self.density = q, density
        self.device, self.dtype, self.random_state = device, dtype, random_state

    def _fit(self, score_fn, run):
        sampler = WithDensity if self.density else Drawn
        return Fit(sampler(self.q, self.q.n_features), {})


# Distributions with a density and an exact sampler


class Normal(Target):
    """N(0, I)."""

    def __init__(self, d):
        self.n_features = d

    def log_prob(self, x):
        return -x.square().sum(-1) / 2 - self.n_features / 2 * math.log(2 * math.pi)

    def sample(self, n, generator):
        return normals(n, self.n_features, generator)


class StudentT(Target):
    """The multivariate t of an integer number of degrees of freedom; of one it is the Cauchy distribution."""

    def __init__(self, d, df):
        self.n_features, self.df = d, df

    def log_prob(self, x):
        d, df = self.n_features, self.df
        constant = math.lgamma((df + d) / 2) - math.lgamma(df / 2) - d / 2 * math.log(df * math.pi)
        return constant - (df + d) / 2 * (x.square().sum(-1) / df).log1p()

    def sample(self, n, generator):
        chi = normals(n, self.df, generator).square().mean(1, keepdim=True)
        return normals(n, self.n_features, generator) / chi.sqrt()


class Independent(Target):
    """Coordinates that are independent and of one distribution."""

    def __init__(self, base, d):
        self.base, self.n_features = base, d

    def log_prob(self, x):
        return self.base.log_prob(x.reshape(-1, 1)).view(-1, self.n_features).sum(1)

    def sample(self, n, generator):
        return self.base.sample(n * self.n_features, generator).view(n, self.n_features)


class LogGamma(Target):
    """Logarithms of independent gamma variables of shapes a: skewed to the left, the more the smaller a."""

    def __init__(self, a):
        self.n_features, self.a = len(a), tensor(a)

    def log_prob(self, x):
        return x @ self.a - x.exp().sum(-1) - self.a.lgamma().sum()

    def sample(self, n, generator):
        seed = torch.randint(2**31, (), generator=generator).item()
        return tensor(np.log(np.random.RandomState(seed).gamma(self.a.numpy(), size=(n, self.n_features))))


class Quartic(Target):
    """log p = -sum x^4 / 4 + constant: tails shorter than a normal's."""

    def __init__(self, d):
        self.n_features = d

    def log_prob(self, x):
        return -x.pow(4).sum(-1) / 4 - self.n_features * (math.lgamma(0.25) - math.log(2) / 2)

    def sample(self, n, generator):
        seed = torch.randint(2**31, (), generator=generator).item()
        rng, shape = np.random.RandomState(seed), (n, self.n_features)
        return tensor(rng.choice([-1, 1], shape) * (4 * rng.gamma(0.25, size=shape)) ** 0.25)


class Bent(Target):
    """A normal whose every second coordinate is moved by b (z^2 - 1), z the one before."""

    def __init__(self, d, b):
        self.n_features, self.b = d, b

    def _moved(self, x, sign):
        y = x.clone()
        y[:, 1::2] = x[:, 1::2] + sign * self.b * (x[:, : 2 * (x.shape[1] // 2) : 2].square() - 1)
        return y

    def log_prob(self, x):
        return Normal(self.n_features).log_prob(self._moved(x, -1))

    def sample(self, n, generator):
        return self._moved(normals(n, self.n_features, generator), 1)


class Ring(Target):
    """Two coordinates at a distance r > 0 from the origin with p(r) ~ r exp(-(r - R)^2 / 2)."""

    n_features = 2

    def __init__(self, radius):
        self.radius = radius

    def log_prob(self, x):
        return -(x.norm(dim=1) - self.radius).square() / 2

    def sample(self, n, generator):
        top = self.radius + 6
        r = self.radius + normals(8 * n + 100, 1, generator)[:, 0]
        u, angle = torch.rand(2, len(r), generator=generator, dtype=torch.float64)
        kept = (r > 0) & (u * top < r)
        angle, r = 2 * math.pi * angle[kept][:n], r[kept][:n]
        return torch.stack([r * angle.cos(), r * angle.sin()], 1)


class Funnel(Target):
    """v ~ N(0, s^2), and given v the others are N(0, e^v), around a common normal mean where there is one."""

    def __init__(self, d, s, mean=False):
        self.n_features, self.s, self.mean = d, s, mean

    def log_prob(self, x):
        v, rest = x[:, 0], x[:, 1:]
        prior = -(v / self.s).square() / 2
        if self.mean:
            prior, rest = prior - rest[:, 0].square() / 2, rest[:, 1:] - rest[:, :1]
        return prior - (rest.square().sum(1) * (-v).exp() + rest.shape[1] * v) / 2

    def sample(self, n, generator):
        z = normals(n, self.n_features, generator)
        v, rest = self.s * z[:, :1], z[:, 1:]
        if not self.mean:
            return torch.cat([v, (v / 2).exp() * rest], 1)
        return torch.cat([v, rest[:, :1], rest[:, :1] + (v / 2).exp() * rest[:, 1:]], 1)


class Regression(Target):
    """Coefficients ~ N(0, 2^2 I) of a logistic or Poisson regression, drawn by importance resampling."""

    def __init__(self, X, y, family):
        self.X, self.y, self.family, self.n_features = tensor(X), tensor(y), family, X.shape[1]

    def log_prob(self, x):
        eta = x @ self.X.mT
        mass = eta.exp() if self.family == "Poisson" else torch.nn.functional.softplus(eta)
        return eta @ self.y - mass.sum(1) - x.square().sum(1) / 8

    def sample(self, n, generator):
        if not hasattr(self, "proposal"):
            self.proposal = self._proposal()
        x = self.proposal.sample(20 * n, generator)
        w = (self.log_prob(x) - self.proposal.log_prob(x)).softmax(0)
        return x[torch.multinomial(w, n, generator=generator)]

    def _proposal(self):
        x = torch.zeros(1, self.n_features, dtype=torch.float64)
        for _ in range(30):
            eta = (x @ self.X.mT)[0]
            mean = eta.exp() if self.family == "Poisson" else eta.sigmoid()
            weight = mean if self.family == "Poisson" else mean * (1 - mean)
            H = (self.X.mT * weight) @ self.X + torch.eye(self.n_features) / 4
            step = torch.linalg.solve(H, (self.y - mean) @ self.X - x[0] / 4)
            x = x + step / step.norm().clamp_min(1)
        return Moved(StudentT(self.n_features, 8), x[0], 1.1 * torch.linalg.cholesky(torch.linalg.inv(H)))


class Mixture(Target):
    """Distributions with weights; their densities are normalised."""

    def __init__(self, parts, weights):
        self.parts, self.weights, self.n_features = parts, tensor(weights), parts[0].n_features

    def log_prob(self, x):
        each = torch.stack([part.log_prob(x) for part in self.parts], 1)
        return (each + self.weights.log()).logsumexp(1)

    def sample(self, n, generator):
        k = torch.multinomial(self.weights, n, replacement=True, generator=generator)
        return torch.stack([part.sample(n, generator) for part in self.parts])[k, torch.arange(n)]


# What is made of a distribution


class Moved(Target):
    """x = m + A y for y of another distribution."""

    def __init__(self, base, m, A):
        self.base, self.m, self.A, self.n_features = base, tensor(m), tensor(A), base.n_features

    def log_prob(self, x):
        y = torch.linalg.solve(self.A, (x - self.m).mT).mT
        return self.base.log_prob(y) - torch.linalg.slogdet(self.A).logabsdet

    def sample(self, n, generator):
        return self.m + self.base.sample(n, generator) @ self.A.mT


class Kept(Target):
    """Draws for which `keep` is true, of another distribution."""

    def __init__(self, base, keep):
        self.base, self.keep, self.n_features = base, keep, base.n_features

    def log_prob(self, x):
        return self.base.log_prob(x).where(self.keep(x), -math.inf)

    def sample(self, n, generator):
        x = self.base.sample(3 * n + 100, generator)
        return x[self.keep(x)][:n]


class Shuffled(Target):
    """The marginals of another distribution, independent; it has no density."""

    def __init__(self, base):
        self.base, self.n_features = base, base.n_features

    def sample(self, n, generator):
        x = self.base.sample(n, generator)
        return torch.stack([c[torch.randperm(n, generator=generator)] for c in x.mT], 1)


# Targets


def placed(base, rng, condition=None):
    """Put a distribution at a random place in random units, correlated where a condition number is given."""
    d = base.n_features
    A = np.diag(10 ** rng.uniform(-1.5, 1.5, d))
    if condition:
        U, V = (np.linalg.qr(rng.standard_normal((d, d)))[0] for _ in range(2))
        A = A @ U * condition ** rng.uniform(-0.5, 0.5, d) @ V
    return Moved(base, A @ rng.normal(0, 3, d), A)


def at_distance(rng, d, k, low, high):
    """Return k centres, each so far from the nearest."""
    direction = rng.standard_normal((1, d))
    steps = np.arange(k)[:, None] * rng.uniform(low, high)
    if d == 1 or k == 2:
        return steps * direction / np.linalg.norm(direction)
    angles, radius = 2 * np.pi * np.arange(k) / k, rng.uniform(low, high) / 2 / np.sin(np.pi / k)
    return radius * np.column_stack([np.cos(angles), np.sin(angles), np.zeros((k, d - 2))])


def modes(rng, d, k, low, high, weights=None):
    centres = at_distance(rng, d, k, low, high)
    weights = rng.dirichlet(np.full(k, 10.0)) if weights is None else weights
    sds = rng.uniform(0.5, 1.0, k)
    return Mixture([Moved(Normal(d), m, sd * np.eye(d)) for m, sd in zip(centres, sds, strict=True)], weights)


def regression(rng, family):
    d = rng.randint(2, 7)
    X = rng.standard_normal((40, d)) * rng.uniform(0.3, 1.5, d)
    eta = X @ rng.normal(0, 0.5, d)
    return Regression(X, rng.poisson(np.exp(eta)) if family == "Poisson" else rng.logistic(eta) > 0, family)


KINDS = {
    "normal": lambda rng: placed(Normal(rng.randint(1, 31)), rng),
    "correlated": lambda rng: placed(Normal(rng.randint(2, 21)), rng, 1e4),
    "skewed": lambda rng: placed(LogGamma(rng.uniform(0.5, 3, rng.randint(1, 11))), rng, 10),
    "very skewed": lambda rng: placed(LogGamma(rng.uniform(0.15, 0.4, rng.randint(1, 4))), rng),
    "light tails": lambda rng: placed(Quartic(rng.randint(1, 11)), rng, 10),
    "bent": lambda rng: placed(Bent(rng.randint(2, 9), rng.uniform(0.3, 1)), rng),
    "ring": lambda rng: placed(Ring(rng.uniform(3, 6)), rng),
    "funnel": lambda rng: Funnel(rng.randint(2, 11), rng.uniform(1, 2)),
    "hierarchy": lambda rng: placed(Funnel(rng.randint(5, 16), rng.uniform(0.3, 0.8), mean=True), rng),
    "t": lambda rng: placed(StudentT(rng.randint(1, 11), rng.randint(3, 6)), rng, 10),
    "coordinates of t3": lambda rng: placed(Independent(StudentT(1, 3), rng.randint(2, 11)), rng),
    "Cauchy": lambda rng: placed(StudentT(rng.randint(1, 6), 1), rng),
    "two modes": lambda rng: placed(modes(rng, rng.randint(1, 9), 2, 5, 12, [0.8, 0.2]), rng),
    "overlapping modes": lambda rng: placed(modes(rng, rng.randint(1, 6), 2, 2.5, 4, [0.8, 0.2]), rng),
    "ring of modes": lambda rng: placed(modes(rng, rng.randint(2, 5), rng.randint(4, 8), 4, 7), rng),
    "cross": lambda rng: placed(
        Mixture([Moved(Normal(2), [0, 0], [[1, 0], [r, 0.3]]) for r in (0.95, -0.95)], [0.5, 0.5]), rng
    ),
    "two widths": lambda rng: placed(
        Mixture([Moved(Normal(3), np.zeros(3), s * np.eye(3)) for s in (1.0, rng.uniform(0.2, 0.4))], [0.5, 0.5]), rng
    ),
    "logistic": lambda rng: regression(rng, "logistic"),
    "Poisson": lambda rng: regression(rng, "Poisson"),
}


# Faults


def moments(p):
    x = p.sample(N_MOMENTS, torch.Generator().manual_seed(1))
    return x.mean(0), x.mT.cov().reshape(p.n_features, p.n_features), x


def spread(x):
    """Return half the width of the middle 68% of each column, which heavy tails have as well."""
    return (x.quantile(0.84, dim=0) - x.quantile(0.16, dim=0)) / 2


def shifted(p, rng, share=1 / 3):
    *_, x = moments(p)
    i, m = rng.randint(p.n_features), torch.zeros(p.n_features, dtype=torch.float64)
    m[i] = share * rng.choice([-1, 1]) * spread(x)[i]
    return Moved(p, m, np.eye(p.n_features))


def shifted_within(p, rng):
    """Shift a mixture by a third of a standard deviation of its first mode."""
    i, m = rng.randint(p.n_features), torch.zeros(p.n_features, dtype=torch.float64)
    m[i] = p.A[i, i] * p.base.parts[0].A[i, i] / 3
    return Moved(p, m, np.eye(p.n_features))


def shifted_across(p, rng):
    """Shift by a third of the standard deviation along the narrowest principal direction."""
    _, S, _ = moments(p)
    lam, V = torch.linalg.eigh(S)
    return Moved(p, V[:, 0] * lam[0].sqrt() * rng.choice([-1, 1]) / 3, np.eye(p.n_features))


def scaled(factor):
    def fault(p, rng):
        *_, x = moments(p)
        i, A = rng.randint(p.n_features), torch.eye(p.n_features, dtype=torch.float64)
        A[i, i] = factor
        centre = x.median(0).values
        return Moved(p, centre - A @ centre, A)

    return fault


def cut(p, _):
    """Cut beyond four units of a distribution around the origin, in its own coordinates."""
    return Moved(Kept(p.base, lambda y: y.norm(dim=1) < 4), p.m, p.A)


def half_cut(p, rng):
    """Cut beyond four units on one side of a coordinate."""
    i, sign = rng.randint(p.n_features), rng.choice([-1, 1])
    return Moved(Kept(p.base, lambda y: sign * y[:, i] < 4), p.m, p.A)


def cut_on_one_side(p, rng):
    """Cut the 4% on one side of one coordinate."""
    *_, x = moments(p)
    i, sign = rng.randint(p.n_features), rng.choice([-1, 1])
    limit = (sign * x[:, i]).quantile(0.96)
    return Kept(p, lambda y: sign * y[:, i] < limit)


def neck_lost(p, _):
    """Lose the narrowest 8% of a funnel."""
    limit = p.sample(N_MOMENTS, torch.Generator().manual_seed(1))[:, 0].quantile(0.08)
    return Kept(p, lambda y: y[:, 0] > limit)


def arc_lost(p, rng):
    """Lose a fifth of a ring."""
    angle = rng.uniform(-2, 2)
    return Moved(Kept(p.base, lambda y: (torch.atan2(y[:, 1], y[:, 0]) - angle).abs() > 0.2 * math.pi), p.m, p.A)


def long_tails(p, _):
    """A t of four degrees of freedom with the variances of a normal."""
    return Moved(StudentT(p.n_features, 4), p.m, p.A / 2**0.5)


def gaussian(p, _):
    """The Gaussian of the same mean and covariance."""
    m, S, _ = moments(p)
    return Moved(Normal(p.n_features), m, torch.linalg.cholesky(S))


def gaussian_of_quantiles(p, _):
    """The Gaussian with the middles and widths of the coordinates of a target without correlation."""
    *_, x = moments(p)
    return Moved(Normal(p.n_features), x.median(0).values, torch.diag(spread(x)))


def reweighted(weights):
    return lambda p, _: Moved(Mixture(p.base.parts, weights), p.m, p.A)


def without_a_mode(p, _):
    """Lose the last mode."""
    left = p.base.weights[:-1] / p.base.weights[:-1].sum()
    return Moved(Mixture(p.base.parts[:-1], left), p.m, p.A)


def one_mode(factor):
    """Scale the first mode."""

    def fault(p, _):
        first, *others = p.base.parts
        return Moved(Mixture([Moved(first.base, first.m, factor * first.A), *others], p.base.weights), p.m, p.A)

    return fault


def rotated(p, _):
    """Rotate by 30 degrees in the plane of the longest and the shortest principal direction."""
    m, S, _ = moments(p)
    V = torch.linalg.eigh(S).eigenvectors
    R, c, s = torch.eye(p.n_features, dtype=torch.float64), math.cos(math.pi / 6), math.sin(math.pi / 6)
    R[0, 0], R[0, -1], R[-1, 0], R[-1, -1] = c, -s, s, c
    R = V @ R @ V.mT
    return Moved(p, m - R @ m, R)


#: The kinds of targets that a fault is made of.
FAULTS = {
    "shift of a coordinate": (
        shifted,
        ["normal", "correlated", "skewed", "t", "Cauchy", "logistic", "hierarchy", "bent", "light tails"],
    ),
    "shift of modes": (shifted_within, ["two modes", "ring of modes"]),
    "shift along the narrowest direction": (shifted_across, ["correlated", "logistic", "hierarchy"]),
    "narrow in a coordinate": (scaled(0.7), ["normal", "correlated", "skewed", "t", "Cauchy", "Poisson", "funnel"]),
    "wide in a coordinate": (scaled(1.4), ["normal", "correlated", "skewed", "t", "Cauchy", "Poisson", "two widths"]),
    "tails cut": (cut, ["t", "coordinates of t3", "Cauchy"]),
    "a tail cut": (half_cut, ["coordinates of t3", "t", "Cauchy"]),
    "cut on one side": (cut_on_one_side, ["normal", "skewed", "very skewed", "t", "Cauchy", "logistic"]),
    "tails too long": (long_tails, ["normal", "correlated"]),
    "tails too short": (gaussian_of_quantiles, ["coordinates of t3", "Cauchy"]),
    "Gaussian of the same moments": (
        gaussian,
        ["skewed", "very skewed", "light tails", "bent", "ring", "funnel", "t", "two modes", "cross", "two widths"],
    ),
    "a mode lost": (without_a_mode, ["two modes", "overlapping modes", "ring of modes"]),
    "modes of equal weight": (reweighted([0.5, 0.5]), ["two modes", "overlapping modes"]),
    "a mode too narrow": (one_mode(0.7), ["two modes", "ring of modes"]),
    "a mode too wide": (one_mode(1.4), ["two modes", "ring of modes"]),
    "neck lost": (neck_lost, ["funnel"]),
    "arc lost": (arc_lost, ["ring"]),
    "rotated": (rotated, ["correlated"]),
    "dependence lost": (lambda p, _: Shuffled(p), ["correlated", "bent", "cross", "ring", "funnel"]),
}


def none(p, _):
    return p


def nearly(p, rng):
    """Shift a coordinate by a fiftieth of a standard deviation."""
    return shifted(p, rng, 0.02)


#: The same of fits that are good.
GOOD = {
    "none": (none, list(KINDS)),
    "none, again": (none, list(KINDS)),
    "nearly none": (nearly, ["normal", "skewed", "t", "logistic"]),
    "defaults": (none, ["normal", "correlated", "skewed", "bent", "hierarchy", "two modes", "logistic", "Poisson"]),
}
METHODS = FAULTS | GOOD


def run(case, fault, seed):
    torch.set_num_threads(1)
    rng = np.random.RandomState([seed, list(KINDS).index(case), list(METHODS).index(fault)])
    p = KINDS[case](rng)
    q = METHODS[fault][0](p, rng)
    bare, density = bool(rng.randint(2)), bool(rng.randint(2)) and not isinstance(q, Shuffled)
    target = from_score_fn(p.score_fn, p.n_features) if bare else p
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        est = KSIVIApproximator(dtype="float64", random_state=seed) if fault == "defaults" else Known(q, density)
        est.fit(target)
        start = time.process_time()
        report = diagnose(est, target, random_state=seed)
    seconds = time.process_time() - start
    return {
        "d": p.n_features,
        "accurate": is_accurate(est, p) if fault == "defaults" else None,
        "score alone": bare,
        "density": density,
        "named by": [check.name for check in report.warnings],
        "seconds": seconds,
    }


def is_accurate(est, p):
    X, (m, S, _) = est.sample(N_MOMENTS, random_state=0), moments(p)
    sd = S.diagonal().sqrt().numpy()
    return bool((np.abs(X.mean(0) - m.numpy()) < 0.1 * sd).all() and (np.abs(X.std(0) / sd - 1) < 0.1).all())


def table(rows, methods, by):
    """Return for each value of a column the number of fits, of those named, and the checks that named most."""
    lines = []
    for name in dict.fromkeys(row[by] for row in rows if row["method"] in methods):
        some = [row for row in rows if row["method"] in methods and row[by] == name]
        checks = Counter(check for row in some for check in row["named by"])
        lines.append(
            (
                name,
                len(some),
                sum(bool(row["named by"]) for row in some),
                ", ".join(f"{check} {n}" for check, n in checks.most_common(4)),
            )
        )
    return [*lines, ("all", *(sum(line[k] for line in lines) for k in (1, 2)), "")]


#: The faults as the manual has them.
GROUPS = {
    "shifted by a third of a standard deviation": (
        "shift of a coordinate",
        "shift of modes",
        "shift along the narrowest direction",
    ),
    "0.7 or 1.4 times as wide": (
        "narrow in a coordinate",
        "wide in a coordinate",
        "a mode too narrow",
        "a mode too wide",
    ),
    "tails cut, or a funnel's neck": ("tails cut", "cut on one side", "neck lost"),
    "a heavy tail cut on one side": ("a tail cut",),
    "tails too long or too short": ("tails too long", "tails too short"),
    "a Gaussian of the same moments": ("Gaussian of the same moments",),
    "a mode or an arc lost, wrong weights": ("a mode lost", "arc lost", "modes of equal weight"),
    "rotated, or dependence lost": ("rotated", "dependence lost"),
}


def grouped(rows):
    """Return the table of the manual: detected fits per group, and the checks that detect at least half of them."""
    lines = []
    for name, faults in GROUPS.items():
        some = [row["named by"] for row in rows if row["method"] in faults]
        n_detected = sum(map(bool, some))
        checks = Counter(check for named in some for check in named).most_common(3)
        mostly = ", ".join(check for check, n in checks if 2 * n >= n_detected)
        lines.append((name, f"{n_detected} of {len(some)}", mostly))
    return rst(("Fault", "Detected", "Mostly by"), lines)


def sentences(rows):
    """Yield the totals, as the manual has them."""
    wrong = [row for row in rows if row["method"] in FAULTS]
    yield f"Of {len(wrong)} wrong fits, {sum(bool(row['named by']) for row in wrong)} were detected:"
    good = [row for row in rows if row["method"] in GOOD]
    own = [row for row in good if row["method"] == "defaults"]
    yield (
        f"Of {len(good)} good fits, {len(good) - len(own)} of them exact draws and {len(own)} default fits of KSIVI, "
        f"{sum(bool(row['named by']) for row in good)} had a false alarm"
    )


def show(rows):
    print_table(("Fault", "fits", "named", "by"), table(rows, FAULTS, "method"))
    print()
    print_table(("Good fits of", "fits", "accused", "by"), table(rows, GOOD, "case"))
    seconds = [row["seconds"] for row in rows]
    print(f"\n{sum(seconds):.0f} seconds of CPU, at most {max(seconds):.1f} for a report.")


def main():
    parser = command(__doc__, jobs=1)
    parser.add_argument("--first-seed", type=int, default=0)
    args = parser.parse_args()
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    jobs = [(case, fault, seed) for seed in seeds for fault in METHODS for case in METHODS[fault][1]]
    if args.quick:
        jobs = [jobs[0], next(job for job in jobs if job[1] in GOOD)]
    rows = results(args, jobs, run, n_jobs=args.jobs)["rows"]
    rows = [row for row in rows if row["accurate"] is not False]
    show(rows)
    show_tables(args, {"diagnose": grouped(rows)})
    print(*sentences(rows), sep="\n")


if __name__ == "__main__":
    main()
