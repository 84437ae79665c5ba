#!/usr/bin/env bash
# `make test`: installs, builds, runs the unit tests and the tests with real guests. The last line counts the latter.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

begin=$(now_ms)
summary=$(mktemp)
at_end 'rm -f "$summary"'

# Scenarios with real guests have their own runner and are excluded here.
unit_tests() {
    if cargo nextest --version >/dev/null 2>&1; then
        cargo nextest run --locked --release --workspace --exclude forkd-e2e --no-fail-fast --status-level fail
    else
        cargo test --locked --release --workspace --exclude forkd-e2e --no-fail-fast -q
    fi
}

guest_tests() { scripts/vm-tests.sh "$@" | tee "$summary"; }

status=0
step "set-up" scripts/setup.sh
step "build" scripts/build.sh
step "unit tests" unit_tests
# The test build replaces the static agent with one of its own. Build the agent for guests again.
step "programs for guests" scripts/build.sh
step "tests with real guests" guest_tests "$@" || status=$?
say "    everything: $(elapsed "$begin")"
grep -E '^[0-9]+ passed, [0-9]+ failed$' "$summary" | tail -n 1 || die "the tests with real guests did not come to an end"
exit "$status"
