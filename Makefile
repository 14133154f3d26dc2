# Everything runs from .venv, which the first target builds (4.2 GB, a few minutes).
# PYTHON chooses its interpreter: PYTHON=python3.12 make test

PYTHON ?= python3
GOLDEN_PYTHON ?= .venv/bin/python
REFERENCES ?= ../references
INSTALLED := .venv/installed
# Two processes take whole files, in the order of tests/conftest.py, so that each file's fixtures are made once.
# Bytecode is kept even where the machine's Python keeps none: hundreds of processes would compile the package again.
PYTEST := PYTHONDONTWRITEBYTECODE= .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
SLOW_FIRST := tests/parity tests/partitioning
SLOW_SECOND := tests/checkpoints tests/evaluation tests/reliability tests/training
SLOW_THIRD := tests/aot tests/data tests/decoding tests/inference tests/layers tests/models

COMPARISONS := facts learning_rate module_facts text sources capacity_factor choices_per_token precision init_scale \
  exploration no_token_left_behind attention_experts as_many_parameters

export TF_CPP_MIN_LOG_LEVEL ?= 2
ifeq ($(wildcard /dev/accel[0-9]* /dev/vfio/[0-9]*),)
  # Without a TPU, libtpu would query the cloud's metadata server for minutes.
  export TPU_SKIP_MDS_QUERY ?= 1
endif
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo finetune-demo compare-demo compare-long test slow cuda exhaustive accelerator faults mutants lint \
  golden wheel clean

help:  ## print this list
	@sed -n 's/^\([a-z-]*\): .*##/make \1\t/p' Makefile | expand -t 20

demo: $(INSTALLED)  ## pretrain a small Switch Transformer on this machine (runs/demo)
	.venv/bin/switch-tf train demo

finetune-demo: $(INSTALLED)  ## fine-tune a dense and a sparse model on a real task, beside TF-IDF (runs/finetune_demo)
	.venv/bin/python benchmarks/finetune_demo.py

compare-demo: $(INSTALLED)  ## train a dense model against 4 and 16 experts, in turns (runs/compare_demo)
	.venv/bin/switch-tf compare demo

compare-long: $(INSTALLED)  ## the regimes and ablations of docs/results.md, three seeds each: hours, resumes
	for facts in 5000 10000 20000 40000; do .venv/bin/switch-tf compare number_of_experts \
	  --model_dir runs/compare_long/facts_$$facts --gin.MIXTURE_OR_TASK_NAME=random_facts_$$facts \
	  --steps $$((facts * 9 / 10)) || exit; done
	.venv/bin/python benchmarks/facts_remembered.py runs/compare_long/facts_* --output=runs/compare_long/facts.png
	for name in $(COMPARISONS); do .venv/bin/switch-tf compare $$name || exit; done

test: lint  ## lint, import contracts and the tests; needs no network (CONTRIBUTING.md)
	$(PYTEST)

# In four parts, because TensorFlow frees compiled programs only when a process ends: three took up to 12 GB a worker.
slow: $(INSTALLED)  ## the tests that `make test` leaves out: more layouts, policies and processes
	$(PYTEST) -m "slow and not exhaustive" $(SLOW_FIRST)
	$(PYTEST) -m "slow and not exhaustive" $(SLOW_SECOND)
	$(PYTEST) -m "slow and not exhaustive" $(SLOW_THIRD)
	$(PYTEST) -m "slow and not exhaustive" $(addprefix --ignore=,$(SLOW_FIRST) $(SLOW_SECOND) $(SLOW_THIRD))

cuda: .cuda/installed  ## what the compiler of NVIDIA's GPUs makes of the step, without a GPU; downloads 200 MB once
	PYTHONPATH=.cuda $(PYTEST) -m cuda tests/aot/gpu_compiler_test.py

# Beside the environment, because everything that starts JAX there would load it.
.cuda/installed: $(INSTALLED) requirements-gpu-compiler.txt
	rm -rf .cuda
	.venv/bin/python -m pip install --quiet --no-deps --target .cuda -r requirements-gpu-compiler.txt
	touch $@

exhaustive: $(INSTALLED)  ## many more seeds, wrong values and layouts; not in CI
	$(PYTEST) -m exhaustive

accelerator: $(INSTALLED)  ## runs on this machine's GPU or TPU, compared with its CPU
	.venv/bin/python -m pytest -n 2 -m accelerator tests/accelerator

faults: $(INSTALLED)  ## kill, damage and starve a small run on a disk and in a bucket, then hostile files: hours
	.venv/bin/python -m tests.reliability.faults
	.venv/bin/python -m tests.reliability.hostile

mutants: $(INSTALLED)  ## plant over 100 mistakes and check that the tests notice them: half an hour, resumes
	.venv/bin/python tests/mutants/run.py

lint: $(INSTALLED)  ## ruff, the import contracts and the types
	.venv/bin/python -m ruff check .
	.venv/bin/lint-imports
	.venv/bin/python -m mypy

golden: $(INSTALLED)  ## recompute the golden files; needs PyTorch and clones of the references (CONTRIBUTING.md)
	@$(GOLDEN_PYTHON) -c 'import torch' 2>/dev/null || { echo "The golden files are computed with PyTorch," \
	  "which $(GOLDEN_PYTHON) cannot import; give a Python that can: GOLDEN_PYTHON=path/to/python make golden." >&2; \
	  exit 1; }
	JAX_PLATFORMS=cpu .venv/bin/python tests/golden/t5x_models.py $(REFERENCES)
	.venv/bin/python tests/golden/mesh_tensorflow_models.py $(REFERENCES)
	$(GOLDEN_PYTHON) tests/golden/hugging_face.py
	.venv/bin/python tests/golden/parameters.py
	.venv/bin/python tests/golden/compiled_layouts.py

wheel: $(INSTALLED)  ## build dist/switch_tf-*.whl
	rm -rf build
	.venv/bin/python -m build --wheel --no-isolation

clean:  ## remove all build outputs except .venv and runs/
	rm -rf build dist switch_tf.egg-info .pytest_cache .ruff_cache .import_linter_cache .mypy_cache .hypothesis
	find switch_tf tasks tests -name __pycache__ -prune -exec rm -rf {} +

# The last line runs only if all others succeed, so the next make repeats an interrupted installation.
$(INSTALLED): requirements.txt requirements-dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; (3, 11) <= sys.version_info < (3, 13) or sys.exit("switch_tf needs \
	Python 3.11 or 3.12, but \
	$(PYTHON) is %d.%d; name one that is installed: PYTHON=python3.12 make ..." % sys.version_info[:2])'
	@echo "Installing the pinned environment into .venv: 4.2 GB, a few minutes (the last and longest line is" \
	  "'Installing collected packages')."
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --no-deps -r requirements.txt -r requirements-dev.txt
	.venv/bin/python -m pip install --no-deps --no-build-isolation -e .
	touch $(INSTALLED)
