"""What a fit costs, from the recorded runs of other studies: score calls and seconds.

    python benchmarks/costs.py --manual doc

Nothing is run. The default fits are those of defaults.json and shapes.json, the trained ones those of training.json
that have the default objective.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from _harness import command, read, rst, show_figure, show_tables

HERE = Path(__file__).parent


class Fit(NamedTuple):
    """One fit: the study, the number of parameters, score calls and seconds."""

    study: str
    d: int
    calls: int
    seconds: float


STYLES = {"31 posteriors": ("#0072B2", "o"), "hard shapes": ("#E69F00", "^"), "trained": ("#88CCEE", "s")}


def fits() -> list[Fit]:
    """Return the recorded fits."""
    sizes = {row["case"]: row["d"] for row in document("frontier")}
    plain = (
        Fit("31 posteriors", sizes[row["case"]], row["score_calls"], row["seconds"])
        for row in document("defaults")
        if row["method"] == "defaults"
    )
    shaped = (
        Fit("hard shapes", int(found[1]), row["calls"], row["seconds"])
        for row in document("shapes")
        if (found := re.search(r"d = (\d+)", row["case"])) and "range_min" not in row  # easy ones, as it turns out
    )
    trained = (
        Fit("trained", row["d"], row["calls"], row["seconds"])
        for row in document("training")
        if row["method"] == "path gradient"
    )
    return [*plain, *shaped, *trained]


def document(name: str) -> list[dict]:
    """Return the rows of a recorded study."""
    return read(HERE / f"{name}.json")["rows"]


def table(some: Iterable[Fit]) -> str:
    """Return medians and nine tenths by study and number of parameters."""
    heads = ("Fits", "Parameters", "Number", "Calls, median", "Calls, 90%", "Seconds, median", "Seconds, 90%")
    lines = []
    for study in STYLES:
        for low, high in ((1, 5), (6, 20), (21, 500)):
            of = [fit for fit in some if fit.study == study and low <= fit.d <= high]
            if of:
                calls, seconds = (np.quantile([getattr(a, key) for a in of], [0.5, 0.9]) for key in Fit._fields[2:])
                numbers = (*(f"{x:,.0f}" for x in calls), *(f"{x:.1f}" for x in seconds))
                lines.append((study, f"{low} to {high}", str(len(of)), *numbers))
    return rst(heads, lines)


def draw(some: Iterable[Fit]) -> plt.Figure:
    """Draw calls against the number of parameters, and seconds against calls."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), sharey=False, layout="constrained")
    for study, (colour, marker) in STYLES.items():
        d, calls, seconds = np.array([fit[1:] for fit in some if fit.study == study]).T
        style = {"ls": "", "marker": marker, "ms": 4.5, "alpha": 0.55, "color": colour, "mew": 0}
        left.plot(d * np.exp(0.12 * np.linspace(-1, 1, len(d))), calls, **style, label=study)
        right.plot(calls, seconds, **style)
    left.set(xscale="log", yscale="log", xlabel="parameters", ylabel="score calls of a fit")
    right.set(xscale="log", yscale="log", xlabel="score calls of a fit", ylabel="seconds on one thread")
    for ax in (left, right):
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


def main() -> None:
    args, some = command(__doc__).parse_args(), fits()
    show_tables(args, {"costs": table(some)})
    show_figure(args, "costs", partial(draw, some))


if __name__ == "__main__":
    main()
