"""The stages of a fit to many posteriors, within a budget of calls."""

from __future__ import annotations

import copy
import logging
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from skksivi._weights import Certificate, cheap_certificate
from skksivi.amortized._contexts import Rows, take
from skksivi.amortized._family import Conditional
from skksivi.amortized._laplace import Laplaces, laplaces
from skksivi.amortized._paired import PairedScore
from skksivi.amortized._training import (
    FEW,
    Pairs,
    Walk,
    discrepancies,
    fit_mixture,
    fit_places,
    places_of_parameters,
    start_mixture,
)
from skksivi.parameters import Adam
from skksivi.score._tally import SpentError
from skksivi.training._loop import Objective, minimise

LOGGER = logging.getLogger("skksivi")

#: Contexts of the first round of mode searches, and how many times as many the next one has.
N_FIRST, GROWTH = 16, 2

#: Shares of the budget: for scores at given parameters; of what is left for mode searches; kept for the end.
OF_PARAMETERS, OF_MODES, KEPT = 0.5, 0.5, 0.1

#: Calls of a mode search, in units of those of a Newton step, as long as none is known.
N_GUESSED = 6

#: The held-out divergence per feature, in nats, from which on more modes are not worth their calls, and the share of
#: the last one that it has to fall below, else.
SETTLED, FALLEN = 2e-3, 0.9

#: Contexts along the path gradient and draws of each in an iteration; iterations, at least and at most.
N_PARALLEL, N_DRAWS, FEWEST, MOST = 32, 16, 40, 1000

#: Contexts and draws by which a trained family is compared with its start.
N_JUDGED, N_JUDGED_DRAWS = 16, 64

#: Contexts at which a certificate is taken, at most, and the scores of one.
N_CERTIFIED, N_SCORES = 16, 1000

#: The share of contexts that are held out.
HELD_OUT = 0.2


class Settings(NamedTuple):
    """What the parameters of the estimator say."""

    n_components: int
    hidden: tuple[int, ...]
    sigma: float
    summary: nn.Module | None
    learning_rate: float
    max_score_calls: int
    seed: int


class Outcome(NamedTuple):
    """What a fit has learned beside its family."""

    certificates: list[Certificate]
    divergence: float
    trained: bool
    n_searched: int
    n_lost: int
    is_spent: bool


