"""What is told of a fit that was trained, when it has come to its end."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from skksivi._warnings import warn_caller
from skksivi.families._samplers import Fit
from skksivi.pilot._rules import Whitening
from skksivi.score._score import Score
from skksivi.stein._discrepancy import stein_shift, stein_variances

#: Draws at which the score is looked at.
N_EXPLAINED, N_JUDGED = 4000, 1000

#: Bounds of the variances of the draws by Stein's identity, one if they are right, beyond which a fit has failed.
FAILED_VARIANCES = (0.25, 4.0)

#: Square of the distance of the draws from the target, in their standard deviations, beyond which a fit has failed.
FAILED_SHIFT = 4.0


def conclude(fit: Fit, score_fn: Score, generator: torch.Generator) -> None:
    """Explain the numbers that have ended a training, or warn of what is wrong with a fit that came to its end.

    Raises
    ------
    FloatingPointError
    """
    if isinstance(fit.ended_by, FloatingPointError):
        raise _explained(fit.ended_by, score_fn, fit.sampler.sample(N_EXPLAINED, generator)) from fit.ended_by
    if fit.ended_by is None:
        _warn(fit, score_fn, fit.sampler.sample(N_JUDGED, generator).double())


def _explained(error: BaseException, score_fn: Score, x: Tensor) -> FloatingPointError:
    """Return the error with what draws x (n, d) of the last finite state tell of its cause."""
    bad = (~score_fn(x).isfinite().all(1)).nonzero().flatten().tolist()
    cause = f"the score is finite at {len(x)} fresh draws, so that it is a rare one"
    if bad:
        row = ", ".join(f"{value:.4g}" for value in x[bad[0]][:5].tolist())
        cause = (
            f"the score is not finite at {len(bad)} of {len(x)} fresh draws, rows {bad[:3]} and so on, "
            f"the first at x = [{row}{', ...' if x.shape[1] > 5 else ''}]"
        )
    return FloatingPointError(
        f"{error}: {cause}. The state after the last finite step is kept. `score_fn`, or a term of `terms`, may be "
        "undefined or huge there, or have the wrong sign. Use dtype='float64', a smaller `learning_rate` or "
        "`initial_scale`, rescale the parameters or, where this is rare, set optimizer=Adam(nonfinite='skip')."
    )


def _warn(fit: Fit, score_fn: Score, x: Tensor) -> None:
    """Warn of what is wrong with a fit that has come to its end, of which x (n, d) are draws."""
    n_skipped = int((~np.isfinite(np.asarray(fit.report["loss_curve_"]))).sum())
    whitening, message = fit.sampler.attributes()["whitening_"], None
    if n_skipped:
        message = (
            f"{n_skipped} of {fit.report['n_iter_']} iterations were skipped, their loss or gradient not being "
            "finite: `score_fn` may be undefined or huge somewhere. Use dtype='float64' or rescale the parameters."
        )
    elif isinstance(whitening, Whitening) and not whitening.converged:
        message = (
            "The chains that explore the target have not converged, so that the fit may be off: raise the "
            "`budget` of whiten=Pilot(...), start near a mode by `init`, or give the parameters a form without "
            "funnels and spikes."
        )
    elif fit.remark is not None:
        message = fit.remark
    else:
        s = score_fn.double(x)
        message = _of_variances(x, s) or _of_shift(x, s)
    if message is not None:
        warn_caller(message, ConvergenceWarning)


def _of_variances(x: Tensor, s: Tensor) -> str | None:
    """Say in which coordinate draws x (n, d) with scores s are far too wide or narrow."""
    variances, se = stein_variances(x, s)
    low, high = FAILED_VARIANCES
    wrong = (variances + 5 * se < low) | (variances - 5 * se > high)
    if not wrong.any():
        return None
    worst = int((variances.clamp_min(1e-12).log().abs() * wrong).argmax())
    way = "narrow" if variances[worst] < 1 else "wide"
    return (
        f"The draws are too {way} in coordinate {worst}: -E[s_i (x_i - E x_i)] is {variances[worst]:.2g} "
        f"there, where it should be 1; {int(wrong.sum())} of {len(wrong)} coordinates are off by more than "
        "a factor of 4. Use whiten='auto', more `max_iter`, a smaller `initial_scale` or rescale the "
        "parameters."
    )


def _of_shift(x: Tensor, s: Tensor) -> str | None:
    """Say how far draws x (n, d) with scores s are from the target."""
    square, se = stein_shift(x, s)
    if not square - 5 * se > FAILED_SHIFT:
        return None
    return (
        "The draws are too far from the target: E[s]^T Cov(x) E[s], about the square of the distance in standard "
        f"deviations, is {square:.2g}, where it should be 0. Use whiten='auto', more `max_iter`, or set `init` near "
        "the target."
    )
