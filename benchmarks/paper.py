"""Every table of the paper, by one command each.

python benchmarks/paper.py time         seconds per 10,000 iterations, conditioned diffusion
python benchmarks/paper.py waveform     sliced Wasserstein distance over learning rates, logistic regression
python benchmarks/paper.py diffusion    sliced Wasserstein distance over dimensions, conditioned diffusion
python benchmarks/paper.py student      squared Wasserstein distance in boxes, product of two Student t
python benchmarks/paper.py bnn          RMSE and NLL of Bayesian neural networks on held-out rows
python benchmarks/paper.py cells        which values of KSIVI and HKSIVI are reached, and a grid of widths

Each job (case, method, seed) is written to a json file when it is done (build/paper/TABLE_OPTIONS.json, or --out);
the same command goes on where it was stopped, and more --seeds, --cases or --methods add to the file. --show prints
what is there. --scale 0.1 ends the methods in the paper's settings after a tenth of their iterations; --quick runs
a few to see that all works. Results of other options are refused, and versions kept with each result. Beside each
mean and standard deviation over seeds stands the paper's value; a row has the values of as many exact draws. The
modules in benchmarks/paper say what the paper leaves open, and what differs here. With --show and --manual doc a
file of results becomes the tables of the manual.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
import torch
from _harness import command, load, read, rst, run_missing, show_tables, spread
from paper.bnn import Networks
from paper.cells import table_of_cells, table_of_tasks, table_of_widths
from paper.diffusion import Diffusion, Seconds
from paper.public_code import DIFFUSIONS, NETWORKS
from paper.student import Student
from paper.waveform import Waveform

TABLES = {
    "time": Seconds(),
    "waveform": Waveform(),
    "diffusion": Diffusion(),
    "student": Student(),
    "bnn": Networks(),
}
RESULTS = Path(__file__).parents[1] / "build" / "paper"


def settings_of(args, table):
    """Return what must be the same of all results in a file."""
    options = {name: getattr(args, name) for name in ("table", "quick", "scale", *table.options)}
    if "data_home" in options:
        options["data_home"] = options["data_home"] is not None  # which data, not where they lie
    return options


def file_of(args, table, defaults):
    """Return the file of results with these options, by the table and what is not the default, but for the data."""
    given = {**settings_of(args, table), "data_home": None}.items()
    words = [name if value is True else str(value) for name, value in given if value and value != defaults(name)]
    return RESULTS / f"{'_'.join(words)}.json"


def is_wanted(job, args):
    case, method, _ = job
    name = method.split(" @ ")[0]
    return (not args.cases or case in (*args.cases, "any")) and (not args.methods or name in (*args.methods, "floor"))


def judged(case, method, seed, table, args, rows):
    """Return the row of a job, None for values that are not finite; a fit that diverged is a result."""
    try:
        row = table.run(case, method, seed, args, rows)
    except FloatingPointError as error:
        row = {"values": [math.nan] * len(table.metrics), "error": str(error)}
    return {**row, "values": [v if math.isfinite(v) else None for v in row["values"]]}


# The tables


def values_of(rows, case, method, k):
    """Return the finite values of metric k."""
    values = [row["values"][k] for row in rows if (row["case"], row["method"]) == (case, method)]
    return [v for v in values if v is not None]


def beside_paper(values, paper, digits=3):
    """Return the mean and spread of values and, in brackets, the paper's; a dash where there is neither."""
    cells = ([spread(values, digits)] if values else []) + ([] if paper is None else [f"({paper:.{digits}f})"])
    return " ".join(cells) or r"\-"


def by_method(table, rows, names):
    """Yield the lines of the methods, by their names in the manual, with a cell for each case and metric."""
    digits = 4 if table is TABLES["diffusion"] else 3
    for method, name in names.items():
        cells = (
            beside_paper(values_of(rows, case, method, k), table.of_paper(case, metric, method), digits)
            for case in table.cases
            for k, metric in enumerate(table.metrics)
        )
        yield name, *cells


def networks(document):
    """Return the regressor by default, with a learned precision, and the paper's methods as printed there."""
    table, rows = TABLES["bnn"], document["rows"]
    if document["settings"]["units"] == "legacy":
        methods, lines = ("SIVI", "SIVI-SM", "SGLD", "SGLD, cut", "KSIVI"), []
        for case, name, k, metric in data_and_measures(table, rows):
            cells = (beside_paper(values_of(rows, case, m, k), table.of_paper(case, metric, m)) for m in methods)
            lines.append((f"{name}, {metric}", *cells))
        return {"paper_networks_legacy": rst(("Data and measure", *methods), lines)}
    lines = []
    for case, name, k, metric in data_and_measures(table, rows):
        own = (values_of(rows, case, method, k) for method in ("ours", "ours, learned"))
        cells = (f"{spread(values)} ({len(values)})" if values else r"\-" for values in own)
        papers = (beside_paper([], table.of_paper(case, metric, m)).strip("()") for m in table.paper)
        lines.append((f"{name}, {metric}", *cells, *papers))
    return {
        "paper_networks": rst(("Data", "Default", "Learned", *table.paper), lines),
        "paper_networks_chosen": rst(("Data", "Learned", "0.1", "1", "Chosen"), chosen(table, rows)),
    }


