"""Scores of targets: what a function may be, and products with its Jacobian."""

from skksivi.score._memory import remembered
from skksivi.score._probe import in_double, probe
from skksivi.score._products import choose_product
from skksivi.score._score import (
    REJECTIONS,
    DifferentiableScore,
    HasLogProb,
    Score,
    ScoreFunction,
    ScoreWithProduct,
    Tempered,
    UntriedScore,
    autograd_pullback,
    first_points,
    in_parts,
    of_its_kind,
)
from skksivi.score._tally import BudgetError, Tally
from skksivi.score._target import ByWorkers, resolve_score

__all__ = [
    "REJECTIONS", "BudgetError", "ByWorkers", "DifferentiableScore", "HasLogProb", "Score", "ScoreFunction",
    "ScoreWithProduct", "Tally", "Tempered", "UntriedScore", "autograd_pullback", "choose_product",
    "first_points", "in_double", "in_parts", "of_its_kind", "probe", "remembered", "resolve_score",
]  # fmt: skip
