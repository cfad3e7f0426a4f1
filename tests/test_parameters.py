"""Parameter objects and their shorthands: cloned, shown, validated and searched as estimators are."""

import copy
import math
import pickle
from functools import partial
from inspect import signature

import numpy as np
import pytest
from approximators import APPROXIMATORS, GaussianTarget, short
from members import every, refused
from sklearn.base import clone

from skksivi import HKSIVIApproximator, KSIVIApproximator, annealing, kernels, mixing, parameters
from skksivi._utils.arrays import check_sample_weight
from skksivi.baselines import SIVI, SVGD
from skksivi.kernels import Gaussian
from skksivi.parameters import Adam, Bridge, Checkpoint, Network, ParameterObject, Pilot, Scale
from skksivi.targets import Banana
from skksivi.terms import Entropic, Term

OBJECTS = [
    Adam(betas=(0.5, 0.9), decay=(0.9, 100), warm_up=3, ema=None, max_norm=1.0, nonfinite="skip"),
    Bridge("cosine", weights=[1.0, 0.5]),
    Network((5, 7), linear_skip=False),
    Checkpoint("here", every=7),
    Entropic(0.3),
    Pilot("diagonal", effort="low", budget=5000, max_score_calls=10**6, skip=("other modes",), weight=0.5),
    Scale("network", floor=0.01),
]


#: What makes a training short.
TINY = {"max_iter": 5, "batch_size": 8, "hidden_layer_sizes": (4,), "random_state": 0}


def test_every_class_is_here():
    assert {type(value).__name__ for value in OBJECTS} >= set(parameters.__all__)


@every("value", OBJECTS)
def test_an_object_is_cloned_pickled_copied_and_shown_with_its_parameters(value):
    for again in (clone(value), pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):  # noqa: S301
        assert type(again) is type(value)
        assert (again.get_params(), repr(again)) == (value.get_params(), repr(value))
    assert isinstance(value, ParameterObject)
    assert all(f"{name}=" in repr(value) for name in value.get_params())
    value.check()


MISTAKES = [
    (Adam, {"betas": [(0.9, 1.0), (0.9,)], "decay": [(2.0, 10), "linear"], "ema": [1.0], "max_norm": [0.0]}),
    (Adam, {"nonfinite": ["ignore"]}),
    (Bridge, {"levels": ["straight"], "weights": [3]}),
    (partial(Checkpoint, path="here"), {"path": [3], "every": [0]}),
    (Entropic, {"weight": [-1.0]}),
    (Pilot, {"rule": ["laplace"], "budget": [-1], "max_score_calls": [0, 1.5], "weight": [-1.0]}),
    (Scale, {"form": ["vector"], "floor": [-1.0]}),
]


@every("make, wrong", MISTAKES)
def test_a_mistake_is_named_with_its_object(make, wrong):
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        odd = make(**{name: value})
        refused(ValueError, rf"{name}[`'].* of {type(odd).__name__}", odd.check)


def test_a_mistake_is_told_by_fit():
    mistakes = {
        "optimizer": Adam(ema=2.0), "whiten": Pilot(budget=-1), "scale": Scale(floor=-1.0),
        "early_stopping": -0.1, "checkpoint": Checkpoint("here", every=0), "terms": [Entropic(-1.0)],
    }  # fmt: skip
    for name, value in mistakes.items():
        with pytest.raises(ValueError, match="must be"):
            KSIVIApproximator(**{name: value}).fit(Banana())
    refused(ValueError, "`scale` of SIVI cannot be a network", lambda: SIVI(scale=Scale("network")).fit(Banana()))
    with pytest.raises(TypeError, match=r"`terms` must hold objects of skksivi\.terms"):
        KSIVIApproximator(terms=[0.3]).fit(Banana())


SHORTHANDS = {
    "optimizer__ema": None, "whiten__budget": 5000, "scale__floor": 0.01, "hidden_layer_sizes__linear_skip": False,
    "checkpoint__every": 10,
}  # fmt: skip


