"""Draws from a fit of skksivi by numpy alone.

This page is in each file of `skksivi.export`, beside the arrays that it reads: ``unzip q.npz draw.py`` extracts it.
``python q.npz 1000`` prints draws as a table, in the space of the model where the file has the supports of its
parameters. ``X = sample(load("q.npz"), 1000, numpy.random.default_rng())`` returns draws in the space of the fit, and
``parameters(load("q.npz"), X)`` these in the space of the model, by name.
"""

import json
import sys
from collections.abc import Callable
from itertools import count, takewhile
from math import isqrt, prod

import numpy as np

Array = np.ndarray
Fit = dict[str, Array]


def load(path: str) -> Fit:
    """Return the arrays of a fit by their names."""
    with np.load(path, allow_pickle=False) as file:
        found = {name: file[name] for name in file.files if not name.endswith(".py")}
    return {name: a.astype(float) if a.dtype.kind == "f" else a for name, a in found.items()}


def sample(fit: Fit, n: int, rng: np.random.Generator) -> Array:
    """Draw n rows (n, d)."""
    z = latent(fit, n, rng)
    return points(fit, z, rng.standard_normal((n, len(fit["map.m"]))))


def latent(fit: Fit, n: int, rng: np.random.Generator) -> Array:
    """Draw z (n, latent_dim): points, or a mixture of Gaussians, Student t or normal."""
    if "mixing.points" in fit:
        return fit["mixing.points"][rng.integers(len(fit["mixing.points"]), size=n)]
    shape = n, int(fit["latent_dim"])
    if "df" in fit:
        return rng.standard_t(fit["df"], shape)
    z = rng.standard_normal(shape)
    if "mixing.means" in fit:
        component = np.searchsorted(fit["mixing.levels"], rng.random(n))
        for k, (m, L) in enumerate(zip(fit["mixing.means"], fit["mixing.factors"], strict=True)):
            z[component == k] = m + z[component == k] @ L.T
    return z


def points(fit: Fit, z: Array, xi: Array) -> Array:
    """Return x = x(m + L u), u = mu(z) + sigma(z) xi, with a curved map x if there is one."""
    sigma = np.sqrt(np.exp(network(fit, "log_variance.", z)) + fit["min_scale"] ** 2)
    y = affine(fit, "map.", mean(fit, z) + sigma * xi)
    return marginals(fit, y) if "warp.V" in fit else levels(fit, y) if "warp.centre" in fit else y


def network(fit: Fit, at: str, z: Array) -> Array:
    """Return the value of a ReLU network, or of a constant."""
    if at + "value" in fit:
        return fit[at + "value"]
    for k in takewhile(lambda k: f"{at}layers.{k}.weight" in fit, count()):
        z = (np.maximum(z, 0) if k else z) @ fit[f"{at}layers.{k}.weight"].T + fit[f"{at}layers.{k}.bias"]
    return z


def mean(fit: Fit, z: Array) -> Array:
    """Return mu(z): a network, beside a linear map or the identity where it has one."""
    if "mean.A" in fit:
        return z @ fit["mean.A"].T + network(fit, "mean.network.", z)
    return z + fit["mean.unit"] * network(fit, "mean.network.", z) if "mean.unit" in fit else network(fit, "mean.", z)


def affine(fit: Fit, at: str, u: Array) -> Array:
    """Return m + L u, where L is a matrix, a scale and a few directions, or the identity."""
    if at + "L" in fit:
        u = u @ fit[at + "L"].T
    elif at + "D" in fit:
        u = fit[at + "D"] * (u + (u @ fit[at + "V"] * (fit[at + "r"] - 1)) @ fit[at + "V"].T)
    return fit[at + "m"] + u


def levels(fit: Fit, y: Array) -> Array:
    """Return x where each coordinate bends and scales with others of lower levels."""
    t = np.zeros_like(y)
    for i in takewhile(lambda i: f"warp.levels.{i}.members" in fit, count()):
        members, drivers, line, location, scale, shape = (
            fit[f"warp.levels.{i}.{name}"] for name in ("members", "drivers", "line", "location", "scale", "shape")
        )
        own, s, one = y[:, members], t[:, drivers], np.ones((len(y), 1))
        if not len(drivers):
            t[:, members] = np.sinh((np.arcsinh(own) + shape[0]) / shape[1])
            continue
        bend = np.abs(s) + np.log1p(np.exp(-2 * np.abs(s))) - np.log(2)  # log cosh
        g = np.clip(np.hstack([s, bend, one]) @ scale, -12, 12)
        m = np.hstack([s, s**2 - 1, bend, one]) @ location
        t[:, members] = np.hstack([s, one]) @ line + np.exp(g) * (m + own)
    return fit["warp.centre"] + fit["warp.unit"] * t


