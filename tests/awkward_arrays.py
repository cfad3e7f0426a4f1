"""Arrays that torch does not take as they are, equal to those they are made of."""

import functools

import numpy as np
import pytest
import torch


def backwards(A):
    """A view with negative strides."""
    return np.array(A[::-1])[::-1]


def read_only(A):
    A = np.array(A)
    A.flags.writeable = False
    return A


def every_view(test):
    """Run a test with each, of which torch otherwise warns once in a process."""

    @functools.wraps(test)
    def warned(*args, **kwargs):
        torch.set_warn_always(True)
        try:
            test(*args, **kwargs)
        finally:
            torch.set_warn_always(False)

    return pytest.mark.parametrize("view", [backwards, read_only])(warned)
