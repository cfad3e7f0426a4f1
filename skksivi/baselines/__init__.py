"""Other methods with the same interface: fit, sample and score."""

from skksivi.baselines._chains import MALA, SGLD
from skksivi.baselines._critics import HSIVISM, SIFG, SIVISM
from skksivi.baselines._gaussian import BatchAndMatch, FullRankVI, Laplace, MeanFieldVI
from skksivi.baselines._particles import MIED, SVGD, KSDDescent
from skksivi.baselines._reverse import AISIVI, UIVI
from skksivi.baselines._semi_implicit import KPG, PVI, SIVI

__all__ = [
    "AISIVI", "HSIVISM", "KPG", "MALA", "MIED", "PVI", "SGLD", "SIFG", "SIVI", "SIVISM", "SVGD", "UIVI",
    "BatchAndMatch", "FullRankVI", "KSDDescent", "Laplace", "MeanFieldVI",
]  # fmt: skip
