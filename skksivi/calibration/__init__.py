r"""Simulation-based calibration: are fits to data with known parameters as certain as they should be?

Draw :math:`\theta` from the prior and y given it, fit the posterior of y, and draw L times from the fit. If the fit
is the posterior, the rank of :math:`\theta` among the draws is uniform on 0, ..., L. This is repeated, and the ranks
are compared with uniform ones.
"""

from skksivi.calibration._result import Calibration, Failure
from skksivi.calibration._sbc import posterior_sbc, sbc

__all__ = ["Calibration", "Failure", "posterior_sbc", "sbc"]
