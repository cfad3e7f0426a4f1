# Each target sets itself up from a fresh clone: it creates .venv and installs with constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# As a folder of sys.path: by setuptools' own finder, python above a clone named skksivi would import an empty package.
EDITABLE := $(PIP) --config-settings editable_mode=compat --editable

# One thread a process: faster than two for problems this small, and two test processes share the machine.
export OMP_NUM_THREADS ?= 1

PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo test test-slow coverage mutants lint lanes doc dist clean

demo: .venv/ready
	$(BIN)/python examples/plot_waveform.py --output waveform.png

test: .venv/ready
	$(PYTEST) -m 'not slow'

# Studies, whole scripts and killed processes; and the property tests again, with many examples.
test-slow: .venv/ready
	$(PYTEST) -m 'slow or hypothesis' --hypothesis-profile full

coverage: .venv/ready
	$(PYTEST) --cov --cov-report term-missing:skip-covered

mutants: .venv/ready
	$(BIN)/python .ci/mutants.py

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/words.py
	$(BIN)/python .ci/size.py

# The oldest versions that are supported, and each Python that is at hand; of pyenv all versions are switched on. What
# is installed is compiled at once: warnings of its code would be errors of the tests that import it first. To be run by
# hand and by the public workflow: without UV_EXTRA_INDEX_URL, see installation.rst, it loads gigabytes.
lanes:
	$(PYTHON) -m venv .lanes/tox
	.lanes/tox/bin/python -m pip install --quiet --disable-pip-version-check tox tox-uv
	UV_PYTHON_DOWNLOADS=never UV_COMPILE_BYTECODE=1 PYENV_VERSION="$$(pyenv versions --bare --skip-aliases 2> /dev/null | sort -rV | paste -sd:)" \
		.lanes/tox/bin/tox run

doc: .venv/doc-ready
	$(BIN)/python -m sphinx -W --keep-going -b html doc doc/_build/html
	$(BIN)/python .ci/links.py doc/_build/html
	@echo "Open doc/_build/html/index.html"

# What is uploaded: built apart from the checkout's own files, and checked.
dist:
	$(PYTHON) -m venv .dist-venv
	.dist-venv/bin/python -m pip install --quiet --disable-pip-version-check build twine
	rm -rf dist
	.dist-venv/bin/python -m build
	.dist-venv/bin/python -m twine check --strict dist/*

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(EDITABLE) '.[test,lint]'
	@touch $@

.venv/doc-ready: .venv/ready
	$(EDITABLE) '.[doc]'
	@touch $@

clean:
	rm -rf .venv .lanes .dist-venv dist .coverage build doc/_build doc/gallery doc/generated *.egg-info
