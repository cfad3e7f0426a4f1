"""Whether the tests notice a wrong formula: one operator or number changed at a time, and the tests run on it.

python .ci/mutants.py [--modules NAME ...] [--sample N | --all] [--seed 0] [--jobs 1] [--out FILE.json]
                             [--resume]

A mutant is a module of the mathematics with one change: an arithmetic, bitwise, logical or comparison operator put in
the place of another, a minus or a negation left out, a condition turned round, a number raised by one, True and False
exchanged. Messages, annotations, default arguments and decorators stay as they are. A mutant is killed if a quick
test of its module fails, or runs for several times as long as all of them; it survives if all pass. A survivor is a
gap in the tests, or no change of what the module computes: another size of a tile, < for <= at a point that no draw
meets.

Each module has a random sample of its mutants, the same for the same seed. Each mutant is tested in a fork of one
process that holds the libraries, but nothing of the package. The JSON has the survivors with their lines; --resume
keeps the modules that it has.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import math
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, settings

ROOT = Path(__file__).resolve().parents[1]

#: The modules, and the files in `tests` that are to kill their mutants, their own one first.
MODULES = {
    "stein._estimators": ["test_stein"],
    "kernels": ["test_kernels", "test_stein", "test_metrics"],
    "families._layer": ["test_families", "test_hksivi", "test_persistence"],
    "score._probe": ["test_refusals", "test_score"],
    "score._products": ["test_score", "test_refusals"],
    "score._score": ["test_score", "targets/test_minibatches"],
    "estimators._ksivi": [
        "test_ksivi",
        "test_warp",
        "test_parameters",
        "test_regularization",
        "targets/test_minibatches",
    ],
    "estimators._hksivi": ["test_hksivi", "test_parameters"],
    "training._guard": ["test_training", "test_moments", "test_ksivi"],
    "terms": ["test_regularization", "test_ksivi"],
    "estimators._ksd": ["test_train", "test_ksivi", "test_hksivi"],
    "estimators._trained": ["test_states", "test_train", "test_ksivi", "test_hksivi"],
}

#: What the package and its tests import, loaded once.
LIBRARIES = ["matplotlib.pyplot", "scipy.stats", "sklearn.model_selection", "torch"]

#: What takes the place of an operator.
INSTEAD = {
    ast.Add: [ast.Sub], ast.Sub: [ast.Add], ast.Mult: [ast.Div], ast.Div: [ast.Mult], ast.FloorDiv: [ast.Mult],
    ast.Mod: [ast.Mult], ast.Pow: [ast.Mult], ast.MatMult: [ast.Mult], ast.BitAnd: [ast.BitOr],
    ast.BitOr: [ast.BitAnd], ast.And: [ast.Or], ast.Or: [ast.And], ast.Eq: [ast.NotEq], ast.NotEq: [ast.Eq],
    ast.Is: [ast.IsNot], ast.IsNot: [ast.Is], ast.In: [ast.NotIn], ast.NotIn: [ast.In], ast.Lt: [ast.LtE, ast.GtE],
    ast.LtE: [ast.Lt, ast.Gt], ast.Gt: [ast.GtE, ast.LtE], ast.GtE: [ast.Gt, ast.Lt],
}  # fmt: skip

#: Parts of the code that are no mathematics.
SKIPPED_NODES = (ast.Raise, ast.JoinedStr)
SKIPPED_FIELDS = {"annotation", "returns", "defaults", "kw_defaults", "decorator_list"}
SKIPPED_NAMES = {"__all__", "TYPE_CHECKING", "strict"}

#: Parts that say little without what is around them.
SHORT_NODES = (ast.Constant, ast.UnaryOp, ast.Tuple, ast.Slice, ast.keyword, ast.comprehension)

#: A mutant may take this many seconds, and this many times those of the tests without one; and this many bytes.
GRACE, PATIENCE, MEMORY = 10, 4, 2**34

# The limit on the time of a test holds in the profile "quick" alone; to find a failing example is enough.
settings.register_profile(
    "mutants",
    max_examples=10,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


#: The quick tests up to the first that fails. Assertions are plain, or pytest would load the module from its file.
OPTIONS = ["-x", "-q", "--tb=no", "-m", "not slow", "-p", "no:cacheprovider", "--assert=plain"]
OPTIONS += ["--hypothesis-profile=mutants"]


class Mutant(NamedTuple):
    """One field of a node in the syntax tree of a module, and what takes its place."""

    node: ast.AST
    field: str
    value: Any
    line: int
    change: str


def mutants(node: ast.AST, around: ast.AST | None = None) -> Iterator[Mutant]:
    """Find all mutants of a tree, in the order of its nodes."""
    if isinstance(node, SKIPPED_NODES) or SKIPPED_NAMES & names(node):
        return
    shown = around if isinstance(node, SHORT_NODES) else node
    for field, value in changes(node):
        before, old = summary(shown), getattr(node, field)
        setattr(node, field, value)
        after = summary(shown)
        setattr(node, field, old)
        yield Mutant(node, field, value, node.lineno, f"{before}  ->  {after}")
    for field, value in ast.iter_fields(node):
        if field not in SKIPPED_FIELDS:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from mutants(child, shown)


def names(node: ast.AST) -> set[str | None]:
    """Return the names that a node sets, passes or tests."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "test", None)]
    return {getattr(node, "arg", None), *(target.id for target in targets if isinstance(target, ast.Name))}


