"""What the studies share: a command line, results that are kept in a file, and tables.

A job is a tuple (case, method, seed), its row a dict. Rows are written to the json file (--out) as they come: the
same command goes on where it was stopped, and more --seeds add to the file. --show prints what is there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
from joblib import Parallel, delayed

from skksivi import __version__

GIT = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]

#: Kept with each result. Older ones have the commit that recorded them, "recorded", and its date.
VERSIONS = {
    "skksivi": __version__,
    "commit": subprocess.run(GIT, capture_output=True, text=True, check=False).stdout.strip(),
    "date": datetime.now().isoformat(timespec="seconds"),
    "torch": torch.__version__,
    "numpy": np.__version__,
}
JOB = ("case", "method", "seed")

#: A fit with the defaults, which trains only where it must, and by the path gradient.
OURS = "skksivi, defaults"


def command(doc, *, seeds=3, jobs=None, **lists):
    """Return a parser of what every study has, of --jobs, and of options that take some of the choices in a list."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--quick", action="store_true", help="a few iterations, to see that all works")
    parser.add_argument("--out", "--output", type=Path, help="the json file, to which a run adds what is missing")
    parser.add_argument(
        "--show", nargs="?", const=True, type=Path, metavar="FILE", help="show this file, or --out, and run nothing"
    )
    parser.add_argument("--manual", type=Path, metavar="FOLDER", help="write the tables where the manual has them")
    for name, choices in lists.items():
        parser.add_argument(f"--{name}", nargs="+", choices=choices, default=list(choices))
    if jobs is not None:
        parser.add_argument("--jobs", type=int, default=jobs, help="at the same time")
    return parser


def results(args, jobs, run, *, n_jobs=1, **settings):
    """Return the document of the results, with the rows of the jobs that the file lacks.

    `run` is called with a job and returns what else its row holds. The settings must be the same of all results in a
    file.
    """
    if args.show:
        return shown(args)
    document = load(args.out, {"quick": args.quick, **settings})
    run_missing(document, args.out, jobs, run, n_jobs=n_jobs)
    return document


def run_missing(document, path, jobs, run, *, n_jobs=1):
    """Run the jobs that are not in the document, and save it after each."""
    done = {tuple(row[name] for name in JOB) for row in document["rows"]}
    missing = [job for job in jobs if job not in done]
    found = Parallel(n_jobs=n_jobs, return_as="generator")(delayed(run)(*job) for job in missing)
    for i, (job, row) in enumerate(zip(missing, found, strict=True), 1):
        document["rows"].append({**dict(zip(JOB, job, strict=True)), **row, "versions": VERSIONS})
        save(path, document)
        print(f"[{i}/{len(missing)}] {', '.join(map(str, job))}", file=sys.stderr, flush=True)


def load(path, settings):
    """Return the document in a file, which must be of the same settings, or a new one."""
    if path is None or not path.exists():
        return {"settings": settings, "rows": []}
    document = read(path)
    there = document["settings"]
    differ = [f"{name} {there.get(name)}, not {own}" for name, own in settings.items() if there.get(name) != own]
    if differ:
        raise SystemExit(f"{path} holds results of {'; '.join(differ)}. Give another --out, or its options.")
    return document


def shown(args):
    """Return the document to show, None where the study is to run."""
    return read(args.out if args.show is True else args.show) if args.show else None


def read(path):
    if path is None or not path.exists():
        raise SystemExit(f"There is no file {path} to show; run the study first, or give the --out of its results.")
    return json.loads(path.read_text())


def save(path, document):
    """Write a file, if there is to be one, so that it is whole at any time."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1))
    os.replace(part, path)


@contextmanager
def watched():
    """Keep warnings back; yield a dict that has, at the end, their names and the seconds of CPU that were spent."""
    costs, start = {}, time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield costs
    costs |= {"seconds": time.process_time() - start, "warned": sorted({w.category.__name__ for w in caught})}


def exact(target, n, seed):
    """Return n exact draws of a target."""
    return target.sample(n, torch.Generator().manual_seed(seed)).numpy()


def select(rows, **job):
    """Return the rows of a case, a method or a seed."""
    return [row for row in rows if all(row[name] == value for name, value in job.items())]


def of(rows, key, **job):
    """Return the values of a key in the rows of a case, a method or a seed."""
    return [row[key] for row in select(rows, **job) if key in row]


def pairs(rows):
    """Return the pairs of case and method that have rows, in their order."""
    return list(dict.fromkeys((row["case"], row["method"]) for row in rows))


def spread(values, digits=3):
    """Return the mean and, of several seeds, the standard deviation as a cell."""
    sd = f" +- {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{sd}"


def print_table(heads, rows):
    """Print rows of cells below their heads, the first aligned on the left and all else on the right."""
    lines = [[str(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = ["<"] + [">"] * (len(widths) - 1)
    for line in lines:
        cells = (f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True))
        print("  ".join(cells).rstrip(), flush=True)


def show_tables(args, tables):
    """Print tables, by their names, and write them where the manual has them, if it is asked for."""
    print(*tables.values(), sep="\n")
    if args.manual:
        write_tables(args.manual, tables)


def show_figure(args, name, draw):
    """Draw a figure where the manual has it, if it is asked for."""
    if args.manual:
        (args.manual / "_static").mkdir(parents=True, exist_ok=True)
        draw().savefig(args.manual / "_static" / f"{name}.png", dpi=120)


def write_tables(folder, tables):
    """Write tables, by their names, where the manual has them."""
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    for name, text in tables.items():
        (folder / "tables" / f"{name}.txt").write_text(text)


def rst(heads, lines):
    """Return a simple table of reStructuredText, which is also one to read."""
    lines = [[str(cell) for cell in line] for line in (heads, *lines)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = "  ".join("=" * width for width in widths)
    body = ["  ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([rule, body[0], rule, *body[1:], rule, ""])
