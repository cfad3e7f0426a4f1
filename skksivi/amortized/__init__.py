r"""One fit for many data sets: a sampler of p(x | y) that is trained once on the scores of many y.

The family is the one of `skksivi.KSIVIApproximator` with parameters that depend on features h of y,

.. math:: x = m(h) + L(h)\, u, \qquad u = \mu(z, h) + \sigma \xi,

so that at one y it is an ordinary fit.
"""

from skksivi.amortized._estimator import AmortizedKSIVI
from skksivi.amortized._family import DeepSets

__all__ = ["AmortizedKSIVI", "DeepSets"]
__dir__ = __all__.copy
