"""A fit as arrays, with a page of code that draws from them."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from skksivi._utils.arrays import as_array
from skksivi._utils.codec import path_of, write
from skksivi.base import BaseApproximator, check_fit
from skksivi.families import Gaussian, Layer
from skksivi.mixing import FunctionDraws


def export(est: BaseApproximator, path: str | os.PathLike[str]) -> None:
    """Write a fit as arrays, with a page of code that draws from it by numpy alone.

    The file is one of numpy's format npz. ``python q.npz 1000`` prints 1,000 draws, without skksivi or torch.
    ``unzip q.npz draw.py`` extracts the page; its ``sample(load("q.npz"), n, rng)`` returns draws by a generator of
    numpy, of the same distribution as `est.sample`. Draws are in the space of the fit; of a target of
    `skksivi.targets.constrained`, ``parameters(fit, X)`` of the page returns the parameters by name, and these are
    what is printed.

    Parameters
    ----------
    est : approximator
        Fitted. Its draws are Gaussian, or by a network and a mixing distribution: a fit of `KSIVIApproximator` or one
        of `skksivi.baselines` that is neither a hierarchy nor a set of points.
    path : path-like
        The file, replaced if it exists.

    Raises
    ------
    NotFittedError
        `est` is not fitted.
    TypeError
        `est` is no approximator, or draws by other means; `path` is no path.
    OSError
        The file cannot be written.

    See Also
    --------
    save : Keeps all of a fit, for `load`.
    to_arviz : Draws with what ArviZ needs.

    Examples
    --------
    >>> import numpy as np, runpy, skksivi, tempfile
    >>> q = skksivi.baselines.Laplace(random_state=0).fit(lambda x: 3 - x, n_features=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     skksivi.export(q, folder + "/q.npz")
    ...     np.load(folder + "/q.npz")["map.m"]
    array([3., 3.])
    """
    check_fit(est)
    arrays: dict[str, Any] = _parts(est)
    if hasattr(est, "feature_names_in_"):
        arrays["names"] = est.feature_names_in_.astype(str)
    if hasattr(est, "supports_"):
        arrays["supports"] = np.array(json.dumps(est.supports_))
    content = io.BytesIO()
    np.savez(content, **arrays)
    with zipfile.ZipFile(content, "a") as file:
        file.writestr("draw.py", Path(__file__).with_name("_draw.py").read_text("utf-8"))
        file.writestr("__main__.py", "import sys\nimport draw\ndraw.main(*sys.argv)\n")
    write(path_of(path), content.getvalue())


def _parts(est: BaseApproximator) -> dict[str, np.ndarray]:
    """Return what a fit draws by, as the page names it."""
    sampler = est.sampler_
    if isinstance(sampler, Gaussian):
        nothing = {"log_variance": {"value": np.full(sampler.n_features, -np.inf)}, "min_scale": 0.0}
        return _flat({**nothing, "latent_dim": sampler.n_features, "map": sampler.map})
    if not isinstance(sampler, Layer) or isinstance(sampler.family.mixing, FunctionDraws):
        raise TypeError(
            f"`est` cannot be exported: a {type(est).__name__} whose sampler is a {type(sampler).__name__} draws by "
            "more than arrays, or by points of its own. Use `skksivi.save`, or np.save its draws."
        )
    family, mixing, whitening = sampler.family, sampler.family.mixing, sampler.whitening
    numbers = {"min_scale": family.min_scale, "latent_dim": mixing.latent_dim, "df": getattr(mixing, "df", None)}
    return _flat({**family.state_dict(), **numbers, "map": whitening.map, "warp": whitening.warp})


def _flat(value: Any, at: str = "") -> dict[str, np.ndarray]:  # noqa: ANN401
    """Return the arrays and numbers in an object by the ways to them."""
    if value is None:
        return {}
    if isinstance(value, Tensor | np.ndarray | int | float):
        return {at: as_array(value) if isinstance(value, Tensor) else np.asarray(value)}
    parts = dict(enumerate(value)) if isinstance(value, list) else value
    if not isinstance(parts, dict):
        parts = value._asdict() if hasattr(value, "_asdict") else vars(value)
    return {name: a for key, part in parts.items() for name, a in _flat(part, f"{at}.{key}".lstrip(".")).items()}
