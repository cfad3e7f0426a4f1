"""One judge of points and fits: how far may a number that is read off them be from the posterior's?"""

from skksivi.judge._verdict import THRESHOLDS, Errors, Grade, Verdict

__all__ = ["THRESHOLDS", "Errors", "Grade", "Verdict"]
__dir__ = __all__.copy
