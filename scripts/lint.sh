#!/usr/bin/env bash
# `make lint`: runs every check that needs no guest, and reports all failures.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# The selection and the profile of build.sh, so that dependencies are compiled once.
run cargo build -q --locked --release --workspace --bin xtask
run "$bin/xtask" lint "$@"
