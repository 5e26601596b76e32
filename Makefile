# Short names for daily commands; .ci/run has those of CI.   make help
.PHONY: help setup test changed lint format bench openai docs manifests site check wheel release clean
.DEFAULT_GOAL := help

PYTEST = .venv/bin/python -m pytest -n 2 --dist loadfile

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "make %-10s%s\n", $$1, $$2 }'

setup: ## .venv with moonpool from this tree, what tests need, and the tools
	test -x .venv/bin/python || python3 -m venv .venv
	.venv/bin/pip install --quiet --upgrade pip
	.venv/bin/pip install --quiet --editable . --group dev

test: ## all tests, or those of a folder or a file: make test IN=tests/stub
ifdef IN
	$(PYTEST) $(IN)
else
	bash .ci/run tests
endif

changed: ## the tests of what differs from main, or from a commit: make changed SINCE=HEAD~2
	@tests=$$(.venv/bin/python .ci/changed.py $(SINCE)) && \
	  if test -n "$$tests"; then $(PYTEST) $$tests; else echo "No test belongs to what has changed."; fi

lint: ## formatting, lint, types and import contracts, without changing a file
	bash .ci/run tools format lint types contracts

format: ## put files into the project's format and mend what the linter can
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

bench: ## one benchmark for seconds, or in full: make bench ONE=throughput QUICK=
	.venv/bin/python -m moonpool.benchmarks.suites.$(or $(ONE),latency) $(QUICK)
QUICK = --quick

openai: ## Triton's own tests of its OpenAI front end: make openai CHECKOUT=../server
	bash .ci/openai $(CHECKOUT)

docs: ## the parts of the pages that are made of code, and their tests
	.venv/bin/python docs/reference.py
	.venv/bin/python -m moonpool.runtime.model.config.options > docs/OPTIONS.md
	.venv/bin/python -m moonpool.runtime.server.options.table > docs/SERVE_OPTIONS.md
	$(PYTEST) tests/test_docs.py tests/test_architecture.py tests/test_layout.py

manifests: ## those of deploy/, from the Helm chart there
	test -x .venv-schemas/helm || bash .ci/run schemas
	python3 .ci/manifests.py

site: ## the pages as a site with search and the reference of the API: build/site/index.html
	bash .ci/run site

check: ## everything that CI runs
	bash .ci/run

wheel: ## the tests against the built wheel, away from the tree
	bash .ci/run wheel

release: ## wheels for four kinds of machines, in dist
	python3 .ci/release.py

clean: ## remove what builds, tests and tools left; .venv stays
	rm -rf build dist .coverage* .hypothesis .*_cache src/*.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
