# make demo   sets up .venv and evaluates the embedded pair on the embedded data set, offline
# make test   sets up .venv and runs the linters and the tests
# make callers   sets up .venv-callers and runs the snippets of docs/callers.md under the libraries they are about
PYTHON ?= python3
BIN := .venv/bin

.PHONY: venv demo test callers clean

venv: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
		|| { echo "needs Python 3.11 to 3.13; name one with make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv .venv \
		|| { echo "python3 cannot make virtual environments; on Debian: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	@touch $@

demo: venv
	HF_HUB_OFFLINE=1 $(BIN)/specplug

test: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --numprocesses=logical --maxprocesses=4 --dist=worksteal

# The libraries of docs/callers.md have many dependencies, so they get an environment of their own.
callers: .venv-callers/ready
	HF_HUB_OFFLINE=1 .venv-callers/bin/python -m pytest tests/callers

.venv-callers/ready: pyproject.toml constraints.txt
	@$(PYTHON) -m venv .venv-callers
	.venv-callers/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,callers]"
	@touch $@

clean:
	rm -rf .venv .venv-callers build dist *.egg-info
