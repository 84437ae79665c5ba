#!/usr/bin/env bash
# `make quickstart`: from nothing to forked machines. Builds, finds a KVM host (this one, or a machine), sees to a daemon, and
# lets the program show what it does. Machine and daemon stay, so that the commands it names at the end work.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

daemon_answers() { "$bin/forkd" ls </dev/null >/dev/null 2>&1; }

# In a session of its own: it is there to stay.
start_daemon() {
    local log=$cache/controller.log tenths=300
    mkdir -p "$cache"
    setsid "$bin/forkd-controller" serve </dev/null >"$log" 2>&1 &
    local pid=$!
    until daemon_answers; do
        kill -0 "$pid" 2>/dev/null || die "the daemon ended at once" "its log is $log"
        ((tenths-- > 0)) || die "the daemon does not answer" "its log is $log"
        sleep 0.1
    done
    say "    a daemon runs as process $pid; its log is $log"
}

step "set-up" scripts/setup.sh
step "build" scripts/build.sh
kvm=$(cargo run -q --release -p xtask -- probe)
if [ "$kvm" != native ]; then
    say "    /dev/kvm is $kvm: guests run in a machine"
    step "machine" "$bin/forkd" machine start
    say "    the machine stays; \`forkd machine stop\` ends it"
elif ! daemon_answers; then
    say "==> daemon"
    start_daemon
fi
run "$bin/forkd" quickstart "$@"