def data_and_measures(table, rows):
    """Yield case, its name in the manual, and the number and the name of a measure."""
    present = {row["case"] for row in rows}
    for case in (case for case in table.cases if case in present):
        yield from ((case, case.removesuffix("_red"), k, metric) for k, metric in enumerate(table.metrics))


def chosen(table, rows):
    """Yield lines of NLL and RMSE in cross-validation by prior precision, and the precision of the lowest NLL."""
    for case in table.cases:
        found = {
            choice: [values_of(rows, case, f"ours, searched @ {choice}", k) for k in (1, 0)]
            for choice in ("learned", "0.1", "1")
        }
        if all(nll for nll, _ in found.values()):
            cells = (f"{nll[0]:.3f} and {rmse[0]:.3f}" for nll, rmse in found.values())
            yield case.removesuffix("_red"), *cells, min(found, key=lambda choice: found[choice][0][0])


def ratios(document):
    """Return seconds, and their ratio to the first method's beside the paper's."""
    table, rows = TABLES["time"], document["rows"]
    first, lines = next(iter(table.methods)), []
    for method in table.methods:
        cells = []
        for case in table.cases:
            values = [values_of(rows, case, name, 0) for name in (method, first)]
            own, of_first = map(np.median, values) if all(values) else (math.nan, math.nan)
            of_paper = [table.of_paper(case, table.metrics[0], name) for name in (method, first)]
            cells.append(f"{own:.0f}, {own / of_first:.2f} ({of_paper[0] / of_paper[1]:.2f})")
        lines.append((method, *cells))
    return {"paper_time": rst(("Method", *(f"d = {case}" for case in table.cases)), lines)}


NAMES = {"floor": "exact draws", "ours, start": "start alone", "ours, ksivi": 'method="ksivi"'}
NAMES |= {"ours, HKSIVI": "HKSIVI, defaults"}


def of_manual(document):
    """Return the tables that the manual has of a document."""
    settings, rows = document["settings"], document["rows"]
    table, name = TABLES[settings["table"]], settings["table"]
    if name in ("bnn", "time"):
        return (networks if name == "bnn" else ratios)(document)
    methods = dict.fromkeys(row["method"] for row in rows)
    names = {method: NAMES.get(method, method) for method in (*NAMES, "Laplace", *table.paper) if method in methods}
    heads = [f"d = {case}" for case in table.cases] if name == "diffusion" else table.metrics
    if name == "waveform":
        names = {method: method.replace(" ", ", ") for method in table.paper if method in methods}
        heads = table.cases
    suffix = f"_{settings['drift']}" if name == "diffusion" else ""
    return {f"paper_{name}{suffix}": rst(("Method", *heads), by_method(table, rows, names))}


def main():
    parser = command(__doc__, seeds=None)
    parser.add_argument("table", choices=(*TABLES, "cells"))
    parser.add_argument("--cases", nargs="+")
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the paper's iterations")
    parser.add_argument("--cache", type=Path, help="folder of reference draws; by default beside the json file")
    parser.add_argument("--data-home", help="folder of the UCI data")
    parser.add_argument("--drift", choices=DIFFUSIONS, default="paper")
    parser.add_argument("--units", choices=NETWORKS, default="y")
    parser.add_argument("--splits", type=int, default=1)
    args = parser.parse_args()
    if args.table == "cells":
        found = {"paper_cells": table_of_cells(TABLES), "paper_widths": table_of_widths()}
        show_tables(args, found | {"paper_tasks": table_of_tasks(TABLES)})
        return
    table = TABLES[args.table]
    for name, known in (("cases", (*table.cases, "any")), ("methods", table.methods)):
        if unknown := set(getattr(args, name) or ()) - set(known):
            parser.error(f"unknown {name} {sorted(unknown)}, known are {list(known)}")
    torch.set_num_threads(1)
    args.seeds = args.seeds or (1 if args.quick else 5 if args.table == "time" else 3)
    args.out = args.out or file_of(args, table, parser.get_default)
    args.cache = args.cache or args.out.parent / "reference"
    if args.show:
        document = read(args.out if args.show is True else args.show)
        if (there := document["settings"]["table"]) != args.table:
            raise SystemExit(f"{args.out} holds the table {there!r}, not {args.table!r}; give another --out.")
    else:
        document = load(args.out, settings_of(args, table))
        run = partial(judged, table=table, args=args, rows=document["rows"])
        run_missing(document, args.out, [job for job in table.jobs(args) if is_wanted(job, args)], run)
    is_whole = not document["settings"]["quick"] and document["settings"]["scale"] == 1
    if args.manual and not is_whole:
        raise SystemExit("The manual has tables of whole runs only; leave --manual away.")
    show_tables(args, of_manual(document))
    if not is_whole:
        print("Methods ran a share of their iterations: these numbers are not the paper's.")


if __name__ == "__main__":
    main()
