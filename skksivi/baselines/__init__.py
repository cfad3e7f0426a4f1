"""Other methods with the same interface: fit, sample and score."""

from skksivi.baselines._aisivi import AISIVI
from skksivi.baselines._gaussian import BatchAndMatch, FullRankVI, Laplace, MeanFieldVI
from skksivi.baselines._hsivism import HSIVISM
from skksivi.baselines._kpg import KPG
from skksivi.baselines._ksd_descent import KSDDescent
from skksivi.baselines._mala import MALA
from skksivi.baselines._mied import MIED
from skksivi.baselines._pvi import PVI
from skksivi.baselines._sgld import SGLD
from skksivi.baselines._sifg import SIFG
from skksivi.baselines._sivi import SIVI
from skksivi.baselines._sivism import SIVISM
from skksivi.baselines._svgd import SVGD
from skksivi.baselines._uivi import UIVI

__all__ = [
    "AISIVI",
    "HSIVISM",
    "KPG",
    "MALA",
    "MIED",
    "PVI",
    "SGLD",
    "SIFG",
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
