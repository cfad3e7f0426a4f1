"""What the baselines refuse is named before a fit."""

import numpy as np
import pytest
import torch
from members import every, refused
from sklearn.gaussian_process.kernels import RBF

from skksivi import KSIVIApproximator, baselines
from skksivi.baselines import MIED, SGLD, SVGD, BatchAndMatch, FullRankVI, KSDDescent, Laplace, MeanFieldVI
from skksivi.kernels import Riesz
from skksivi.targets import from_score_fn

MISTAKES = [
    (baselines.SIVISM(critic_hidden_layer_sizes=(8, 0)), "`critic_hidden_layer_sizes` must hold positive integers"),
    (baselines.AISIVI(flow_hidden_layer_sizes=(0,)), "flow_hidden_layer_sizes"),
    *(
        (cls(kernel=k), r"(?s)got .* take .*Gaussian for .*RBF")
        for cls, k in ((SVGD, RBF()), (KSIVIApproximator, min))
    ),
    (MeanFieldVI(learning_rate=np.float64(-1)), r"Got -1\.0 instead"),
    (baselines.KPG(kernel=Riesz()), "use Gaussian, IMQ or Laplace"),
    (SVGD(kernel="riesz"), "`kernel` is Riesz, but its derivatives are needed; use Gaussian, IMQ"),
    *((KSDDescent(kernel=k), "its derivatives are needed; use Gaussian or IMQ") for k in ("laplace", "riesz")),
    *((SGLD(step_size=step), "`step_size` must") for step in ((1, 2), (1, 0, 0.5), (-1, 1, 0), (1, 1, 2), [*"a11"])),
    *((cls(init=[[1.0, 2.0]]), r"`init` has 1 row\(s\), expected 2 at least") for cls in (SVGD, KSDDescent, MIED)),
    *(
        (cls(init=np.zeros((2, 2))), r"`init` has shape \(2, 2\), expected \(2,\)")
        for cls in (Laplace, MeanFieldVI, FullRankVI, BatchAndMatch)
    ),
    (SVGD(init=np.zeros(2)), r"`init` has shape \(2,\), expected \(n, 2\)"),
    (SVGD(init=np.zeros((5, 3))), "`init` must be a finite"),
    (SVGD(init=np.full((5, 2), np.nan)), "`init` must be a finite"),
    (SVGD(init=np.full((5, 2), -9.0), whiten=None), "finite at none of the 5 points"),
    (MIED(), "Log p is unknown at the starting points"),
]


@pytest.mark.filterwarnings("ignore:The target seems bounded")
@every("q, message", MISTAKES)
def test_a_mistake_is_named(q, message):
    target = from_score_fn(lambda x: torch.where(x > -8, -x, torch.nan), 2)
    if "Log p" in message:
        target.log_prob = lambda x: torch.nan * x.sum(-1)
    refused((ValueError, TypeError), message, q.fit, target)
