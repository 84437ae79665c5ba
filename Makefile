# `make` alone prints every target with the text behind its double hash.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup build quickstart test soak lint bench fuzz package clean

# `make fuzz SECONDS=60` names a variable that bash itself counts with: it is passed as an argument, never by environment.
unexport SECONDS

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install missing packages (Debian 12, Debian 13, Ubuntu 24.04)
	@scripts/setup.sh

build: setup ## build the programs into target/release
	@scripts/build.sh

quickstart: ## install, build, start a daemon, fork machines, print timings
	@scripts/quickstart.sh

test: ## install, build, run the unit tests and the tests with real guests; one of them: make test ONLY=boot::one_vcpu
	@scripts/test.sh $(if $(ONLY),'$(ONLY)')

soak: ## the tests with real guests with large counts; an interrupted run resumes
	@scripts/soak.sh

lint: setup ## format, clippy, dependency table, budgets, commands named in the documents
	@scripts/lint.sh

bench: ## the benchmarks behind the numbers in docs/benchmarks.md
	@scripts/bench.sh

fuzz: ## run every fuzz target for SECONDS (default 60) each: make fuzz SECONDS=60
	@scripts/fuzz.sh $(or $(SECONDS),60)

package: ## write wheel, npm packages, Debian package and bill of materials to target/package
	@scripts/package.sh

clean: ## remove the build; keep the cache in ~/.cache/forkd
	@scripts/clean.sh
