#!/usr/bin/env bash
# The one place that runs the scenarios with real guests (tests/e2e): directly where the host's KVM is native, otherwise
# in a machine, which ends with the run. Then the tests of the daemon from outside (daemon-tests.sh). Arguments go to the
# test program (a filter, --list); `daemon` alone leaves the scenarios out. Progress goes to stderr; stdout ends with a
# line `N passed, N failed`.
#
# With --soak first: large repetition counts, one scenario at a time; what has passed with these programs is remembered.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
source "$root/scripts/daemon-tests.sh"

soak=
if [ "${1:-}" = --soak ]; then
    soak=1
    shift
fi

# ---- what guests are made of

# Fills a folder with links to what the cache has, and names it in `assets`.
make_assets() {
    assets=$(mktemp -d)
    at_end 'rm -rf "$assets"'
    local kernel
    kernel=$("$bin/forkd-image" kernel)
    ln -s "$kernel/vmlinux" "$kernel/vmlinuz" "$assets/"
    ln -s "$("$bin/forkd-image" initramfs)" "$assets/initramfs"
    ln -s "$("$bin/forkd-image" build python-numpy)" "$assets/python-numpy.ext4"
}

# ---- directly

on_host() { FORKD_ASSETS=$assets run env FORKD_SOAK="$soak" "$bin/forkd-e2e" "$@"; }

# `keep LOG COMMAND…`: what it prints goes to the log, too, which is whole when this returns. Through a pipe with a name:
# the descriptor of a process substitution would be inherited by a machine that stays, and never close.
keep() {
    local log=$1 folder tee result=0
    shift
    folder=$(mktemp -d)
    mkfifo "$folder/pipe"
    tee -a "$log" <"$folder/pipe" &
    tee=$!
    "$@" >"$folder/pipe" || result=$?
    wait "$tee" || true
    rm -rf "$folder"
    return "$result"
}

# ---- in a machine

inside=/var/lib/forkd/e2e
# The test program looks for the others beside itself, and that is where a machine has them.
test_program=/usr/local/bin/forkd-e2e

# Each run has a machine of its own, so that runs in two clones do not meet. A slot and its data disk are used again.
take_slot() {
    local slot
    mkdir -p "$cache/test-slots"
    for slot in {0..15}; do
        exec 7>"$cache/test-slots/$slot"
        if flock -n 7; then
            export FORKD_MACHINE=test-$slot
            return
        fi
    done
    die "16 test runs are under way on this machine" "a lock is held below $cache/test-slots"
}

# The lock belongs to this shell: a machine that outlives it must not hold it.
machine() { run "$bin/forkd" machine "$@" 7>&-; }
ask_machine() { "$bin/forkd" machine exec --no-sync -- "$@" </dev/null 7>&-; }

