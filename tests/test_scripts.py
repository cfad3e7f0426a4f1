"""Every example and benchmark runs, in a quick mode."""

import ast
import importlib
import json
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
import tomllib
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from approximators import short_fits

from skksivi._utils import DOCUMENTATION, __version__

ROOT = Path(__file__).parents[1]
#: The iterations of the examples that have no other options than these and the name of a picture.
MAX_ITER = {
    "waveform": 100, "search": 5, "hierarchy": 100, "mode_weights": 300, "comparison": 50, "diagnose": 100,
}  # fmt: skip
OF_PAPER = {"toys": 20, "convergence": 200, "logistic_regression": 100, "diffusion": 100, "smoothness": 200}
COMMANDS = {f"examples/plot_{name}.py": f"--max-iter {n} --output out.png" for name, n in MAX_ITER.items()}
COMMANDS |= {f"examples/paper/plot_{name}.py": f"--max-iter {n} --output out.png" for name, n in OF_PAPER.items()}
COMMANDS |= {
    "examples/plot_orings.py": "--n 5 --output out.png",
    "examples/plot_patients.py": "--patients 50 --training 60 --calls 600 --output out.png",
    "examples/two_ranks.py": "--rows 2000 --max-iter 20",
    "examples/plot_calibration.py": "--n 10 --output out.png",
    "examples/paper/plot_gradient_norms.py": "--repeats 3 --output out.png",
    "examples/paper/plot_student.py": "--output out.png",
    "examples/plot_predictors.py": "--n-hidden 3 --output out.png",
    "examples/plot_classification.py": "--max-iter 20 --splits 1 --output out.png",
    "examples/plot_pymc.py": "--max-iter 100 --draws 100 --output out.png",
    "examples/plot_numpyro.py": "--max-iter 100 --draws 100 --output out.png",
    "benchmarks/pictures.py": "--max-iter 20 --out pictures --names tail layers flow reach",
    "benchmarks/comparison.py": "--quick --seeds 1 --methods 'skksivi, defaults' KPG-IS --output rows.json",
    "benchmarks/regression.py": "--quick",
    "benchmarks/reference.py": "waveform draws.npz --steps 40",
    "benchmarks/reference.py targets": "banana --out references --json references.json",
    "benchmarks/training.py": "--quick --seeds 1 --names banana --jobs 1 --out train.json --methods 'path gradient'",
    "benchmarks/ablation.py": "--quick --jobs 1 --stages 'short chains' --out ablation.json",
    "benchmarks/intervals.py": "--quick --names log_gamma --seeds 1 --jobs 1 --out intervals.json",
    "benchmarks/defaults.py": "--names log_gamma --seeds 1 --jobs 1",
    "benchmarks/speed.py": "--quick --cases waveform --out speed.json",
    "benchmarks/verdicts.py": "--cases quartic --seeds 1 --jobs 1",
}
COMMANDS |= {f"benchmarks/{name}.py": "" for name in ("ages", "costs", "posteriors")}
ALIKE = "amortized convergence frontier schools toys criteria growth shapes suites diagnose"
COMMANDS |= {f"benchmarks/{name}.py": f"--quick --out {name}.json" for name in ALIKE.split()}
COMMANDS |= {
    f"benchmarks/paper.py {name}": f"--quick --out {name}.json"
    for name in ("time", "waveform", "diffusion", "student", "bnn")
}
#: Those whose weights of modes rest on a pilot.
WEIGHED = {"examples/plot_mode_weights.py", "benchmarks/schools.py"}

#: Those that take less than a second.
QUICK = {"benchmarks/paper.py waveform"}
QUICK |= {f"benchmarks/{name}.py" for name in ("ages", "costs", "posteriors", "reference")}
FOLDERS = "examples", "examples/paper", "benchmarks"
SCRIPTS = {str(p.relative_to(ROOT)) for folder in FOLDERS for p in (ROOT / folder).glob("[!_]*.py")}


