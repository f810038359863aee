# make demo: install, train on the embedded digits, print the accuracy. make test: the same environment, the whole suite.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
WORKERS ?= 2

.PHONY: demo test check format clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    install into $(VENV), train a ViT on the embedded digits, print the accuracy"
	@echo "make test    install into $(VENV), run the whole test suite"
	@echo "make check   ruff and pyright"
	@echo "make format  let ruff rewrite the layout"
	@echo "make clean   remove $(VENV) and caches (runs/ stays)"

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "vitfw needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --disable-pip-version-check --editable '.[dev,onnx,parquet,remote]'
	@touch $@

demo: $(VENV)/.installed
	$(RUN) train.py recipe=digits out=runs/demo

test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(RUN) -m pytest --numprocesses $(WORKERS) --dist loadfile

check: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright

format: $(VENV)/.installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
