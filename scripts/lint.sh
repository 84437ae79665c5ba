#!/usr/bin/env bash
# `make lint`: runs every check that needs no guest, and reports all failures.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# The profile of the build, so that shared crates are compiled once.
run cargo run -q --release -p xtask -- lint "$@"
