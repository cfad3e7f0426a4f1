"""The stages of a fit to many posteriors, within a budget of calls."""

from __future__ import annotations

import copy
import logging
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from skksivi.amortized._contexts import Laplaces, PairedScore, Rows, joined, laplaces, take
from skksivi.amortized._family import Conditional, features_of
from skksivi.amortized._training import (
    Pairs,
    Split,
    Terms,
    fit_places,
    fit_scores,
    log_probs,
    places_of_parameters,
    split,
    start_mixture,
)
from skksivi.families import cheap_certificate
from skksivi.judge import Certificate

LOGGER = logging.getLogger("skksivi")

#: What counts in the fit of a Gaussian, and in that of a mixture.
BY_SCORES, BY_LIKELIHOOD = Terms(likelihood=1e-3, scores=1.0), Terms(likelihood=1.0, scores=0.03)

#: Calls of a mode search, in units of those of a Newton step, as long as none is known.
N_GUESSED = 6


class Settings(NamedTuple):
    """What the parameters of the estimator say."""

    n_components: int
    hidden: tuple[int, ...]
    summary: nn.Module | None
    learning_rate: float
    max_score_calls: int
    seed: int


class Outcome(NamedTuple):
    """What a fit has learned beside its family."""

    certificates: list[Certificate]
    n_uncertified: int
    divergence: float
    n_searched: int
    n_lost: int


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
        self.own, self.held_out = split(len(y), generator)
        summary = None if settings.summary is None else copy.deepcopy(settings.summary).double()
        with torch.no_grad():
            n_context = features_of(summary, take(y, self.own[:2])).shape[1]
        family = Conditional(score.n_features, n_context, settings.hidden, summary, generator)
        self.family = family.to(score.template.device)
        self.family.standardise(y)
        self.n_searched = self.n_lost = 0
        self.divergence = math.nan

    @property
    def left(self) -> int:
        return self.settings.max_score_calls - self.tally.total

    def run(self) -> Outcome:
        """Go through the stages.

        Raises
        ------
        ValueError
            No mode was found, and there are no parameters.
        """
        self.tally.limit = self.settings.max_score_calls
        self.tally.begin("modes")
        self.divergence = self._places()
        self.tally.begin("scores")
        if self.x is None:
            self._match_draws()
        else:
            self._match_parameters(self.x)
        self.tally.begin("certificate")
        certificates = self._certificates()
        self.family.requires_grad_(False)
        self.tally.limit = None
        self.tally.end()
        found = [c for c in certificates if c is not None]
        n_uncertified = len(certificates) - len(found)
        return Outcome(found, n_uncertified, self.divergence, self.n_searched, self.n_lost)

    # Modes

    def _places(self) -> float:
        """Search modes in rounds and regress them; return the last held-out divergence per feature."""
        start, budget = self.tally.total, self.left
        # a smaller share of the budget where parameters are known
        stop = start + int((0.4 if self.x is None else 0.2) * budget)
        found: Laplaces | None = None
        done, n, cost, before, divergence = 0, 16, N_GUESSED * (self.score.n_features + 1), math.inf, math.nan
        # held-out nats a feature, from which on more modes are not worth their calls
        enough = 2e-3 if self.x is None else 2e-2
        while done < len(self.own) and not before <= enough:
            n = min(n, len(self.own) - done, max((stop - self.tally.total) // cost, 0 if done else 2))
            if n < min(4, len(self.own)) and done:
                break
            index, spent = self.own[done : done + n], self.tally.total
            new = laplaces(self.score, take(self.y, index), index, self._starts(index, found))
            cost = max(1, (self.tally.total - spent) // max(n, 1))
            found = new if found is None else found.joined(new)
            done, n = done + n, 2 * n
            self.n_searched, self.n_lost = done, done - len(found.m)
            if len(found.m) == 0:
                continue
            now = fit_places(self.family, self.y, found, self.settings.learning_rate, self.generator)
            divergence = now if math.isfinite(now) else divergence
            LOGGER.info("modes of %d contexts, held-out divergence %.2g nats per feature", len(found.m), now)
            if len(found.m) >= 40 and now > 0.9 * before:  # regression gets no better
                break
            before = now
            if self.x is not None and self._beats_parameters(self.x):
                stop = start + int(0.7 * budget)  # modes say more than parameters
        if (found is None or not len(found.m)) and self.x is None:
            raise self._without_modes()
        return divergence

    def _without_modes(self) -> ValueError:
        """Return what ends a fit that has neither modes nor parameters."""
        if self.tally.is_spent:
            return ValueError(
                f"`max_score_calls` is {self.settings.max_score_calls}, and {self.tally.total} were spent before "
                f"a mode was found. A search takes some {N_GUESSED * (self.score.n_features + 1)}: raise it."
            )
        return ValueError(
            f"`score_fn` has no mode that was found for any of {self.n_lost} contexts, by Newton steps from zero: "
            "scale the parameters so that the posteriors are within some units of zero, or give `parameters`."
        )

    def _beats_parameters(self, x: Tensor) -> bool:
        """Tell whether the Gaussians of the modes have more held-out likelihood than a regression of parameters."""
        held_out = take(self.y, self.held_out)
        plain = copy.deepcopy(self.family)
        places_of_parameters(plain, take(self.y, self.own), x[self.own])
        ours, theirs = (log_probs(family, held_out, x[self.held_out]) for family in (self.family, plain))
        return bool(ours.mean() > theirs.mean())

    def _starts(self, index: Tensor, found: Laplaces | None) -> Tensor:
        """Return where mode searches start: what is predicted or, before there are modes, the parameters or zero."""
        if found is not None and len(found.m):
            with torch.no_grad():
                return self.family.places(self.family.features(take(self.y, index))).m
        if self.x is not None:
            return self.x[index].clone()
        return torch.zeros(len(index), self.score.n_features, dtype=torch.float64, device=index.device)

    # Scores

    def _match_draws(self) -> None:
        """Fit the family to scores at its draws."""
        n = min(int(0.25 * self.left), 20_000)
        if n >= 500:
            self._matched(self.family, *self._drawn(n), BY_SCORES)

    def _match_parameters(self, x: Tensor) -> None:
        """Fit the family to scores at the parameters x (m, d) that made the contexts, and to their likelihood.

        If as many scores again are left, they go to draws of what is fitted, for another fit to all.
        """
        n = min(int(0.85 * self.left), 60_000)
        y, pairs, rows = self._given(x, n)
        by_parameters = copy.deepcopy(self.family)
        places_of_parameters(by_parameters, take(y, rows.train), pairs.x[rows.train])
        found = [by_parameters] if self.n_lost == self.n_searched else [self.family, by_parameters]
        values = [log_probs(f, take(y, rows.held_out), pairs.x[rows.held_out]).mean() for f in found]
        found = found[: 1 + values.index(max(values))]
        candidates = [*found, self._matched(copy.deepcopy(found[-1]), y, pairs, rows, BY_SCORES)]
        if self.settings.n_components > 1:
            started = [f.with_components(self.settings.n_components, self.generator) for f in found]
            values = [start_mixture(f, take(y, rows.train), pairs.x[rows.train], self.settings.seed) for f in started]
            chosen = started[values.index(max(values))]
            candidates.append(self._matched(chosen, y, pairs, rows, BY_LIKELIHOOD))
        self.family = self._chosen(candidates, y, pairs, rows)
        if (more := n - len(rows.train)) >= len(rows.train):
            terms = BY_SCORES if self.family.n_components == 1 else BY_LIKELIHOOD
            again = self._matched(copy.deepcopy(self.family), *self._extended(y, pairs, rows, more), terms)
            self.family = self._chosen([self.family, again], y, pairs, rows)

    def _chosen(self, candidates: list[Conditional], y: Rows, pairs: Pairs, rows: Split) -> Conditional:
        """Return the one of most held-out likelihood, or the first unless that is more by a standard error."""
        held_out, x = take(y, rows.held_out), pairs.x[rows.held_out]
        values = torch.stack([log_probs(f, held_out, x) for f in candidates])
        chosen = int(values.mean(1).argmax())
        gain = values[chosen] - values[0]
        if not gain.mean() > gain.std() / math.sqrt(len(gain)):
            chosen = 0
        LOGGER.info("family %d of %d, held-out log-likelihood %.3g", chosen + 1, len(values), values[chosen].mean())
        return candidates[chosen]

    def _matched(self, family: Conditional, y: Rows, pairs: Pairs, rows: Split, terms: Terms) -> Conditional:
        fit_scores(family, y, pairs, rows, terms, self.settings.learning_rate, self.generator)
        return family

    def _given(self, x: Tensor, n: int) -> tuple[Rows, Pairs, Split]:
        """Return all pairs of parameters x and contexts, with scores at no more than n of them."""
        s, index = torch.full_like(x, math.nan), self.own[:n]
        if len(index):
            s[index] = self.score(x[index], take(self.y, index))
        held_out = self.held_out if len(self.held_out) else self.own
        return self.y, Pairs(x, s, torch.ones_like(x[:, 0])), Split(self.own, held_out)

    def _extended(self, y: Rows, pairs: Pairs, rows: Split, n: int) -> tuple[Rows, Pairs, Split]:
        """Return pairs together with n draws of the family for the training."""
        y_drawn, drawn, _ = self._drawn(n)
        both = Pairs(*(torch.cat(two) for two in zip(pairs, drawn, strict=True)))
        new = torch.arange(len(pairs.x), len(both.x), device=rows.train.device)
        return joined(y, y_drawn), both, Split(torch.cat([rows.train, new]), rows.held_out)

    def _drawn(self, n: int) -> tuple[Rows, Pairs, Split]:
        """Return n draws of the family, with their scores, and with the contexts that they belong to."""
        order = torch.randint(len(self.own), (n,), generator=self.generator, device=self.own.device)
        y = take(self.y, self.own[order])
        with torch.no_grad():
            x = self.family.draws(self.family.features(y), 1, self.generator)[:, 0]
        return y, Pairs(x, self.score(x, y), torch.zeros_like(x[:, 0])), split(n, self.generator)

    # Certificates

    def _certificates(self) -> list[Certificate | None]:
        """Return certificates of held-out contexts, as far as the budget goes, None where there is none."""
        found = []
        for i in self.held_out[: min(16, self.left // 1000)]:  # a certificate takes 1000 scores
            y = take(self.y, i[None])
            with torch.no_grad():
                layer = self.family.at(self.family.features(y), self.settings.seed, torch.float64)
            found.append(cheap_certificate(layer, self.score.rows(y), self.settings.seed))
        return found
