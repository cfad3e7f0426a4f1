"""A test of every member of a list in one item, where one of its own costs more than what it tests; a refusal."""

import functools
import inspect

import pytest


def every(names, members):
    """Run a test on each member, as `pytest.mark.parametrize` has an item for each; an error says which it is of."""
    names = names.split(", ")
    many = len(names) > 1
    rows = members.items() if isinstance(members, dict) else [(m[0] if many else m, m) for m in members]

    def decorated(test):
        signature = inspect.signature(test)
        left = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values() if p.name not in names]

        @functools.wraps(test)
        def run(**others):
            assert rows
            for label, values in rows:
                try:
                    test(**others, **dict(zip(names, values if many else [values], strict=True)))
                except Exception as error:
                    error.add_note(f"This is of {label}.")
                    raise

        run.__signature__ = signature.replace(parameters=left)
        return run

    return decorated


def refused(error, words, act, *args):
    """See that an act is refused by an error with these words."""
    with pytest.raises(error, match=words):
        act(*args)
