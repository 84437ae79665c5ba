#!/usr/bin/env bash
# `make test`: set-up, build, unit tests, tests with real guests. The last line counts the latter.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

begin=$(now_ms)
summary=$(mktemp)
at_end 'rm -f "$summary"'

# A test whose facility is missing fails, unless it is left out here, for everybody to see.
leave_out() {
    say "    this host has no $1: its tests are left out"
    FORKD_TEST_WITHOUT="${FORKD_TEST_WITHOUT:-} $1"
}
export FORKD_TEST_WITHOUT
if [ ! -e /dev/kvm ]; then leave_out kvm; fi
# Linux follows writes since 6.7.
if [ "$(printf '6.7\n%s\n' "$(uname -r)" | sort -V | head -n 1)" != 6.7 ]; then leave_out write-tracking; fi

# Scenarios with real guests have a runner of their own and stay out of here.
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
# Building the tests leaves an agent of their own in the place of the one for guests.
step "programs for guests" scripts/build.sh
step "tests with real guests" guest_tests "$@" || status=$?
say "    everything: $(elapsed "$begin")"
grep -E '^[0-9]+ passed, [0-9]+ failed$' "$summary" | tail -n 1 || die "the tests with real guests did not come to an end"
exit "$status"
