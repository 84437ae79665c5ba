#!/usr/bin/env bash
# `make soak`: runs the scenarios with large counts. Passed scenarios are recorded in the cache, so an interrupted run
# resumes. FORKD_SOAK_FRESH=1 starts from the beginning.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if [ -n "${FORKD_SOAK_FRESH:-}" ]; then rm -rf "$cache/soak"; fi
step "set-up" scripts/setup.sh
step "build" scripts/build.sh forkd forkd-controller forkd-vmm forkd-spawn forkd-net forkd-image forkd-e2e
# Transfers that break at 200 points, and an object store that checks signatures.
hub() {
    local store=$cache/tools-s3
    if [ ! -x "$store/bin/s3s-fs" ]; then
        cargo install s3s-fs --version 0.14.1 --locked --features binary --root "$store" || return
    fi
    export FORKD_S3_SERVER=$store/bin/s3s-fs FORKD_HUB_POINTS=200
    scripts/unpack-tools.sh
    cargo test --locked --release -p forkd-hub --features soak --test bucket --test registry
}
if [ $# -eq 0 ]; then step "hub" hub; fi
step "soak" scripts/vm-tests.sh --soak "$@"
