"""Draws from a fit of skksivi by numpy alone.

This page is in each file of `skksivi.export`, beside the arrays that it reads: ``unzip q.npz draw.py`` extracts it.
``python q.npz 1000`` prints draws as a table; ``sample(load("q.npz"), 1000, numpy.random.default_rng())`` returns
them.
"""

import sys
from itertools import count, takewhile

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


def main(path: str, n: str = "1000", seed: str | None = None) -> None:
    """Print draws, below the names of the coordinates if there are any."""
    fit = load(path)
    X = sample(fit, int(n), np.random.default_rng(None if seed is None else int(seed)))
    np.savetxt(
        sys.stdout, X, delimiter=",", header=",".join(f'"{name}"' for name in fit.get("names", [])), comments=""
    )