def marginals(fit: Fit, y: Array) -> Array:
    """Return x where independent directions, or a radius, have other quantiles: cubics between nodes."""
    low, high, values, slopes = (fit[f"warp.quantiles.{name}"] for name in ("low", "high", "values", "slopes"))
    k, n_nodes = int(fit["warp.n_mapped"]), values.shape[1]
    own = y[:, :k]
    r = np.linalg.norm(own, axis=1, keepdims=True) if len(values) < k else own
    inside, step = np.clip(r, low, high), (high - low) / (n_nodes - 1)
    i = np.minimum(((inside - low) / step).astype(int), n_nodes - 2)
    t = (inside - low) / step - i
    (a, b), (da, db) = ([np.take_along_axis(c.T, j, 0) for j in (i, i + 1)] for c in (values, step * slopes))
    z = a + t * (da + t * (3 * (b - a) - 2 * da - db + t * (2 * (a - b) + da + db)))
    slope = da + t * (6 * (b - a) - 4 * da - 2 * db + 3 * t * (2 * (a - b) + da + db))
    z = z + (r - inside) * slope / step
    z = z / np.maximum(r, 1e-77) * own if len(values) < k else z
    return affine(fit, "warp.map.", np.hstack([z, y[:, k:]]) @ fit["warp.V"].T)


def parameters(fit: Fit, X: Array) -> Fit:
    """Return the parameters (n, ...) of the model by name, at draws X (n, d) in the space of the fit."""
    if "supports" not in fit:
        raise ValueError("The file has no supports of parameters: its draws stay in the space of the fit.")
    found = {}
    for name, support in json.loads(str(fit["supports"])).items():
        kind, numbers = (support, []) if isinstance(support, str) else (support[0], support[1:])
        n_bounds, n_axes, transform = SUPPORTS[kind]
        bounds, shape = numbers[:n_bounds], numbers[n_bounds:]
        k = shape[-1] if n_axes else 1
        d = {"simplex": k - 1, "cholesky": k * (k + 1) // 2, "correlation cholesky": k * (k - 1) // 2}.get(kind, k)
        n_rows = prod(shape[: len(shape) - n_axes])
        x, X = np.split(X, [n_rows * d], 1)
        found[name] = transform(x.reshape(len(x) * n_rows, d), *bounds).reshape(len(x), *shape)
    return found


def logistic(x: Array) -> Array:
    """Return 1 / (1 + exp(-x))."""
    return np.exp(-np.logaddexp(0, -x))


def simplex(x: Array) -> Array:
    """Return rows of positive numbers of sum one: each is a share of what is left."""
    x, one = x - np.log(np.arange(x.shape[1], 0, -1)), np.ones((len(x), 1))
    return np.hstack([logistic(x), one]) * np.hstack([one, logistic(-x).cumprod(1)])


def cholesky(x: Array) -> Array:
    """Return lower triangular matrices, of rows that begin with those of x, with a positive diagonal."""
    k = isqrt(2 * x.shape[1])
    below = np.zeros((len(x), k, k))
    below[:, *np.tril_indices(k)] = x
    return np.where(np.eye(k), np.exp(below), below)


def correlation_cholesky(x: Array) -> Array:
    """Return lower triangular matrices with rows of length one: each number is a share of the length left."""
    k = isqrt(2 * x.shape[1]) + 1
    below = np.zeros((len(x), k, k))
    below[:, *np.tril_indices(k, -1)] = x
    left = np.concatenate([np.ones((len(x), k, 1)), (1 / np.cosh(below[:, :, :-1])).cumprod(2)], 2)
    return (np.tanh(below) + np.eye(k)) * left


#: The number of bounds of each support, that of the axes of one element of it, and the map to it from rows.
SUPPORTS: dict[str, tuple[int, int, Callable[..., Array]]] = {
    "real": (0, 0, lambda x: x),
    "positive": (0, 0, np.exp),
    "unit interval": (0, 0, logistic),
    "above": (1, 0, lambda x, low: low + np.exp(x)),
    "below": (1, 0, lambda x, high: high - np.exp(x)),
    "interval": (2, 0, lambda x, low, high: low + (high - low) * logistic(x)),
    "simplex": (0, 1, simplex),
    "ordered": (0, 1, lambda x: np.hstack([x[:, :1], np.exp(x[:, 1:])]).cumsum(1)),
    "positive ordered": (0, 1, lambda x: np.exp(x).cumsum(1)),
    "cholesky": (0, 2, cholesky),
    "correlation cholesky": (0, 2, correlation_cholesky),
}


def main(path: str, n: str = "1000", seed: str | None = None) -> None:
    """Print draws, below the names of parameters, or of coordinates if there are any."""
    fit = load(path)
    X = sample(fit, int(n), np.random.default_rng(None if seed is None else int(seed)))
    names = list(fit.get("names", []))
    if "supports" in fit:
        found = parameters(fit, X)
        names = [name + str([*i]) * bool(i) for name, a in found.items() for i in np.ndindex(a.shape[1:])]
        X = np.hstack([a.reshape(len(X), prod(a.shape[1:])) for a in found.values()])
    np.savetxt(sys.stdout, X, delimiter=",", header=",".join(f'"{name}"' for name in names), comments="")
