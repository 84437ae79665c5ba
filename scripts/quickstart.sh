#!/usr/bin/env bash
# `make quickstart`: everything from nothing to forked machines. The steps after the build are the program's own.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

step "set-up" scripts/setup.sh
step "build" scripts/build.sh
run "$bin/forkd" quickstart "$@"