@every("name", list(SHORTHANDS))
def test_a_part_of_a_shorthand_can_be_set(name):
    q = KSIVIApproximator(checkpoint="here").set_params(**{name: SHORTHANDS[name]})
    assert q.get_params()[name] == SHORTHANDS[name]
    assert clone(q).get_params()[name] == SHORTHANDS[name]
    together = KSIVIApproximator().set_params(checkpoint="here", **{name: SHORTHANDS[name]})
    assert together.get_params()[name] == SHORTHANDS[name]


def test_the_rest_of_a_shorthand_stays():
    assert SIVI().set_params(optimizer__decay=None).optimizer.get_params() == {
        "betas": (0.9, 0.999), "decay": None, "ema": None, "max_norm": None, "nonfinite": "raise", "warm_up": 0,
    }  # fmt: skip
    SIVI().set_params(optimizer__ema=0.5)
    assert SIVI().set_params(optimizer__decay=None).optimizer.ema is None  # an object of its own
    assert SIVI().optimizer == "adam"
    assert KSIVIApproximator(whiten="diagonal").set_params(whiten__budget=7).whiten.rule == "diagonal"
    assert HKSIVIApproximator(bridge="cosine").set_params(bridge__weights=[1] * 5).bridge.levels == "cosine"
    assert SIVI(annealing="linear").set_params(annealing__start=0.2).annealing.start == 0.2
    for kernel in ("gaussian", Gaussian()):
        assert KSIVIApproximator(kernel=kernel).set_params(kernel__bandwidth=2.0).kernel.bandwidth == 2.0


@every("name", ["whiten__size", "optimizer__rate", "kernel__width"])
def test_an_unknown_part_is_named_and_nothing_changes(name):
    q, told = KSIVIApproximator(), f"Invalid parameter '{name.partition('__')[2]}' for estimator"
    refused(ValueError, told, lambda: q.set_params(max_iter=7, **{name: 1}))
    assert q.get_params() == KSIVIApproximator().get_params()


@every("name", ["n_iter", "scales__floor", "whitening__budget"])
def test_an_unknown_parameter_is_named(name):
    told = f"Invalid parameter '{name.partition('__')[0]}' for estimator"
    refused(ValueError, told, lambda: KSIVIApproximator().set_params(**{name: 5}))


def test_baselines_of_points_take_a_pilot():
    q = SVGD(whiten=Pilot(), n_particles=10, max_iter=2, random_state=0).fit(GaussianTarget())
    assert q.sample(3).shape == (3, 2)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_shorthand_means_its_object():
    short = {"whiten": "auto", "scale": "constant", "optimizer": "adam", "annealing": "linear"}
    whole = dict(zip(short, (Pilot(), Scale(), Adam(warm_up=200), annealing.Linear()), strict=True))
    fits = [KSIVIApproximator(mixing="normal", **TINY, **own).fit(GaussianTarget()) for own in (short, whole)]
    assert fits[0].n_iter_ == TINY["max_iter"]
    np.testing.assert_array_equal(*(q.sample(5) for q in fits))


@every("cls", [SIVI, SVGD])
def test_a_shorthand_that_has_no_parts_says_so(cls):
    refused(ValueError, "`whiten` is 'laplace', which has no parameters", lambda: cls().set_params(whiten__budget=5))
    assert cls(whiten="auto").set_params(whiten__budget=5).whiten.budget == 5


@every("q", [q for q in APPROXIMATORS if "whiten" in q.get_params()])
def test_every_approximator_checks_its_pilot(q):
    for whiten in (Pilot("x"), Pilot(budget=-5), Pilot(weight="w")):
        with pytest.raises(ValueError, match="parameter of Pilot"):
            clone(q).set_params(whiten=whiten).fit(Banana())