push_assets() {
    local stamp file
    # Paths in the cache contain what they were made from.
    stamp=$(readlink "$assets"/* | sha256sum | cut -c1-16)
    if ask_machine test -e "$inside/$stamp"; then return 0; fi
    say "    copying kernel and image into the machine"
    ask_machine rm -rf "$inside"
    ask_machine mkdir -p "$inside"
    for file in "$assets"/*; do
        "$bin/forkd" machine cp "$(readlink "$file")" ":$inside/$(basename "$file")" </dev/null 7>&-
    done
    ask_machine touch "$inside/$stamp"
}

start_machine() {
    take_slot
    at_end 'say "    stopping the machine"; "$bin/forkd" machine stop >/dev/null 7>&-'
    fill_machine
}

fill_machine() {
    machine start --port 0 >&2
    run push_assets
    machine cp "$bin/forkd-e2e" ":$test_program"
}

# An emulated machine may lock up; it ends then (see the command line of its kernel). No scenario can be blamed for that,
# and none is let off for it: what has not come to its end runs again in a new machine. Scenarios run one at a time, which
# makes it rarer.
in_machine() {
    local variables=(--env "FORKD_ASSETS=$inside") log skip status try
    if [ -n "$soak" ]; then variables+=(--env FORKD_SOAK=1); fi
    log=$(mktemp)
    at_end "rm -f '$log'"
    for try in 1 2 3; do
        mapfile -t skip < <(sed -nE 's/^test ([a-z_:]+) +\.\.\. (ok|FAILED)$/\1/p' "$log" | sed 's/^/--skip=/')
        status=0
        keep "$log" machine exec --no-sync "${variables[@]}" -- "$test_program" --test-threads=1 "$@" "${skip[@]}" || status=$?
        if [ "$status" -eq 0 ] || ! machine_is_lost; then break; fi
        say "    the machine is lost (try $try of 3); its console says:"
        "$bin/forkd" machine logs </dev/null 7>&- | grep -aE 'BUG|panic|RIP|Comm:' | tail -n 8 >&2 || true
        start_again
    done
    # `--list` runs nothing.
    grep -qE '^test ' "$log" || return "$status"
    second_try "$log" "${variables[@]}"
    printf '%d passed, %d failed\n' "$(grep -cE '^test .* ok$' "$log")" "$(grep -cE '^test .* FAILED$' "$log")"
    # The program's own count is missing when it did not come to its end.
    grep -qE '^[0-9]+ passed, [0-9]+ failed$' "$log" && ! grep -qE '^test .* FAILED$' "$log"
}

# An emulated CPU is not a CPU: guests die of its faults now and then. A scenario that fails on one is tried once more,
# in the open; on real hardware a failure is a failure.
second_try() {
    local log=$1 name names
    shift
    "$bin/forkd" machine status --json </dev/null 7>&- | grep -q '"accel": "tcg"' || return 0
    mapfile -t names < <(sed -nE 's/^test ([a-z_:]+) +\.\.\. FAILED$/\1/p' "$log")
    for name in "${names[@]}"; do
        say "    $name failed on an emulated CPU: a second try"
        if machine exec --no-sync "$@" -- "$test_program" --exact "$name" >&2; then
            sed -i -E "s/^test $name +\.\.\. FAILED\$/test $name ... ok/" "$log"
        fi
    done
}

machine_is_lost() { ! timeout 60 "$bin/forkd" machine exec --no-sync -- true </dev/null >/dev/null 2>&1 7>&-; }

start_again() {
    "$bin/forkd" machine stop </dev/null >/dev/null 2>&1 7>&- || true
    fill_machine
}

# ---- soak

run_soak() {
    local key done_list name passed=0 failed=0
    key=$(sha256sum "$bin"/forkd-{vmm,spawn,agent,e2e} | sha256sum | cut -c1-16)
    done_list=$cache/soak/$key
    mkdir -p "$cache/soak"
    touch "$done_list"
    while read -r name; do
        if grep -qxF "$name" "$done_list"; then
            say "    $name: passed before"
            passed=$((passed + 1))
            continue
        fi
        if step "$name" "$place" --exact "$name" >&2; then
            printf '%s\n' "$name" >>"$done_list"
            passed=$((passed + 1))
        else
            failed=$((failed + 1))
        fi
    done < <(FORKD_SOAK=1 "$bin/forkd-e2e" --list "$@" 2>/dev/null | sed -n 's/: test$//p')
    printf '%d passed, %d failed\n' "$passed" "$failed"
    [ "$failed" -eq 0 ]
}

make_assets
kvm=$(cargo run -q --release -p xtask -- probe)
if [ "$kvm" = native ]; then
    say "    guests run directly on /dev/kvm"
    place=on_host
else
    say "    /dev/kvm is $kvm: guests run in a machine"
    start_machine
    place=in_machine
fi

# ---- the scenarios, then the daemon from outside

scenarios() { if [ -n "$soak" ]; then run_soak "$@"; else "$place" "$@"; fi; }

passed=0 failed=0 status=0
if [ "${1:-}" != daemon ]; then
    counts=$(mktemp)
    at_end 'rm -f "$counts"'
    keep "$counts" scenarios "$@" || status=$?
    # `--list` runs nothing.
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$counts" | tail -n 1) || exit "$status"
    read -r passed _ failed _ <<<"$line"
fi
# A filter names scenarios.
if [ $# -eq 0 ] || [ "$1" = daemon ]; then
    if [ "$place" = on_host ]; then start_machine; fi
    daemon_tests
fi
printf '%d passed, %d failed\n' "$passed" "$failed"
[ "$status" -eq 0 ] && [ "$failed" -eq 0 ]