def changes(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a node that change, and their new values."""
    match node:
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op):
            yield from (("op", new()) for new in INSTEAD.get(type(op), []))
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                yield from (("ops", [*ops[:i], new(), *ops[i + 1 :]]) for new in INSTEAD[type(op)])
        case ast.UnaryOp(op=op, operand=operand) if not isinstance(operand, ast.Constant):  # twice is not at all
            yield "operand", ast.copy_location(ast.UnaryOp(op, operand), node)
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            if not isinstance(test, ast.Compare | ast.UnaryOp):
                yield "test", ast.copy_location(ast.UnaryOp(ast.Not(), test), test)
        case ast.Constant(value=bool(value)):
            yield "value", not value
        case ast.Constant(value=int(value) | float(value)) if math.isfinite(value):
            yield "value", value + 1


def summary(node: ast.AST) -> str:
    """Return the code of an expression, or of the first line of a statement."""
    return ast.unparse(node).partition("\n")[0]


class Loader(importlib.machinery.SourceFileLoader):
    """Finds and loads one module, from a syntax tree instead of its file."""

    def __init__(self, module: str, tree: ast.Module) -> None:
        super().__init__(f"skksivi.{module}", str(source_of(module)))
        self.tree = tree

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ANN401
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, fullname: str) -> Any:  # noqa: ANN401
        return compile(self.tree, self.path, "exec")


def source_of(module: str) -> Path:
    return ROOT / "skksivi" / f"{module.replace('.', '/')}.py"


def files_of(module: str) -> list[str]:
    return [*(f"tests/{name}.py" for name in MODULES[module]), f"{source_of(module)}"]


def fork(module: str, tree: ast.Module, mutant: Mutant | None, limit: int) -> int:
    """Start the tests of a module in another process, which ends with status 0 if all pass; return its id."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        signal.alarm(limit)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        if mutant is not None:
            setattr(mutant.node, mutant.field, mutant.value)
        sys.meta_path.insert(0, Loader(module, tree))
        status = pytest.main([*OPTIONS, *files_of(module)])
    finally:
        os._exit(status)


def tested(module: str, n: float, seed: int, jobs: int) -> dict[str, Any]:
    """Run the tests of a module on a sample of n of its mutants."""
    if "skksivi" in sys.modules:
        raise SystemExit("The package is imported already, so that no mutant would be seen: run this as a command.")
    start, tree = time.perf_counter(), ast.parse(source_of(module).read_text())
    possible = list(mutants(tree))
    tried = random.Random(f"{module} {seed}").sample(range(len(possible)), min(n, len(possible)))  # noqa: S311
    if os.waitpid(fork(module, tree, None, 600), 0)[1] != 0:
        raise SystemExit(f"Tests of {module} fail without a mutant: python -m pytest {' '.join(files_of(module))}")
    limit = math.ceil(GRACE + PATIENCE * jobs * (time.perf_counter() - start))
    waiting, running, survivors = sorted(tried), {}, []
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = possible[waiting.pop(0)]
            running[fork(module, tree, mutant, limit)] = mutant
        pid, status = os.wait()
        mutant = running.pop(pid)
        if status == 0:
            survivors.append((mutant.line, mutant.change))
            print(f"{module}.py:{mutant.line}: {mutant.change}", flush=True)
    seconds = round(time.perf_counter() - start)
    killed = len(tried) - len(survivors)
    return {
        "possible": len(possible), "tried": len(tried), "killed": killed, "seconds": seconds,
        "survivors": sorted(survivors),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--modules", nargs="+", choices=MODULES, default=list(MODULES))
    parser.add_argument("--sample", type=int, default=60, help="mutants of each module")
    parser.add_argument("--all", action="store_const", dest="sample", const=sys.maxsize, help="every mutant")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--resume", action="store_true", help="keep the modules that the file has")
    args = parser.parse_args()

    args.out = args.out.resolve()
    os.chdir(ROOT)
    sys.path[0] = str(ROOT)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.freeze()  # or each fork would look through all that was loaded
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    for module in args.modules:
        if not (args.resume and module in results):
            results[module] = tested(module, args.sample, args.seed, args.jobs)
            in_order = {name: results[name] for name in MODULES if name in results}
            args.out.write_text(json.dumps(in_order, indent=1) + "\n")
    print(f"\n{'module':12}{'possible':>10}{'tried':>8}{'killed':>8}{'share':>8}{'seconds':>9}")
    for module in args.modules:
        possible, tried, killed, seconds = (
            results[module][key] for key in ("possible", "tried", "killed", "seconds")
        )
        print(f"{module:12}{possible:10}{tried:8}{killed:8}{killed / tried:8.0%}{seconds:9}")


if __name__ == "__main__":
    main()
