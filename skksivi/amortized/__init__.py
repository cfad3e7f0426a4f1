r"""One fit for many data sets: a sampler of p(x | y) that is trained once on the scores of many y.

The family is a Gaussian mixture whose parameters depend on features h of y, so that at one y it is an ordinary fit of
`skksivi.KSIVIApproximator`.
"""

from skksivi.amortized._estimator import AmortizedKSIVI
from skksivi.amortized._family import DeepSets

__all__ = ["AmortizedKSIVI", "DeepSets"]
__dir__ = __all__.copy
