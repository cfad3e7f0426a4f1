"""What is refused, warned of or doubted of a score: what is seen -> what is said."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from skksivi._utils.checks import warn_caller
from skksivi.score._tally import Doubt, ImproperError

#: Relative asymmetry above which a Jacobian does not belong to a gradient.
ASYMMETRY = 2e-2

RANDOM = (
    "`score_fn` returns different values when it is called again with the same points, so that the fit will be "
    "biased. If it draws a minibatch of the data, let `skksivi.targets.Minibatches` draw it; if it is a network with "
    "dropout, call its `.eval()`; else fix its seed."
)
TO_THE_LINE = "or transform them to the whole line and add the logarithm of the Jacobian to log p."

#: For each thing looked at: what is seen of it, whether that is an error, a warning or a doubt, and what is said.
REFUSALS: list[tuple[str, Callable[[Any], object], type[Exception | Doubt], str]] = [
    ("a type", lambda seen: seen.works, TypeError,
     "`{name}` takes points of type torch.{other}, but no {dtype}: with these it raises {raised}. Let it bring "
     "its data or module to the type of its input, or set dtype='{other}'."),
    ("errors", lambda seen: "inference tensor" in seen.raised.lower(), ValueError,
     "`{name}` uses tensors that were made under torch.inference_mode(), through which nothing can be "
     "differentiated: make its data outside, or give it clones of them. It said: {raised}"),
    ("errors", lambda seen: seen.takes_one, ValueError,
     "`{name}` takes one point, of shape ({d},), but a fit calls it with many, the rows of a tensor of shape (n, "
     "{d}). Give it as torch.func.vmap({name}), a score of arrays as lambda X: np.stack([score_fn(x) for x in "
     "X]), or write it for rows. With rows it raises {raised}"),
    ("errors", lambda seen: seen.takes_shares, ValueError,
     "`{name}` raises at numbers below zero or above one, so that the target seems bounded. Give the density of "
     "the bounded parameters to skksivi.targets.constrained, " + TO_THE_LINE + " It said: {raised}"),
    ("errors", lambda seen: seen.takes, ValueError,
     "`n_features` is {d}, but `{name}` takes points of shape ({n}, {takes}) and for those of shape {shape} "
     "raises {raised}. Set n_features={takes}."),
    ("a call", lambda seen: seen.is_changed, ValueError,
     "`score_fn` changed its input in place; it must not modify the points it receives."),
    ("a call", lambda seen: not seen.is_real, TypeError,
     "`score_fn` returned {what}, expected a torch tensor or an array of floating-point numbers of "
     "the shape of its input, {expected}."),
    ("a call", lambda seen: seen.shape != seen.expected, ValueError,
     "`score_fn` returned shape {shape}, expected {expected} as its input: the gradient of log p at each row, "
     "where `n_features` is {expected[1]}."),
    ("trial points", lambda seen: not seen.are_finite, ValueError,
     "`score_fn` is not finite at any of {n} trial points at distances of 1e-8 to 100 from the origin{of_nan}; "
     "set `init` to a point where it is finite, check it, shift and rescale the parameters so that they are of "
     "order one, or transform them as skksivi.targets.constrained does."),
    ("precision", lambda seen: seen.is_half, UserWarning,
     "`score_fn` computes in half precision, float16 or bfloat16, with two to three digits, so that the fit and "
     "its checks are inexact. Let it compute in float32 or float64: convert its data and modules by `.float()`, "
     "and leave out autocast."),
    ("rows", lambda seen: seen.are_coupled, ValueError,
     "`score_fn` returns different values for a point when other points are in the same call; its rows must be "
     "independent, each the gradient of log p at one point. Differentiate `log_prob(x).sum()`, not its mean, and use "
     "neither len(x) nor a statistic of the batch; a network with batch normalisation needs `.eval()`."),
    ("two calls", lambda seen: seen.differ and seen.is_lost, ValueError, RANDOM),
    ("two calls", lambda seen: seen.differ, UserWarning, RANDOM),
    ("an own product", lambda seen: seen.fault, ValueError,
     "`score_vjp` returns {fault}; correct it, or leave it out and let the product be automatic."),
    ("products by autograd", lambda seen: seen.are_wrong, ValueError,
     "`products` is 'autograd', but its products with the Jacobian of `score_fn` differ from finite differences "
     "by {error:.0%}: it detaches its input, runs under no_grad, leaves torch, uses a function without a second "
     "derivative, or takes the derivative of a branch that is not taken, where that is NaN. Remove that, or set "
     "products='auto' or 'finite-difference'."),
    ("a Jacobian", lambda seen: seen.asymmetry > ASYMMETRY, UserWarning,
     "The Jacobian of `score_fn` is not symmetric, by {asymmetry:.0%}, so that it is not the gradient of any "
     "log-density; compare each coordinate of it with finite differences of log p."),
    ("a gradient", lambda seen: seen.n_broken, Doubt,
     "`log_prob` is finite and its gradient is not at {n_broken} of {n} trial points, the first at x = "
     "[{first}]: a branch of torch.where that is not taken, with a square root, a quotient or a logarithm, has "
     "a derivative that is NaN there. Make that branch safe, as in torch.where(ok, torch.where(ok, x, "
     "1.0).sqrt(), other)."),
    ("a domain", lambda seen: seen.bounds, Doubt,
     "The target seems bounded, since beyond some value of a coordinate its score is zero or not finite "
     "({supports}), and draws may leave it. Give the density of the bounded parameters to "
     "skksivi.targets.constrained, as in constrained(log_prob, {call}), " + TO_THE_LINE),
    ("a sign", lambda seen: seen.grows, Doubt,
     "`score_fn` points away from the origin far out in all directions, so the density would grow without "
     "bound: it may have the wrong sign. It must be the gradient of log p, not of the potential -log p."),
    ("a mass", lambda seen: seen.direction is not None and not seen.direction.any(), ImproperError,
     "`score_fn` is zero, or another constant, at all trial points: log p is constant or linear, and the density "
     "has infinite mass. Check that the function depends on its input, or add a prior."),
    ("a mass", lambda seen: seen.direction is not None, ImproperError,
     "The target is improper in a direction ({terms}): the density does not fall along it, however far, so that "
     "it has infinite mass. Add a prior, as for a parameter without one or the coefficients of classes that a "
     "predictor separates, or leave the direction out of the parameters."),
    ("a mass", lambda seen: seen.exponent <= seen.d, UserWarning,
     "The tails of the target fall as |x|^-{exponent:.3g} in {d} dimension(s) along some ray, so it may have "
     "infinite mass. Add a prior, or check `score_fn` far from the origin."),
    ("points where it raises", lambda seen: seen.is_first, UserWarning,
     "The score or log p raised at {n_rejected} of {n} points ({raised}). Points where it raises count as "
     "outside the target, as NaN would. Finding them costs further calls: return NaN there if that is slow."),
]  # fmt: skip


def tell(looked_at: str, cause: Exception | None = None, **seen: object) -> str | None:
    """Raise the first error that applies to what is seen, after an error that caused it; warn, or return a doubt."""
    seen["raised"] = f"{type(cause).__name__}: {cause}"
    for about, applies, kind, words in REFUSALS:
        if about == looked_at and applies(SimpleNamespace(**seen)):
            said = words.format_map(seen)
            if issubclass(kind, Doubt):
                return said
            if not issubclass(kind, Warning):
                raise kind(said) from cause
            warn_caller(said)
            break
    return None
