"""Every argument of every public function of `datasets`: a bad value is refused by the name of the argument."""

import inspect
import math
import re

import numpy as np
import pytest

from skksivi import datasets

NO_INTEGERS = [True, 1.5, math.nan, "3", None, -1]
NO_SECONDS = [True, math.nan, math.inf, 10**400, -1.0, "1"]
NO_TRUTH = [0, "yes", None, np.ones(2)]
NO_NAMES = ["iris", 3, None, np.array(["train", "test"])]
NO_FOLDERS = [3, True, b"folder", "nul\0byte"]

#: Bad values by the type of the default, or by the name of an argument.
BAD = {
    int: NO_INTEGERS, float: NO_SECONDS, bool: NO_TRUTH, "name": NO_NAMES, "subset": NO_NAMES,
    "data_home": NO_FOLDERS,
}  # fmt: skip
#: Values of arguments without a default, and those with which nothing is downloaded where a bad one is taken.
GIVEN = {"name": "yacht", "download_if_missing": False}

CASES = [
    (function, argument, bad)
    for function in datasets.__all__
    for argument, parameter in inspect.signature(getattr(datasets, function)).parameters.items()
    if argument != "random_state"
    for bad in BAD.get(argument) or BAD[type(parameter.default)]
]


@pytest.mark.parametrize(
    ("function", "argument", "bad"), CASES, ids=[f"{f}-{argument}-{bad!r}"[:60] for f, argument, bad in CASES]
)
def test_a_bad_argument_is_refused_by_name(function, argument, bad, tmp_path):
    function = getattr(datasets, function)
    given = {**GIVEN, "data_home": tmp_path, argument: bad}
    arguments = {name: given[name] for name in inspect.signature(function).parameters if name in given}
    with pytest.raises((TypeError, ValueError), match=rf"\b{re.escape(argument)}\b"):
        function(**arguments)
    assert not list(tmp_path.iterdir())
