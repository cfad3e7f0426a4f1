"""Bayesian predictors in scikit-learn's style."""

from skksivi.predictors._predictors import KSIVIClassifier, KSIVIRegressor

__all__ = ["KSIVIClassifier", "KSIVIRegressor"]
