# Every verb prepares what it needs in .venv: `make VERB` is all there is to do on a fresh machine.

PYTHON ?= python3
VENV ?= .venv
TRAIN_ARGS ?=
TEST_ARGS ?=
OPCHECK_ARGS ?=
BENCH_ARGS ?=
MATRIX_ARGS ?=
AOT_ARGS ?=
FAMILIES_ARGS ?=
FIRST_ARGS ?=
FOUND_ARGS ?=
FUZZ_ARGS ?=

# $(call needs,EXTRA...) is what must be installed before a verb runs; nothing with an empty VENV.
ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
needs =
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(VENV)/bin/python
needs = $(foreach extra,$(1),$(VENV)/.installed-$(extra))
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help train test breadth opcheck bench aot matrix families first found fuzz strangers docs lint wheel installed clean

help:
	@echo 'usage: make VERB [VARIABLE=...]'
	@echo
	@echo '  train     train a model, llmk and PyTorch: 2 minutes on a CPU    TRAIN_ARGS'
	@echo '  test      the test suite, then kernels interpreted: 25 minutes   TEST_ARGS'
	@echo '  breadth   more test cases of the same kinds: 10 minutes          BREADTH_ARGS'
	@echo '  opcheck   all checks of every operator: hours of a core          OPCHECK_ARGS'
	@echo '  bench     time and memory of every operator beside PyTorch       BENCH_ARGS'
	@echo '  aot       every kernel for every target, no GPU: half an hour    AOT_ARGS'
	@echo '  matrix    llmk on three releases of PyTorch, 12 GB of them       MATRIX_ARGS'
	@echo '  families  every model type of transformers, patched: an hour     FAMILIES_ARGS'
	@echo '  first     first actions of new models, with llmk: some hours     FIRST_ARGS'
	@echo '  found     what the backend replaces in models: 3 minutes         FOUND_ARGS'
	@echo '  fuzz      random programs for the compile backend: 10 minutes    FUZZ_ARGS'
	@echo '  strangers opcheck on operators of other kinds: some minutes      STRANGERS_ARGS'
	@echo '  docs      the documentation, into docs/_build/html: a minute'
	@echo '  lint      format, lint and type checks; changes nothing: 2 minutes'
	@echo '  wheel     the wheel and the source archive, into dist/'
	@echo '  installed the wheel and the archive in empty environments, newest torch'
	@echo '  clean     remove all that these verbs made, except runs/'
	@echo
	@echo 'Times are of two cores, once .venv is there, which takes some minutes more.'
	@echo 'Each verb installs what it needs into .venv. It takes Python 3.11 or newer,'
	@echo 'and a C++ compiler for torch.compile on a CPU.'
	@echo
	@echo '  PYTHON=python3.12   the Python that .venv is made with'
	@echo '  VENV=               install nothing: run with PYTHON and what it has installed'
	@echo "  TRAIN_ARGS='--preset 1b --steps 50'   and so on: passed to the program"

train: $(call needs,examples)
	$(PY) examples/train.py $(TRAIN_ARGS)

test: $(call needs,test examples verl)
	$(PY) -m pytest -n auto --dist worksteal $(TEST_ARGS)
	TRITON_INTERPRET=1 $(PY) -m pytest -n auto --dist worksteal -m kernels $(TEST_ARGS)

# Not part of CI: about ten minutes of two cores.
breadth: $(call needs,test examples verl)
	$(PY) -m pytest -n auto --dist worksteal --breadth -m breadth $(BREADTH_ARGS)

opcheck: $(call needs,test)
	$(PY) -m llmk.opcheck $(OPCHECK_ARGS)

bench: $(call needs,bench)
	$(PY) -m benchmarks.run $(BENCH_ARGS)

# Not part of CI: about half an hour of two cores.
aot: $(call needs,test)
	$(PY) -m pytest -n auto --dist worksteal compile_tests/ops/test_aot.py compile_tests/ops/test_spills.py --build many $(AOT_ARGS)

# Not part of CI: each release gets an environment of its own in .matrix/.
matrix: $(call needs,test)
	$(PY) -m compile_tests.helpers.matrix $(MATRIX_ARGS)

# Not part of CI: most of an hour of one core. The documentation shows what came out.
families: $(call needs,test)
	OMP_NUM_THREADS=1 $(PY) -m compile_tests.helpers.families_sweep $(FAMILIES_ARGS)
	$(PY) -m pytest -n auto compile_tests/transformers/test_families.py --breadth

# Not part of CI: some hours of one core. The documentation shows what came out.
first: $(call needs,test)
	OMP_NUM_THREADS=1 $(PY) -m compile_tests.helpers.first_actions_sweep $(FIRST_ARGS)

# Not part of CI: three minutes of one core. The documentation shows what came out.
found: $(call needs,test)
	OMP_NUM_THREADS=1 $(PY) -m compile_tests.helpers.backend_sweep $(FOUND_ARGS)

# Not part of CI: ten minutes of one core, or --seconds of them.
fuzz: $(call needs,test)
	OMP_NUM_THREADS=1 $(PY) -m compile_tests.helpers.backend_fuzz $(FUZZ_ARGS)

# Not part of CI: some minutes of one core; CI asks for fewer promises.
strangers: $(call needs,test)
	$(PY) -m llmk.opcheck compile_tests/helpers/strangers.py --device cpu $(STRANGERS_ARGS)
	$(PY) -m llmk.opcheck compile_tests/helpers/strangers_cpp.py --device cpu --path reference $(STRANGERS_ARGS)

docs: $(call needs,docs)
	$(PY) -m sphinx -W --keep-going -b html docs docs/_build/html

lint: $(call needs,lint test examples bench docs)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright --pythonpath $(PY)

# A build/ left over from before would bring deleted files back into the wheel.
wheel: $(call needs,build)
	rm -rf build
	$(PY) -m build

# Not part of CI: it downloads the newest PyTorch, 3 GB, for each of the two.
installed: wheel $(call needs,test)
	$(PY) -m compile_tests.helpers.installed

clean:
	rm -rf .venv .matrix build dist llmk.egg-info docs/_build docs/ops .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

ifneq ($(strip $(VENV)),)
# A stamp file marks each extra as installed until pyproject.toml, setup.py or constraints.txt changes.
$(VENV)/.installed-%: $(VENV)/.made pyproject.toml setup.py constraints.txt
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[$*]'
	@touch $@

$(VENV)/.installed-build: $(VENV)/.made constraints.txt
	$(PY) -m pip install --quiet --constraint constraints.txt build
	@touch $@

# Without what it depends on: the tests import a few of its files, which need PyTorch and transformers alone.
$(VENV)/.installed-verl: $(VENV)/.made constraints.txt
	$(PY) -m pip install --quiet --constraint constraints.txt --no-deps verl
	@touch $@

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "llmk needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@
endif
