"""The cells of KSIVI and HKSIVI in the paper's tables: its value, ours in its settings, and whether it is reached."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
from _harness import rst

RESULTS = Path(__file__).parent / "results"
#: By the name of a table: the file of its results, and the methods whose values are quality.
OURS = {
    "waveform": ("waveform", ("KSIVI 10k", "KSIVI 20k")),
    "diffusion": ("bounded", ("KSIVI, U-stat.", "KSIVI, vanilla")),
    "bnn": ("bnn_legacy", ("KSIVI",)),
    "student": ("student", ("KSIVI, Gaussian", "KSIVI, Riesz l1", "HKSIVI")),
}
AT, NOISE, ABOVE = "at or below", "within noise", "above"


def verdict(values, paper):
    """Say whether a mean over seeds is at most the paper's value, or more by two of its standard errors at most."""
    if np.mean(values) <= paper:
        return AT
    return NOISE if len(values) > 1 and np.mean(values) - paper <= 2 * standard_error(values) else ABOVE


def standard_error(values):
    return np.std(values, ddof=1) / np.sqrt(len(values))


def cells(tables):
    """Yield table, case and metric, method, the paper's value, and ours by seed, of each cell of the paper."""
    for name, (file, methods) in OURS.items():
        table, rows = tables[name], json.loads((RESULTS / f"{file}.json").read_text())["rows"]
        for case in table.cases:
            for k, metric in enumerate(table.metrics):
                for method in methods:
                    own = [row["values"][k] for row in rows if (row["case"], row["method"]) == (case, method)]
                    paper = table.of_paper(case, metric, method)
                    if own and paper is not None:
                        yield name, f"{case} {metric}".strip(), method, paper, own


def table_of_cells(tables):
    """Return the table of the manual, and its summary in a line."""
    lines, count = [], Counter()
    for name, cell, method, paper, own in cells(tables):
        finite = [v for v in own if v is not None]
        ends = verdict(finite, paper) if len(finite) == len(own) else ABOVE
        count[ends] += 1
        mean = f"{np.mean(finite):.4g}" if finite else "diverged"
        se = f"{standard_error(finite):.2g}" if len(finite) > 1 else ""
        lines.append((name, cell, method, f"{paper:.4g}", mean, se, len(own), ends))
    n = sum(count.values())
    print(f"{count[AT] + count[NOISE]} of {n} cells reached: {count[AT]} at or below, {count[NOISE]} within noise.")
    return rst(("Table", "Cell", "Method", "Paper", "Here", "SE", "Seeds", "Verdict"), lines)
