"""Other methods behind the same fit, sample and score."""

from skksivi.baselines._gaussian import BatchAndMatch, FullRankVI, Laplace, MeanFieldVI
from skksivi.baselines._hsivism import HSIVISM
from skksivi.baselines._ksd_descent import KSDDescent
from skksivi.baselines._mala import MALA
from skksivi.baselines._mied import MIED
from skksivi.baselines._sgld import SGLD
from skksivi.baselines._sivi import SIVI
from skksivi.baselines._sivism import SIVISM
from skksivi.baselines._svgd import SVGD
from skksivi.baselines._uivi import UIVI

__all__ = [
    "HSIVISM",
    "MALA",
    "MIED",
    "SGLD",
    "SIVI",
    "SIVISM",
    "SVGD",
    "UIVI",
    "BatchAndMatch",
    "FullRankVI",
    "KSDDescent",
    "Laplace",
    "MeanFieldVI",
]
