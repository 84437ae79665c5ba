#!/usr/bin/env bash
# Every check that needs no guest. Runs all of them and reports all failures.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

run cargo run -q -p xtask -- lint "$@"