class Stages:
    """A fit under way.

    Parameters
    ----------
    settings : Settings
    score : PairedScore
    y : Rows
        Contexts.
    x : Tensor of shape (m, d) or None
        The parameters that made them, if they are known.
    generator : torch.Generator
    """

    def __init__(
        self, settings: Settings, score: PairedScore, y: Rows, x: Tensor | None, generator: torch.Generator
    ) -> None:
        self.settings, self.score, self.y, self.x, self.generator = settings, score, y, x, generator
        self.tally = score.tally
        order = torch.randperm(len(y), generator=generator, device=generator.device)
        n_held = round(HELD_OUT * len(y))
        self.held_out, self.own = order[:n_held], order[n_held:]
        summary = copy.deepcopy(settings.summary)
        with torch.no_grad():
            n_context = (y if summary is None else summary(take(y, order[:2]))).shape[1]
        self.family = Conditional(
            score.n_features,
            n_context,
            settings.n_components,
            settings.hidden,
            settings.sigma,
            None if summary is None else summary.double(),
            generator,
        ).to(score.template.device)
        self.family.standardise(y)
        self.n_searched = self.n_lost = 0

    @property
    def left(self) -> int:
        """Calls that are left."""
        return self.settings.max_score_calls - self.tally.total

    def run(self) -> Outcome:
        """Go through the stages.

        Raises
        ------
        ValueError
            No mode was found, and there are no parameters.
        """
        self.tally.limit = self.settings.max_score_calls
        pairs = self._pairs()
        self.tally.begin("modes")
        divergence = self._places(pairs)
        if pairs is not None:
            self.tally.begin("likelihood")
            self._mixture(pairs)
        self.tally.begin("training")
        trained = self._train()
        self.tally.begin("certificate")
        certificates = self._certificates()
        self.family.requires_grad_(False)
        is_spent, self.tally.limit = self.tally.is_spent, None
        self.tally.end()
        return Outcome(certificates, divergence, trained, self.n_searched, self.n_lost, is_spent)

    def _pairs(self) -> Pairs | None:
        """Return the parameters with the scores there, as far as the budget goes."""
        if self.x is None:
            return None
        self.tally.begin("scores")
        s = torch.full_like(self.x, math.nan)
        index = self.own[: int(OF_PARAMETERS * self.left)]
        s[index] = self.score(self.x[index], take(self.y, index))
        return Pairs(self.x, s)

    # Modes

    def _places(self, pairs: Pairs | None) -> float:
        """Search modes in rounds and regress them; return the last held-out divergence per feature."""
        stop = self.tally.total + int(OF_MODES * self.left)
        found: Laplaces | None = None
        done, n, cost, before, divergence = 0, N_FIRST, N_GUESSED * (self.score.n_features + 1), math.inf, math.nan
        while done < len(self.own) and not before <= SETTLED:
            n = min(n, len(self.own) - done, max((stop - self.tally.total) // cost, 0 if done else 2))
            if n < min(4, len(self.own)) and done:
                break
            index, spent = self.own[done : done + n], self.tally.total
            new = laplaces(self.score, take(self.y, index), index, self._starts(index, found))
            cost = max(1, (self.tally.total - spent) // max(n, 1))
            found = new if found is None else found.joined(new)
            done, n = done + n, GROWTH * n
            self.n_searched, self.n_lost = done, done - len(found.m)
            if len(found.m) == 0:
                continue
            now = fit_places(self.family, self.y, found, self.settings.learning_rate, self.generator)
            divergence = now if math.isfinite(now) else divergence
            LOGGER.info("modes of %d contexts, held-out divergence %.2g nats a feature", len(found.m), now)
            if len(found.m) >= 4 * FEW and now > FALLEN * before and now < 1:
                break
            before = now
        if (found is None or not len(found.m)) and pairs is None:
            raise ValueError(
                f"`score_fn` has no mode that was found for any of {done} contexts, by Newton steps from zero: scale "
                "the parameters so that the posteriors are within some units of zero, or give `parameters`."
            )
        return divergence

    def _starts(self, index: Tensor, found: Laplaces | None) -> Tensor:
        """Return where mode searches start: what is predicted or, before there are modes, the parameters or zero."""
        if found is not None and len(found.m):
            with torch.no_grad():
                return self.family.places(self.family.features(take(self.y, index))).m
        if self.x is not None:
            return self.x[index].clone()
        return torch.zeros(len(index), self.score.n_features, dtype=torch.float64, device=index.device)

    # Mixture

    def _mixture(self, pairs: Pairs) -> None:
        """Fit maps and a mixture by parameters, from the modes or from a regression of the parameters."""
        with torch.no_grad():
            by_parameters = copy.deepcopy(self.family)
            places_of_parameters(by_parameters, self.y, pairs.x)
            candidates = [by_parameters] if self.n_lost == self.n_searched else [self.family, by_parameters]
            values = [start_mixture(f, self.y, pairs.x, self.settings.seed) for f in candidates]
        self.family = candidates[values.index(max(values))]
        value = fit_mixture(self.family, self.y, pairs, self.settings.learning_rate, self.generator)
        LOGGER.info("likelihood of the parameters: held-out loss %.3g", value)

    # Path gradient

    def _train(self) -> bool:
        """Train along the path gradient; tell whether that was better than the start."""
        judged = self.held_out[:N_JUDGED] if len(self.held_out) else self.own[:N_JUDGED]
        budget = int(self.left - KEPT * self.settings.max_score_calls) - 2 * len(judged) * N_JUDGED_DRAWS
        n_contexts = min(N_PARALLEL, len(self.own), budget // (FEWEST * N_DRAWS))
        if n_contexts < 4:
            return False
        start = copy.deepcopy(self.family)
        walk = Walk(self.family, self.score, self.y, self.own, n_contexts, N_DRAWS, self.generator)
        n_iter = min(MOST, budget // (n_contexts * N_DRAWS))
        try:
            before = self._judge(start, start, judged)
            run = minimise(
                Objective(walk),
                self.family,
                Adam(warm_up=n_iter // 10, nonfinite="skip", max_norm=5.0),
                self.generator,
                learning_rate=self.settings.learning_rate,
                max_iter=n_iter,
            )
            if run.ended_by is not None:
                raise run.ended_by
            after = self._judge(self.family, start, judged)
        except (SpentError, FloatingPointError):
            self.family = start
            return False
        LOGGER.info("%d iterations: held-out KSD^2 %.3g, before %.3g", n_iter, after.mean(), before.mean())
        better = bool(after.mean() < before.mean())
        if not better:
            self.family = start
        return better

    def _judge(self, family: Conditional, start: Conditional, judged: Tensor) -> Tensor:
        y = take(self.y, judged)
        with torch.no_grad():
            places = start.places(start.features(y))
        noise = torch.Generator(self.generator.device).manual_seed(self.settings.seed)
        return discrepancies(family, places, self.score, y, N_JUDGED_DRAWS, noise).nan_to_num(math.inf)

    # Certificates

    def _certificates(self) -> list[Certificate]:
        """Return certificates of held-out contexts, as far as the budget goes."""
        n = min(N_CERTIFIED, len(self.held_out), self.left // N_SCORES)
        found = []
        for i in self.held_out[:n]:
            y = take(self.y, i[None])
            with torch.no_grad():
                layer = self.family.at(self.family.features(y), self.settings.seed, torch.float64)
            certificate = cheap_certificate(layer, self.score.rows(y), self.settings.seed)
            if certificate is not None:
                found.append(certificate)
        return found
