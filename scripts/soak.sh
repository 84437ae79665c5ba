#!/usr/bin/env bash
# `make soak`: runs the scenarios with large counts. Passed scenarios are recorded in the cache, so an interrupted run
# resumes. FORKD_SOAK_FRESH=1 starts from the beginning.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if [ -n "${FORKD_SOAK_FRESH:-}" ]; then rm -rf "$cache/soak"; fi
step "set-up" scripts/setup.sh
step "build" scripts/build.sh forkd forkd-controller forkd-vmm forkd-spawn forkd-net forkd-broker forkd-image forkd-e2e
step "soak" scripts/vm-tests.sh --soak "$@"
