"""How close two samples are to each other, or a sample to a target known by its score.

`wasserstein_in_box`, `mmd` and `ksd` are squared; `sliced_wasserstein` and `correlation_error` are not, and
`energy_distance` takes no root. Between two exact samples they are not zero: `noise_floor` gives their values.
"""

from skksivi.metrics._samples import (
    NoiseFloor,
    correlation_error,
    energy_distance,
    kl_divergence,
    mmd,
    noise_floor,
    sliced_wasserstein,
    wasserstein_in_box,
)
from skksivi.metrics._stein import KSDTest, ksd, ksd_test

__all__ = [
    "KSDTest",
    "NoiseFloor",
    "correlation_error",
    "energy_distance",
    "kl_divergence",
    "ksd",
    "ksd_test",
    "mmd",
    "noise_floor",
    "sliced_wasserstein",
    "wasserstein_in_box",
]
