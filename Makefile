# Short names for the commands that CI runs; .ci/run holds the commands themselves.
.PHONY: check test lint format wheel clean

check: ## everything that CI runs
	bash .ci/run

test: ## the README's test command
	bash .ci/run tests

lint: ## formatting, lint, types and import contracts, without changing a file
	bash .ci/run tools format lint types contracts

format: ## put files into the project's format and mend what the linter can
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

wheel: ## the tests against the built wheel, away from the tree
	bash .ci/run wheel

clean: ## remove what builds, tests and tools left; .venv stays
	rm -rf build dist .coverage* .hypothesis .*_cache src/*.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