def test_every_script_has_a_quick_run():
    assert {command.split()[0] for command in COMMANDS} == SCRIPTS
    assert COMMANDS.keys() >= QUICK


@pytest.mark.parametrize("script", sorted(script for script in SCRIPTS if "/plot_" in script))
def test_the_notebook_of_an_example_is_whole_without_options_of_a_command(script):
    parser = pytest.importorskip("sphinx_gallery.py_source_parser", reason="sphinx-gallery belongs to the extra doc")
    code = parser.remove_ignore_blocks((ROOT / script).read_text("utf-8"))
    used = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    assert used.isdisjoint({"argparse", "args", "parser"})
    assert "set_label" not in code


def run(script, arguments, folder):
    """Run a script as `python script ...` would in this folder, without the seconds of importing all again."""
    before, threads, jax = set(sys.modules), torch.get_num_threads(), sys.modules.get("jax")
    whiten = "auto" if script in WEIGHED else "laplace"
    x64 = jax is not None and jax.config.jax_enable_x64
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), short_fits(whiten):
        warnings.simplefilter("ignore")
        patch.chdir(folder)
        patch.setattr(sys, "argv", [script, *arguments])
        if "ranks" in script:  # the only one, in this process
            for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
                patch.setenv(name, str(value))
        patch.syspath_prepend((ROOT / script).parent)
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        finally:
            plt.close("all")
            torch.set_num_threads(threads)
            if "jax" in sys.modules:
                sys.modules["jax"].config.update("jax_enable_x64", x64)
            for name in set(sys.modules) - before:
                path = Path(getattr(sys.modules[name], "__file__", None) or "/")
                if path.is_relative_to((ROOT / script).parent):
                    del sys.modules[name]


@pytest.mark.parametrize(
    "command", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS]
)
def test_script_runs(command, tmp_path, capsys):
    script, *table = command.split()
    arguments = [*table, *shlex.split(COMMANDS[command])]
    run(script, arguments, tmp_path)
    assert capsys.readouterr().out.strip()
    for name in arguments:
        if name.endswith((".png", ".npz")):
            assert (tmp_path / name).stat().st_size > 1000


