"""The cells of KSIVI and HKSIVI in the paper's tables: its value, ours in its settings, and whether it is reached."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
from _harness import rst

from paper._base import WIDTHS

RESULTS = Path(__file__).parent / "results"
#: By the name of a table: the file of its results, and the methods whose values are quality, each with its twin in
#: plain autograd.
OURS = {
    "waveform": ("waveform", {"KSIVI 10k": "plain 10k", "KSIVI 20k": "plain 20k"}),
    "diffusion": ("bounded", {"KSIVI, U-stat.": "plain, U-stat.", "KSIVI, vanilla": None}),
    "bnn": ("bnn_legacy", {"KSIVI": "plain"}),
    "student": (
        "student",
        {"KSIVI, Gaussian": "plain, Gaussian", "KSIVI, Riesz l1": "plain, Riesz", "HKSIVI": "plain, HKSIVI"},
    ),
}
#: The paper's standard deviations of N_RUNS runs, where it prints them, in the order of cases and metrics.
SDS = {
    "KSIVI": (0.02, 0.01, 0.03, 0.01, 0.01, 0, 0, 0, 0.05, 0.03, 0.01, 0),
    "KSIVI, Gaussian": (0.03, 0.08, 0.09),
    "KSIVI, Riesz l1": (0.01, 0.04, 0.05),
    "HKSIVI": (0.01, 0.04, 0.05),
}
N_RUNS = 10
#: Learning rates at which the table of widths has the waveform and the yacht data.
RATES = ("0.0001", "0.001", "0.005"), ("0.0001", "0.001")
#: The methods and dimensions of the table of tasks.
METHODS, DIMENSIONS = ("ours, start", "ours, ksivi", "Laplace", "floor"), ("50", "100", "200")
AT, NOISE, ABOVE = "at or below", "within noise", "above"
#: A run has diverged if its value is so many times the paper's.
MANY_TIMES = 10


def rows_of(file):
    return json.loads((RESULTS / f"{file}.json").read_text())["rows"]


def has_diverged(value, paper):
    return value is None or value > MANY_TIMES * paper


def verdict(values, paper, sd):
    """Say whether a mean over seeds is at most the paper's value, or above by at most two standard errors.

    With a run that has diverged it is above, for the mean and its error then say little.
    """
    if any(has_diverged(value, paper) for value in values):
        return ABOVE
    if np.mean(values) <= paper:
        return AT
    se = np.hypot(standard_error(values), sd / N_RUNS**0.5) if len(values) > 1 else 0
    return NOISE if np.mean(values) - paper <= 2 * se else ABOVE


def standard_error(values):
    return np.std(values, ddof=1) / np.sqrt(len(values))


def cells(tables):
    """Yield table, case and metric, method, the paper's value and sd, ours by seed, and the plain loop's."""
    for name, (file, methods) in OURS.items():
        table, rows = tables[name], rows_of(file)
        for i, case in enumerate(table.cases):
            for k, metric in enumerate(table.metrics, i * len(table.metrics)):
                for method, plain in methods.items():
                    paper = table.of_paper(case, metric, method)
                    own, twin = (
                        [
                            row["values"][k % len(table.metrics)]
                            for row in rows
                            if (row["case"], row["method"]) == (case, m)
                        ]
                        for m in (method, plain)
                    )
                    if paper is not None and own:
                        yield (
                            name,
                            f"{case} {metric}".strip(),
                            method,
                            paper,
                            SDS[method][k] if method in SDS else 0,
                            own,
                            twin,
                        )


def in_words(values, paper):
    """Return the mean, its standard error and the number of seeds, of the runs that have not diverged."""
    kept = [value for value in values if not has_diverged(value, paper)]
    se = f" +- {standard_error(kept):.1g}" if len(kept) > 1 else ""
    mean = f"{np.mean(kept):.3g}{se} ({len(kept)})" if kept else ""
    gone = f"{len(values) - len(kept)} diverged" if len(kept) < len(values) else ""
    return ", ".join(filter(None, (mean, gone)))


def table_of_cells(tables):
    """Return the table of the manual, below its summary in a sentence."""
    lines, count = [], Counter()
    for name, cell, method, paper, sd, own, twin in cells(tables):
        ends = verdict(own, paper, sd)
        count[ends] += 1
        beside = f"{in_words(twin, paper)}, {verdict(twin, paper, sd)}" if twin else ""
        lines.append((name, cell, method, f"{paper:.3g}", in_words(own, paper), ends, beside))
    summary = (
        f"{count[AT] + count[NOISE]} of {count.total()} values are reached: {count[AT]} {AT}, {count[NOISE]} {NOISE}."
    )
    return f"{summary}\n\n" + rst(("Table", "Cell", "Method", "Paper", "Here", "Verdict", "Plain loop"), lines)


def table_of_widths():
    """Return sliced W2 on the waveform and NLL on the yacht data: lines are widths, columns learning rates."""
    of = {
        (row["case"], row["method"], row["seed"]): row["values"][-1]
        for file in OURS
        for row in rows_of(OURS[file][0])
    }
    heads = [f"{data}, {rate}" for data, rates in zip(("Waveform", "Yacht"), RATES, strict=True) for rate in rates]
    lines = []
    for end, width in {"": "median", **WIDTHS}.items():
        jobs = [(rate, f"KSIVI 10k{end}", 0) for rate in RATES[0]]
        jobs += [("yacht", f"KSIVI{end} @ {rate}", 0) for rate in RATES[1]]
        lines.append((width, *(r"\-" if of.get(job) is None else f"{of[job]:.2f}" for job in jobs)))
    return rst(("Width", *heads), lines)


def table_of_tasks(tables):
    """Return the distance of the start alone, of `method="ksivi"` and of the paper's settings, task by task."""
    waveform, diffusions = (
        ("waveform", "0.001", "KSIVI 20k"),
        [("diffusion", d, "KSIVI, vanilla") for d in DIMENSIONS],
    )
    lines = []
    for name, case, ours in (waveform, *diffusions):
        rows = [row for row in rows_of(OURS[name][0]) if row["case"] in (case, "any")]
        of = {m: [row for row in rows if row["method"] == m] for m in (*METHODS, ours)}
        values = {m: f"{np.mean([row['values'][0] for row in some]):.4f}" for m, some in of.items()}
        calls = {m: f"{np.mean([row['score_points'] for row in of[m]]) / 1000:,.0f}k" for m in (*METHODS[:2], ours)}
        paper = f"{tables[name].of_paper(case, tables[name].metrics[0], ours):.4f}"
        with_calls = (f"{values[m]}, {calls[m]}" for m in (*METHODS[:2], ours))
        lines.append(
            (f"{name} {case if name == 'diffusion' else ''}", *with_calls, paper, *map(values.get, METHODS[2:]))
        )
    heads = "Task", "Start alone", 'method="ksivi"', "Paper's settings", "Paper", "Laplace", "Floor"
    return rst(heads, lines)
