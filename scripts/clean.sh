#!/usr/bin/env bash
# `make clean`: removes the build of this clone.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

run cargo clean
if [ -d fuzz ]; then run cargo clean --manifest-path fuzz/Cargo.toml; fi
