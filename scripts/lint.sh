#!/usr/bin/env bash
# Every check that needs no guest. Runs all of them and reports all failures.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# The profile of the build, so that what both need is built once.
run cargo run -q --release -p xtask -- lint "$@"
