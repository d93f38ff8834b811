# Each target sets everything up by itself, the first time; after that it starts at once.
VENV  := .venv
STAMP := $(VENV)/.ftlab-installed
BIN   := $(VENV)/bin
ifneq ($(wildcard tests),)
EXTRAS := labs,docker,dev
else
EXTRAS := labs# the bundle for students, by `ftlab labs pack`: no tests, no tools
endif

# Another interpreter: make setup PYTHON=/path/to/python3.12
PYTHON ?=
PYTHONS := $(if $(PYTHON),$(PYTHON),python3 python3.13 python3.12 python3.11 python3.14)

# Passed on as they are: make lab LAB_ARGS=--no-browser, make test ARGS="-k kill"
LAB_ARGS ?=
ARGS ?=

# How many tests run at once. Most of them wait more than they compute; each may hold a cluster of a gigabyte.
JOBS ?= 3

.DEFAULT_GOAL := help
.PHONY: help setup demo lab lint check test test-all clean

help:
	@echo "make demo    a tour of about two minutes: break a cluster, watch it heal"
	@echo "make lab     open JupyterLab on the labs"
ifneq ($(wildcard tests),)
	@echo "make check   ruff, mypy and the fast tests, under a minute"
	@echo "make test    every test but the longest; what this machine lacks is skipped, with the reason"
	@echo "make test-all  the longest too: all drills in containers, every wrong solution, soaks"
endif
	@echo "make setup   only the environment, in $(VENV) (the others do this by themselves)"
	@echo "make clean   remove the environment, caches and run artefacts"
	@echo ""
	@echo "PYTHON=/path/to/python picks the interpreter (3.11 or newer)."

setup: $(STAMP)
	@echo "$(VENV) is ready"

demo: $(STAMP)
	@$(BIN)/ftlab demo $(ARGS)

lab: $(STAMP)
	@exec $(BIN)/ftlab lab -- $(LAB_ARGS)

ifneq ($(wildcard tests),)
unexport PYTHONDONTWRITEBYTECODE  # hundreds of processes and containers would each compile everything anew

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/mypy ftlab

check: lint
	@$(BIN)/python -m pytest tests/law tests/unit -q -n auto $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(ARGS)

test-all: $(STAMP)
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --full $(ARGS)
endif

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache *.egg-info .coverage htmlcov ftlab-demo.html
	find $(wildcard ftlab tests labs solutions) -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
	find $(wildcard labs solutions) -name .ipynb_checkpoints -type d -prune -exec rm -rf {} + 2>/dev/null || true

# The stamp is written last: an interrupted set-up is taken up again. A broken environment is made anew.
$(STAMP): pyproject.toml constraints.txt
	@set -e; \
	modern='import sys; sys.exit(sys.version_info < (3, 11))'; \
	if ! { "$(BIN)/python" -c "$$modern" && "$(BIN)/python" -m pip --version; } >/dev/null 2>&1; then \
	    found=; for each in $(PYTHONS); do \
	        if "$$each" -c "$$modern" >/dev/null 2>&1; then found="$$each"; break; fi; done; \
	    if [ -z "$$found" ]; then \
	        echo "ftlab needs Python 3.11 or newer; tried: $(PYTHONS)"; \
	        echo "  try: install one, or name it: make setup PYTHON=/path/to/python3.12"; exit 1; fi; \
	    if ! "$$found" -c 'import venv, ensurepip' >/dev/null 2>&1; then \
	        echo "$$found cannot make a virtual environment: its venv module is not installed"; \
	        echo "  try (Debian, Ubuntu): apt install python3-venv"; exit 1; fi; \
	    echo "==> creating $(VENV) with $$("$$found" --version 2>&1) ($$(command -v "$$found"))"; \
	    "$$found" -m venv --clear "$(VENV)"; \
	fi; \
	echo "==> installing ftlab[$(EXTRAS)] into $(VENV): about two minutes the first time, torch is large"; \
	export PIP_DISABLE_PIP_VERSION_CHECK=1; \
	"$(BIN)/python" -m pip install -q -c constraints.txt setuptools; \
	"$(BIN)/python" -m pip install -c constraints.txt --no-build-isolation -e ".[$(EXTRAS)]"; \
	touch "$@"; \
	echo "==> installed"
