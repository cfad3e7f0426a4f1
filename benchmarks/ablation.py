"""What each source of the start adds: the defaults with one of them left out, on posteriors and on hard shapes.

python benchmarks/ablation.py [--names ...] [--stages ...] [--seeds 1] [--jobs 2] [--out FILE.json]
python benchmarks/ablation.py --show benchmarks/ablation.json --manual doc      the tables of the manual

Posteriors are those of benchmarks/defaults.py and shapes those of benchmarks/shapes.py, with their rules of accuracy;
those of benchmarks/suites.py that are not stiff follow the rule of the posteriors. A stage that does
not run with all stages changes nothing where it is left out, so that such fits are not repeated: each row counts the
targets for which its stage ran. A fit is lost that was accurate with it, and silent without a warning.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import suites
import torch
from _accuracy import along_directions, is_accurate, moments
from _harness import command, load, rst, run_missing, select, show_tables, shown, watched
from _shapes import DIRECTIONS, SHAPES
from posteriors import POSTERIORS
from reference import reference
from shapes import JUDGES

from skksivi import KSIVIApproximator
from skksivi.parameters import Pilot
from skksivi.start._find import MODES, SOURCES

ALL = "all stages"
STAGES = [MODES, *(name for name, _ in SOURCES)]
LEFT_OUT = STAGES[1:]  # all else begins with the search for a mode
SUITES = {name: make for name, make in suites.CASES.items() if name not in {*suites.STIFF, *POSTERIORS}}
CASES = {name: p.make for name, p in POSTERIORS.items()} | SHAPES | DIRECTIONS | SUITES


def judged(name, target, q):
    """Return whether a fit is accurate, by the rule of its study."""
    judge = None if name in {*POSTERIORS, *SUITES} else JUDGES.get(type(target))
    if judge is not None:
        return judge(q, target)["accurate"]
    R = suites.reference(name)[0] if name in SUITES else reference(name)
    X = q.sample(len(R))
    return is_accurate(moments(X, R) | along_directions(X, R))


def run(name, method, seed):
    torch.set_num_threads(1)
    target = CASES[name]()
    q = KSIVIApproximator(whiten=Pilot(skip=() if method == ALL else (method,)), method="start", random_state=seed)
    try:
        with watched() as costs:
            q.fit(target)
    except (ValueError, FloatingPointError) as error:
        return {"accurate": False, "warned": True, "failed": str(error), "calls": None, "seconds": None}
    stages = Counter()
    for attempt in q.whitening_.attempts:
        stages[attempt.stage] += attempt.n_calls
    return {
        "calls": q.n_score_calls_ + q.n_products_,
        "seconds": costs["seconds"],
        "warned": bool(costs["warned"]),
        "failed": "",
        "stages": dict(stages),
        "accurate": judged(name, target, q),
    }


def costs(rows):
    """Return the table of the stages: on how many targets each ran, its calls, and how often it ended the pilot."""
    whole = select(rows, method=ALL, failed="")
    lines = []
    for stage in STAGES:
        calls = [row["stages"][stage] for row in whole if stage in row["stages"]]
        ended = sum(stage in list(row["stages"])[-1:] for row in whole)
        cells = (f"{np.median(calls):,.0f}", f"{np.quantile(calls, 0.9):,.0f}") if calls else ("", "")
        lines.append((stage, len(calls), *cells, ended))
    return rst(("Stage", "Ran", "Calls", "90%", "Ended"), lines)


def table(rows):
    """Return the table of what is lost without each stage."""
    whole = {(row["case"], row["seed"]): row for row in select(rows, method=ALL)}
    lines = []
    for stage in LEFT_OUT:
        own = [(whole[row["case"], row["seed"]], row) for row in select(rows, method=stage)]
        lost = [after["case"] for before, after in own if before["accurate"] and not after["accurate"]]
        silent = sum(before["accurate"] and not (after["accurate"] or after["warned"]) for before, after in own)
        won = sum(after["accurate"] and not before["accurate"] for before, after in own)
        ratios = [after["calls"] / before["calls"] for before, after in own if after["calls"]]
        ratio = f"{np.exp(np.mean(np.log(ratios))):.2f}" if ratios else ""
        lines.append((stage, len(own), len(lost), silent, won, ratio, ", ".join(dict.fromkeys(lost[:3]))))
    return rst(("Without", "Fits", "Lost", "Silent", "Won", "Calls", "Such as"), lines)


def summary(rows):
    whole = select(rows, method=ALL)
    for name, some in (("posteriors", POSTERIORS), ("shapes", {**SHAPES, **DIRECTIONS}), ("suites", SUITES)):
        own = [row for row in whole if row["case"] in some]
        if not own:
            continue
        calls = [row["calls"] for row in own if row["calls"]]
        print(
            f"{name}: {sum(row['accurate'] for row in own)} of {len(own)} accurate, {np.median(calls):,.0f} calls, "
            f"90% {np.quantile(calls, 0.9):,.0f}"
        )


def main():
    args = command(__doc__, seeds=1, jobs=2, names=CASES, stages=LEFT_OUT).parse_args()
    if args.show:
        rows = shown(args)["rows"]
    else:
        names = ["two_blobs", "labels of 2"] if args.quick and args.names == list(CASES) else args.names
        document = load(args.out, {"quick": args.quick})
        pairs = [(name, seed) for seed in range(args.seeds) for name in names]
        run_missing(document, args.out, [(name, ALL, seed) for name, seed in pairs], run, n_jobs=args.jobs)
        ran = {(row["case"], row["seed"]): row.get("stages", ()) for row in select(document["rows"], method=ALL)}
        jobs = [(name, stage, seed) for name, seed in pairs for stage in args.stages if stage in ran[name, seed]]
        run_missing(document, args.out, jobs, run, n_jobs=args.jobs)
        rows = document["rows"]
    summary(rows)
    show_tables(args, {"stages": costs(rows), "ablation": table(rows)})


if __name__ == "__main__":
    main()
