#!/usr/bin/env bash
# `make soak`: the scenarios with large repetition counts. What has passed is remembered per scenario below the cache, so
# an interrupted run goes on where it was; FORKD_SOAK_FRESH=1 begins anew.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if [ -n "${FORKD_SOAK_FRESH:-}" ]; then rm -rf "$cache/soak"; fi
step "set-up" scripts/setup.sh
step "build" scripts/build.sh forkd forkd-controller forkd-vmm forkd-spawn forkd-image forkd-e2e
step "soak" scripts/vm-tests.sh --soak "$@"
