# The commands: make demo, make check, make chaos. Each makes its own .venv when there is none.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/installed
# A folder to import instead of the example's inbox: make demo FOLDER=/usr/share/doc
FOLDER ?=

.PHONY: demo check chaos format clean

demo: $(INSTALLED)
	$(RUN) manage.py demo $(if $(FOLDER),"$(FOLDER)")

check: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) manage.py makemigrations --check --dry-run
	$(RUN) -m pytest -n 4
	$(RUN) -m tests.chaos --short

# Breaks workers, sessions, servers and the network for a quarter of an hour.
chaos: $(INSTALLED)
	$(RUN) -m tests.chaos

format: $(INSTALLED)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# Not var: the uploaded files belong to the example's database, which stays too.
clean:
	rm -rf $(VENV) .tox .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml
	@echo "Installing into $(VENV); this takes about half a minute."
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -qq --disable-pip-version-check --editable '.[dev]'
	touch $(INSTALLED)
