# Every verb prepares what it needs in .venv: `make VERB` is all there is to do on a fresh machine.

PYTHON ?= python3
VENV ?= .venv
TRAIN_ARGS ?=
TEST_ARGS ?=
OPCHECK_ARGS ?=
BENCH_ARGS ?=

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
.PHONY: help train test lint opcheck bench docs wheel ci

help:
	@echo 'usage: make VERB [VARIABLE=...]'
	@echo
	@echo '  train     train a model, llmk and PyTorch: 2 minutes on a CPU    TRAIN_ARGS'
	@echo '  test      the test suite, then kernels interpreted: 15 minutes   TEST_ARGS'
	@echo '  lint      format, lint and type checks; changes nothing: 2 minutes'
	@echo '  opcheck   all checks of every operator: hours of a core          OPCHECK_ARGS'
	@echo '  bench     time and memory of every operator beside PyTorch       BENCH_ARGS'
	@echo '  docs      the documentation, into docs/_build/html: a minute'
	@echo '  wheel     the wheel and the source archive, into dist/'
	@echo '  ci        what must pass before a change is merged: 30 minutes'
	@echo
	@echo 'Times are of two cores, once .venv is there, which takes some minutes more.'
	@echo 'Each verb installs what it needs into .venv. It takes Python 3.11 or newer,'
	@echo 'and a C++ compiler for torch.compile on a CPU.'
	@echo
	@echo '  PYTHON=python3.12   the Python that .venv is made with'
	@echo '  VENV=               install nothing: run with PYTHON and what it has installed'
	@echo "  TRAIN_ARGS='--preset 1b --steps 50'   and so on: passed to the program"
	@echo
	@echo 'More programs are in tools/: .venv/bin/python -m tools.NAME, after `make test`;'
	@echo 'CONTRIBUTING.md lists them.'

train: $(call needs,examples)
	$(PY) examples/train.py $(TRAIN_ARGS)

test: $(call needs,test examples verl)
	$(PY) -m pytest -n auto --dist worksteal $(TEST_ARGS)
	TRITON_INTERPRET=1 $(PY) -m pytest -n auto --dist worksteal -m kernels $(TEST_ARGS)

lint: $(call needs,lint test examples bench docs)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright --pythonpath $(PY)

opcheck: $(call needs,test)
	$(PY) -m llmk.opcheck $(OPCHECK_ARGS)

bench: $(call needs,bench)
	$(PY) -m benchmarks.run $(BENCH_ARGS)

docs: $(call needs,docs)
	$(PY) -m sphinx -W --keep-going -b html docs docs/_build/html

# A build/ left over from before would bring deleted files back into the wheel.
wheel: $(call needs,build)
	rm -rf build
	$(PY) -m build

# Every promise in plain PyTorch; in the interpreter what only the kernels can break, whose values `test` has looked at.
# All of them for the losses over a vocabulary take 20 minutes of a core there; rows that are far or strided reach what
# only their kernels read. `make opcheck` has all operators and promises.
LOSSES = import llmk.ops; from llmk.registry import OPS; print(*(n for n, op in OPS.items() if ".linear_loss." in op.module))
BUT_LOSSES = import llmk.ops; from llmk.registry import OPS; print(*(n for n, op in OPS.items() if ".linear_loss." not in op.module))

ci: lint test
	$(PY) -m llmk.opcheck --path reference --dtype bfloat16
	$(PY) -m llmk.opcheck $$($(PY) -c '$(BUT_LOSSES)') \
	  --path interpreter --dtype bfloat16 \
	  --only in_bounds,any_program_order,long_offsets,every_kernel_ends,every_element_written,no_float_atomics
	$(PY) -m llmk.opcheck $$($(PY) -c '$(LOSSES)') \
	  --path interpreter --dtype bfloat16 --only far_rows,strided_inputs
	$(PY) examples/train.py --preset nano --out runs/ci

ifneq ($(strip $(VENV)),)
# A stamp file marks each extra as installed until pyproject.toml, setup.py or constraints.txt changes.
$(VENV)/.installed-%: $(VENV)/.made pyproject.toml setup.py constraints.txt
	@echo 'Installing what this needs into $(VENV), once: some minutes.'
	$(PY) -m pip install --constraint constraints.txt --editable '.[$*]'
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
