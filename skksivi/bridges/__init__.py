"""Targets of models in other libraries."""

from skksivi.bridges._foreign import from_bridgestan
from skksivi.bridges._jax import from_jax, from_numpyro, non_centered, paired_from_numpyro
from skksivi.bridges._pymc import from_pymc, paired_from_pymc

__all__ = [
    "from_bridgestan", "from_jax", "from_numpyro", "from_pymc", "non_centered", "paired_from_numpyro",
    "paired_from_pymc",
]  # fmt: skip
