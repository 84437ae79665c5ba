#!/usr/bin/env bash
# `make test`: set-up, build, unit tests, tests with real guests; at the end the slowest parts, then a line that counts the
# tests with real guests. `make test ONLY=NAME` runs the scenarios with NAME in their names, or the tests of the daemon
# that begin with it; if there are none, the unit tests with NAME in theirs.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

only=${1:-}
begin=$(now_ms)
work=$(mktemp -d)
at_end 'rm -rf "$work"'
export FORKD_PARTS=$work/parts

# A test whose facility is missing fails, unless it is left out here, which the output shows.
leave_out() {
    say "    this host has no $1: its tests are left out"
    FORKD_TEST_WITHOUT="${FORKD_TEST_WITHOUT:-} $1"
}
export FORKD_TEST_WITHOUT
if [ ! -e /dev/kvm ]; then leave_out kvm; fi
# Linux follows writes since 6.7.
if [ "$(printf '6.7\n%s\n' "$(uname -r)" | sort -V | head -n 1)" != 6.7 ]; then leave_out write-tracking; fi

programs=(forkd forkd-controller forkd-vmm forkd-fc forkd-spawn forkd-net forkd-broker forkd-gateway forkd-image forkd-bench forkd-e2e)

# `unit_tests [NAME]`
unit_tests() {
    local selection=(--locked --release --workspace "${unit_test_targets[@]}" --no-fail-fast) status=0
    if cargo nextest --version >/dev/null 2>&1; then
        local report=$target/nextest/default/junit.xml
        rm -f "$report"
        cargo nextest run "${selection[@]}" --status-level fail "$@" || status=$?
        if [ -e "$report" ]; then nextest_parts <"$report"; fi
    else
        {
            cargo test "${selection[@]}" "$@" 2>&1 || printf '%d' "$?" >"$work/status"
        } | tee "$work/unit" | { grep -v -e '^test .* \.\.\. ok$' -e '^$' || true; } >&2
        libtest_parts <"$work/unit"
        if [ -e "$work/status" ]; then status=$(cat "$work/status"); fi
        grep -q '^test result: .* [1-9][0-9]* passed' "$work/unit" || die "no unit test ran"
    fi
    return "$status"
}

# Sums up the tests of each binary. nextest runs them side by side: this is more than the time that passed.
nextest_parts() {
    sed -n 's/.*<testcase .*classname="\([^"]*\)".* time="\([0-9.]*\)".*/\1 \2/p' |
        awk '{ sum[$1] += $2 } END { for (name in sum) printf "%d\tunit tests of %s (sum)\n", sum[name] * 1000, name }' >>"$FORKD_PARTS"
}

libtest_parts() {
    awk '$1 == "Running" { name = $NF; gsub(/.*\/|-[0-9a-f]+\)$/, "", name) }
        /^test result:/ && match($0, /finished in [0-9.]+s/) {
            printf "%d\tunit tests of %s\n", substr($0, RSTART + 12, RLENGTH - 13) * 1000, name }' >>"$FORKD_PARTS"
}

# Kernel and images are made of Debian packages, which takes minutes the first time and waits for the network mostly.
fetch_images() {
    "$bin/forkd-image" kernel
    "$bin/forkd-image" build python-numpy
    "$bin/forkd-image" machine --agent "$static_agent"
}

unit_tests_beside_images() {
    local images status=0
    fetch_images >"$work/images" 2>&1 </dev/null &
    images=$!
    unit_tests || status=$?
    # What fails here is tried again before the tests with guests, and ends the run there.
    wait "$images" || tail -n 5 "$work/images" >&2
    return "$status"
}

guest_tests() { scripts/vm-tests.sh "$@" | tee "$work/summary"; }

# Prints the count of the tests with real guests, and ends with the status given.
finish() {
    say "    everything: $(elapsed "$begin")"
    slowest 15
    grep -E '^[0-9]+ passed, [0-9]+ failed$' "$work/summary" | tail -n 1 || die "the tests with real guests did not come to an end"
    exit "$1"
}

status=0
step "set-up" scripts/setup.sh
step "tools of the tests" scripts/unpack-tools.sh
if [ -n "$only" ]; then
    step "build" scripts/build.sh "${programs[@]}"
    if [ -n "$(scripts/vm-tests.sh --list "$only")" ]; then
        step "tests with real guests" guest_tests "$only" || status=$?
        finish "$status"
    fi
    step "unit tests" unit_tests "$only"
    exit
fi
# One call: programs and tests wait for the same crates, and none is compiled twice.
step "build" scripts/build.sh --tests "${programs[@]}"
step "unit tests" unit_tests_beside_images
step "tests of the SDKs" scripts/sdk-tests.sh
# Running the tests leaves an agent of their own in the place of the one for guests; everything else is built.
step "programs for guests" scripts/build.sh "${programs[@]}"
step "tests of the packages" scripts/package-tests.sh
step "tests with real guests" guest_tests || status=$?
step "times of the main operations" scripts/clock-tests.sh || status=$?
finish "$status"