@pytest.fixture
def study(monkeypatch):
    """What imports the module of a study, which stands beside others."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


README = (ROOT / "README.rst").read_text("utf-8")


@pytest.mark.slow
def test_the_example_of_the_readme_prints_what_it_says(capsys):
    code, printed = README.split("\nIt prints")[0].split(".. code-block:: python\n\n")[1], README
    printed = printed.split(".. code-block:: text\n\n")[1].split("\n``q.verdict_``")[0]
    names = {}
    exec(textwrap.dedent(code), names)  # noqa: S102
    found, expected = (textwrap.dedent(text).splitlines() for text in (capsys.readouterr().out, printed.strip("\n")))
    assert found[:2] == expected[:2]  # the probability and its interval; the head of the table
    numbers = [[re.findall(r"-?\d+\.\d+", line) for line in lines[2:4]] for lines in (found, expected)]
    assert [[len(row) for row in rows] for rows in numbers] == [[10, 10], [10, 10]]
    np.testing.assert_allclose(*(np.array(rows, float) for rows in numbers), atol=0.02)
    assert [line.split("  ")[0] for line in found[2:4]] == [line.split("  ")[0] for line in expected[2:4]]
    calls = {stage.name: stage.n_calls for stage in names["q"].stages_}
    said = re.search(
        r"of (\S+) calls in README's example (\S+) check the score, (\S+) search for other modes, and (\S+) are",
        " ".join((ROOT / "doc/comparison.rst").read_text("utf-8").split()),
    )
    spent = [sum(calls.values()), *(calls[name] for name in ("checks", "search for modes", "importance sampling"))]
    assert [int(number.replace(",", "")) for number in said.groups()] == pytest.approx(spent, rel=0.05)


def rows_of(text, names):
    """The cells of a simple table by the name in the first column."""
    lines = (re.split(r"  +", line.strip()) for line in text.splitlines())
    return {cells[0]: cells for cells in lines if cells[0] in names}


def document(study):
    return json.loads((ROOT / "benchmarks" / f"{study}.json").read_text("utf-8"))


def test_the_readme_has_the_numbers_of_the_frontier(study):
    frontier = study("frontier")
    rows = rows_of(README, frontier.METHODS)
    assert len(rows) == 5
    for method, (_, accurate, calls, more, *_) in rows.items():
        _, of_31, _, all_calls, _, _, _, next_calls, *_ = frontier.by_method(document("frontier"), method)
        assert (accurate, calls, more) == (of_31, all_calls, next_calls)


def test_sentences_have_the_numbers_of_their_studies(study):
    studies = ("defaults", "frontier", "intervals", "regression", "speed")
    defaults, frontier, intervals, regression, speed = map(study, studies)
    fewer, both = frontier.compared(document("frontier"), "NUTS, low rank (nutpie)").split(" of ")
    found = document("defaults")["rows"]
    both_ways = (defaults.DEFAULTS, defaults.ALONE)
    ours, alone = ([defaults.summary(found, name, way) for name in frontier.POSTERIORS] for way in both_ways)
    ratios = [b["score_calls"] / a["score_calls"] for a, b in zip(ours, alone, strict=True)]
    more = f"{np.median(ratios):.2g} times as many in the median, {max(ratios):.2g} times at most"
    behind = [line[6] for line in regression.lines(document("regression")["rows"])]
    lowest, near = sum(cell.startswith("-") for cell in behind), sum(float(cell) <= 0.05 for cell in behind)
    over = [float(speed.over_plain(row)) for row in document("speed")["rows"] if row["method"] != "CPU"]
    distances = rows_of((ROOT / "doc/tables/suites_distances.txt").read_text("utf-8"), document("suites")["floors"])
    near_floor = sum(cells[3] <= "1.3" for cells in distances.values())
    held = intervals.share([row for row in document("intervals")["rows"] if row["method"] == "defaults"], "means")
    for page, sentence in [
        ("README", f"NUTS needs fewer calls than skksivi on {fewer} of {both}."),
        ("doc/nuts", f"On {both} posteriors where both are accurate it needed fewer calls on {fewer}:"),
        ("doc/comparison", f"on {fewer} of the {both} on which both are accurate"),
        ("doc/benchmarks", f"{more}, and accurate on {sum(a['accurate'] for a in alone)} of {len(alone)}"),
        ("doc/benchmarks", f"On {lowest} of the {len(behind)} its NLL is the lowest, on {near} it is within"),
        ("doc/benchmarks", f"it is {min(over)} to {max(over)} times as fast"),
        ("doc/nuts", f"held them {held.removeprefix('0.')}% of"),
        ("doc/suites", f"at 1.3 times the floor on {near_floor} of these {len(distances)}*"),
        ("doc/sklearn", f"On {lowest} of {len(behind)} data sets the default has a lower NLL"),
        ("doc/sklearn", f"and on {near - lowest} others it is at most .05 nats above"),
    ]:
        assert sentence in " ".join((ROOT / f"{page}.rst").read_text("utf-8").split())


def test_addresses_and_the_version_are_those_of_the_project():
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]
    assert urls["Documentation"] == DOCUMENTATION
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"repository-code: {urls['Repository']}\n" in citation
    assert f"\nversion: {__version__}\n" in citation
    versions = json.loads((ROOT / "doc" / "_static" / "switcher.json").read_text("utf-8"))
    (stable,) = (entry for entry in versions if entry["version"] == "stable")
    assert (stable["url"], stable["name"]) == (f"{DOCUMENTATION}/", f"stable ({__version__})")


def test_the_readme_is_short_and_names_what_ci_runs_and_no_command_with_a_placeholder():
    assert len(README.split()) <= 720
    ci = (ROOT / ".ci" / "run").read_text("utf-8")
    commands = [line for line in ci.splitlines() if line.startswith("make ")]
    assert commands
    assert all(f"``{command}``" in README for command in commands)
    assert {"    make demo", "    make test"} <= {line.split("  #")[0] for line in README.splitlines()}
    read = [*ROOT.glob("*.rst"), *ROOT.glob("doc/**/*.rst"), *ROOT.glob(".github/**/*.*"), ROOT / "Makefile"]
    assert not any("OWNER" in path.read_text("utf-8") for path in read)


#: The commands that write the tables of the manual, or print them, and which tables these are.
BY_NAME = "comparison convergence costs intervals defaults diagnose growth regression speed toys training criteria"
OF_SUITES = "suites_bounds suites_calls suites_distances suites_moments suites_seconds"
OF_AMORTIZED = "amortized amortized_calibration amortized_many amortized_single"
TABLES = {f"{name}.py --show {name}.json": [name] for name in BY_NAME.split()} | {
    "amortized.py --show amortized.json": OF_AMORTIZED.split(),
    "frontier.py --show frontier.json": ["frontier_made_by", "frontier_methods", "frontier_posteriors"],
    "schools.py --show schools.json": ["schools"],
    "shapes.py --show shapes.json": ["catalogue", "directions", "shapes"],
    "suites.py --show suites.json": OF_SUITES.split(),
    "reference.py targets --check --show references.json": ["references"],
    "paper.py cells": ["paper_cells", "paper_tasks", "paper_widths"],
}
PAPER = {
    "bnn": ["networks", "networks_chosen"], "bnn_legacy": ["networks_legacy"], "bounded": ["diffusion_bounded"],
    "diffusion": ["diffusion_paper"], "student": ["student"], "time": ["time"], "waveform": ["waveform"],
}  # fmt: skip
for stem, names in PAPER.items():
    results = f"paper/results/{stem}.json"
    table = json.loads((ROOT / "benchmarks" / results).read_text("utf-8"))["settings"]["table"]
    TABLES[f"paper.py {table} --show {results}"] = [f"paper_{name}" for name in names]


@pytest.mark.parametrize("command", TABLES)
def test_the_manual_has_the_tables_of_a_study(command, tmp_path, capsys):
    script, *arguments = (str(ROOT / "benchmarks" / word) if "." in word else word for word in command.split())
    for name in ("tables", "_static"):
        (tmp_path / name).mkdir()
    run(script, [*arguments, "--manual", "."], tmp_path)
    printed, pages = capsys.readouterr().out, "".join(p.read_text("utf-8") for p in ROOT.glob("doc/**/*.rst"))
    written = {path.stem: path.read_text("utf-8") for path in tmp_path.glob("tables/*.txt")}
    assert written.keys() in (set(), set(TABLES[command]))
    for name in TABLES[command]:
        table = (ROOT / "doc" / "tables" / f"{name}.txt").read_text("utf-8")
        assert written[name] == table if written else table in printed
        assert f"tables/{name}.txt" in pages


def test_pages_say_when_their_studies_were_made(study):
    ages = study("ages")
    for name, table in ages.tables().items():
        page = ROOT / "doc" / f"{name.removeprefix('ages_') if '_' in name else 'benchmarks'}.rst"
        assert (ROOT / "doc" / "tables" / f"{name}.txt").read_text("utf-8") == table
        assert f"tables/{name}.txt" in page.read_text("utf-8")


def test_no_quoted_row_of_ours_is_older_than_the_code_of_a_fit_or_it_is_said_why(study):
    ages = study("ages")
    found, older = ages.documents(), {}
    for name in (name for names in ages.QUOTED.values() for name in names):
        commits = {some.get("commit") for some in ages.versions(found[name], ours=True)}
        try:
            files = set().union(*map(ages.changed, commits - {None}))
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("the history of git is not here")
        older[name] = None in commits or bool(files)
    assert {name for name in older if older[name]} == ages.OLDER.keys()