def test_a_term_of_ones_own():
    class Shift(Term):
        def gradient(self, draws, w):
            return w * (draws.x - 1)

    class Bad(Shift):
        def gradient(self, draws, w):
            return super().gradient(draws, w)[:, :1]

    assert KSIVIApproximator(terms=[Shift(0.1)], **TINY).fit(GaussianTarget()).sample(3).shape == (3, 2)
    with pytest.raises(ValueError, match="`gradient` of Bad returned shape"):
        KSIVIApproximator(terms=[Bad()], **TINY).fit(GaussianTarget())
    refused(TypeError, "abstract", Term)


#: Values that are out of place nearly everywhere.
ODD = (
    "rbf", "", -1, -0.5, math.nan, math.inf, True, 10**400, 2**70, {}, (1,), (0, -1), ("a", "b"), [[1.0]],
    np.zeros(3), (np.zeros(2), np.zeros((2, 2))), object(), object, lambda: 1, lambda t: -1.0,
)  # fmt: skip

#: Objects that some parameters may be, by their name.
NESTED = {
    "whiten": [Pilot], "optimizer": [Adam], "scale": [Scale], "bridge": [Bridge], "hidden_layer_sizes": [Network],
    "kernel": [*kernels.KERNELS.values()], "mixing": [mixing.StudentT, mixing.GaussianMixture],
    "annealing": [annealing.Linear], "terms": [Entropic],
}  # fmt: skip


def odd_objects(name):
    """Yield objects for a parameter of this name, one parameter of each out of place."""
    for cls in NESTED.get(name, []):
        fixed = {"means": [[0.0, 0.0]]} if cls is mixing.GaussianMixture else {}
        for inner in signature(cls).parameters:
            for odd in ODD:
                made = cls(**{**fixed, inner: odd})
                yield (made,) if name == "terms" else made


@pytest.mark.parametrize("q", APPROXIMATORS, ids=lambda q: type(q).__name__)
@pytest.mark.filterwarnings("ignore")
def test_what_is_refused_is_refused_before_the_score_is_asked(q):
    """A later error is one of the numbers of the fit, not of the parameter."""
    q, n_asked, late, n_refused = short(q), 0, [], 0

    def score_fn(x):
        nonlocal n_asked
        n_asked += 1
        if n_asked > 40:  # a fit that has got so far is not to run to its end
            raise KeyboardInterrupt
        return -x

    for name in q.get_params(deep=False).keys() - {"checkpoint", "verbose"}:
        # every approximator checks these objects in the same way
        for odd in (*ODD, *(odd_objects(name) if isinstance(q, HKSIVIApproximator) or name == "terms" else ())):
            n_asked = 0
            changed = clone(q)
            setattr(changed, name, odd)
            try:
                changed.fit(score_fn, n_features=2)
            except (FloatingPointError, KeyboardInterrupt):
                continue
            except (TypeError, ValueError) as error:
                n_refused += 1
                if n_asked:
                    late.append((name, odd, error))
    assert not late
    assert n_refused > 5 * len(q.get_params(deep=False))


USES = [
    ("init", lambda values: KSIVIApproximator(init=values).fit(Banana())),
    ("whiten", lambda values: KSIVIApproximator(whiten=(values, np.eye(2))).fit(Banana())),
    ("scales", lambda values: mixing.GaussianMixture(np.eye(2), values).build(2)),
    ("sample_weight", lambda values: check_sample_weight(values, 2)),
]


@every("values", [["1", "2"], [1j, 2], [10**400, 1], np.zeros(2, "M8[D]")])
@every("name, use", USES)
def test_what_is_no_real_number_is_refused_by_name(name, use, values):
    refused(TypeError, f"`{name}` must hold real numbers", use, values)


def test_rows_of_different_lengths_are_refused_by_name():
    with pytest.raises(ValueError, match="`init` must hold numbers, in rows of one length"):
        KSIVIApproximator(init=[[0.0], [0.0, 1.0]]).fit(Banana())
    with pytest.raises(ValueError, match="`sample_weight` must hold numbers, in rows of one length"):
        check_sample_weight([[1], [1, 2]], 2)
