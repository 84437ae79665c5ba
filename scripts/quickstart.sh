#!/usr/bin/env bash
# `make quickstart`: installs, builds, finds a KVM host (this one, or a machine), starts a daemon, and runs `forkd
# quickstart`. Machine and daemon stay, so that the commands printed at the end work.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
source "$root/scripts/daemon.sh"

step "set-up" scripts/setup.sh
# Only what the demonstration runs: a first build of everything takes minutes longer.
step "build" scripts/build.sh forkd forkd-controller forkd-vmm forkd-spawn forkd-net forkd-broker forkd-image
need_daemon
run "$bin/forkd" quickstart "$@"
