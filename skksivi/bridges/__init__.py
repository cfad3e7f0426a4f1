"""Targets of models in other libraries."""

from skksivi.bridges._foreign import from_bridgestan
from skksivi.bridges._jax import from_jax, from_numpyro
from skksivi.bridges._pymc import from_pymc

__all__ = ["from_bridgestan", "from_jax", "from_numpyro", "from_pymc"]
