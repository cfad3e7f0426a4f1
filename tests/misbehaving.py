"""Scores that do what they should not at some of their calls."""

import torch


class Misbehaving:
    """A score that does `act` with its result from one call on.

    Parameters
    ----------
    act : callable
    call : int
        The first, from zero.
    rows : int, default=None
        Count, and spoil, only calls with so many rows.
    once : bool, default=False
        Do it at this call alone.
    score_fn : callable, default=torch.neg
    """

    def __init__(self, act, call, *, rows=None, once=False, score_fn=torch.neg):
        self.act, self.call, self.rows, self.once, self.plain = act, call, rows, once, score_fn
        self.n_calls = 0

    def __call__(self, x):
        s = self.plain(x)
        if self.rows not in (None, len(x)):
            return s
        self.n_calls += 1
        is_due = self.n_calls == self.call + 1 if self.once else self.n_calls > self.call
        return self.act(s) if is_due else s


def raising(error):
    def act(s):
        raise error

    return act
