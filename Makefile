# `make` alone prints every target with the text behind its double hash.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup build quickstart test soak lint bench fuzz clean

# `make fuzz SECONDS=60` names a variable that bash itself counts with: it is passed as an argument, never by environment.
unexport SECONDS

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install what is missing (Debian 12, Debian 13, Ubuntu 24.04); does nothing when all is there
	@scripts/setup.sh

build: setup ## build the programs into target/release
	@scripts/build.sh

quickstart: ## from nothing to forked machines, with the numbers of this host
	@scripts/quickstart.sh

test: ## set-up, build, unit tests, then the tests with real guests; one of them: make test ONLY=boot::one_vcpu
	@scripts/test.sh $(if $(ONLY),'$(ONLY)')

soak: ## the same tests with large repetition counts; resumable, with a summary
	@scripts/soak.sh

lint: setup ## format, clippy, dependency table, budgets, commands named in the documents
	@scripts/lint.sh

bench: ## the benchmarks behind the numbers in SPECIFICATION.md
	@scripts/bench.sh

fuzz: ## run every fuzz target for SECONDS (default 60) each: make fuzz SECONDS=60
	@scripts/fuzz.sh $(or $(SECONDS),60)

clean: ## remove what was built here; the cache below ~/.cache/forkd stays
	@scripts/clean.sh
