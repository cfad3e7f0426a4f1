"""Draws from a fit of skksivi by numpy alone.

This page is in each file of `skksivi.export`, beside the arrays that it reads: ``unzip q.npz draw.py`` extracts it.
``python q.npz 1000`` prints draws as a table, in the space of the model where the file has the supports of its
parameters. ``X = sample(load("q.npz"), 1000, numpy.random.default_rng())`` returns draws in the space of the fit, and
``parameters(load("q.npz"), X)`` these in the space of the model, by name.
"""

import json
import sys
from itertools import count, takewhile
from math import prod

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
        kind, *numbers = [support] if isinstance(support, str) else support
        n_bounds = {"above": 1, "below": 1, "interval": 2}.get(kind, 0)
        bounds, shape = numbers[:n_bounds], numbers[n_bounds:]
        k = shape[-1] if shape else 1
        n_free = {"simplex": k - 1, "cholesky": k * (k + 1) // 2, "correlation cholesky": k * (k - 1) // 2}.get(
            kind, k
        )
        n_rows = prod(shape[: -2 if "cholesky" in kind else -1])
        x, X = np.split(X, [n_rows * n_free], 1)
        rows = constrained(kind, x.reshape(len(x) * n_rows, n_free), k, *bounds)
        found[name] = rows.reshape(len(x), *shape)
    return found


def constrained(kind: str, x: Array, k: int, a: float = 0, b: float = 1) -> Array:
    """Return k numbers, or a matrix (k, k), with one support and its bounds, for each row of real numbers x."""
    ones = np.ones((len(x), 1))
    match kind:
        case "real":
            return x
        case "positive" | "above":
            return a + np.exp(x)
        case "below":
            return a - np.exp(x)
        case "unit interval" | "interval":
            return a + (b - a) * logistic(x)
        case "ordered":
            return np.hstack([x[:, :1], np.exp(x[:, 1:])]).cumsum(1)
        case "positive ordered":
            return np.exp(x).cumsum(1)
        case "simplex":  # each takes a share of what is left
            x = x - np.log(np.arange(k - 1, 0, -1))
            return np.hstack([logistic(x), ones]) * np.hstack([ones, logistic(-x).cumprod(1)])
    below, entries = np.zeros((len(x), k, k)), np.tril_indices(k, 0 if kind == "cholesky" else -1)
    below[:, *entries] = x
    if kind == "cholesky":
        return np.where(np.eye(k), np.exp(below), below)
    left = (1 / np.cosh(below[:, :, :-1])).cumprod(2)  # of a row's length
    return (np.tanh(below) + np.eye(k)) * np.concatenate([np.ones((len(x), k, 1)), left], 2)


def logistic(x: Array) -> Array:
    """Return 1 / (1 + exp(-x))."""
    return np.exp(-np.logaddexp(0, -x))


def main(path: str, n: str = "1000", seed: str | None = None) -> None:
    """Print draws, below the names of parameters, or of coordinates if there are any."""
    fit = load(path)
    X, names = sample(fit, int(n), np.random.default_rng(None if seed is None else int(seed))), fit.get("names", [])
    if "supports" in fit:
        found = parameters(fit, X)
        names = [name + str([*i]) * bool(i) for name, a in found.items() for i in np.ndindex(a.shape[1:])]
        X = np.hstack([a.reshape(len(X), prod(a.shape[1:])) for a in found.values()])
    np.savetxt(sys.stdout, X, delimiter=",", header=",".join(f'"{name}"' for name in names), comments="")
