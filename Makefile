# Every target creates .venv if needed; a bare machine needs python3, pip and make.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-slow test-all check lint types docs bench bench-peers peers-tabular clean

demo: $(INSTALLED)
	$(BIN)/evalign demo

# The quick tests, in minutes; test-all runs the slow ones, too.
test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 -m slow

test-all: test test-slow

check: lint types test-all

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: $(INSTALLED)
	$(BIN)/mypy

# Into site/; a broken link to a page or heading is an error.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

.venv/.docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch .venv/.docs

bench: $(INSTALLED)
	$(BIN)/python benchmarks/bench_loss.py

# Other libraries' losses get a separate environment; --no-deps avoids the CUDA builds that some of them require.
bench-peers:
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[fast]' monai pillow tqdm scikit-learn pandas
	.venv-peers/bin/python -m pip install --quiet --no-deps --editable papers segmentation-models-pytorch torch-btg libauc==2.0.1
	.venv-peers/bin/python benchmarks/bench_peers.py

# For benchmarks/bench_quality.py; AutoGluon allows no pandas 3, so constraints.txt does not apply.
peers-tabular:
	test -x .venv-tabular/bin/python || $(PYTHON) -m venv .venv-tabular
	.venv-tabular/bin/python -m pip install --quiet torch==2.13.0 --editable '.[cli]' --editable papers \
	  catboost==1.2.10 'autogluon.tabular[catboost,lightgbm]==1.6.3' pytabkit==1.7.3

# constraints.txt pins the tested versions; the stamp is written last, so that an interrupted installation is repeated.
$(INSTALLED): pyproject.toml papers/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]' --editable papers
	touch $(INSTALLED)

clean:
	rm -rf .venv .venv-peers .venv-tabular .mypy_cache .ruff_cache .pytest_cache .hypothesis dist site
