# shellcheck shell=bash
# Sourced by vm-tests.sh: the machines of a test run. FORKD_MACHINE selects the machine of a command.

inside=/var/lib/forkd/e2e
# The test program expects the other programs beside itself, which is where the machine has them.
test_program=/usr/local/bin/forkd-e2e
machines=()

# Each run has its own machines, so that runs in two clones do not collide. A slot and its data disk are reused. There
# are as many slots as CPUs, because an emulated machine needs a whole one. The locks (descriptors 7 and 8) belong to
# this shell; a machine that outlives the shell must not hold them.
take_machines() {
    local wanted=$1 waited=0
    mkdir -p "$cache/test-slots"
    until take_slots "$wanted"; do
        if [ $((waited % 60)) -eq 0 ]; then say "    waiting for a machine: another test run has them all ($((waited / 60)) min)"; fi
        sleep 5
        waited=$((waited + 5))
    done
}

# Takes free slots, up to the given number. Fails if there is none.
take_slots() {
    local wanted=$1 slot
    for ((slot = 0; slot < $(nproc); slot++)); do
        [ "${#machines[@]}" -lt "$wanted" ] || break
        if [ "${#machines[@]}" -eq 0 ]; then
            exec 7>"$cache/test-slots/$slot"
            flock -n 7 || continue
        else
            exec 8>"$cache/test-slots/$slot"
            flock -n 8 || continue
        fi
        machines+=("test-$slot")
        at_end "stop_machine test-$slot"
    done
    [ "${#machines[@]}" -gt 0 ]
}

without_locks() { "$@" 7>&- 8>&-; }
machine() { without_locks "$bin/forkd" machine "$@" </dev/null; }
ask_machine() { machine exec --no-sync -- "$@"; }

stop_machine() {
    say "    stopping machine $1"
    FORKD_MACHINE=$1 machine stop >/dev/null
}

# Two machines leave a third of the memory to the host.
machine_memory() {
    local third
    third=$(awk '/^MemTotal/ { print int($2 / 1024 / 3) }' /proc/meminfo)
    printf '%dM' "$((third > 8192 ? 8192 : third < 2048 ? 2048 : third))"
}

fill_machine() {
    machine start --port 0 --memory "$(machine_memory)" >&2
    push_assets
    machine cp "$bin/forkd-e2e" ":$test_program"
}

push_assets() {
    local stamp file
    # A path in the cache identifies its content.
    stamp=$(readlink "$assets"/* | sha256sum | cut -c1-16)
    if ask_machine test -e "$inside/$stamp"; then return 0; fi
    say "    copying kernel and image into machine $FORKD_MACHINE"
    ask_machine rm -rf "$inside"
    ask_machine mkdir -p "$inside"
    for file in "$assets"/*; do
        machine cp "$(readlink "$file")" ":$inside/$(basename "$file")"
    done
    ask_machine touch "$inside/$stamp"
}

in_machine() {
    local variables=(--env "FORKD_ASSETS=$inside")
    if [ -n "$soak" ]; then variables+=(--env FORKD_SOAK=1); fi
    machine exec --no-sync "${variables[@]}" -- "$test_program" --exact "$1" --nocapture
}

machine_is_lost() { ! without_locks timeout 60 "$bin/forkd" machine exec --no-sync -- true </dev/null >/dev/null 2>&1; }
machine_is_emulated() { machine status --json | grep -q '"accel": "tcg"'; }
last_words() { machine logs | grep -aE 'BUG|panic|RIP|Comm:' | tail -n 8 >&2 || true; }

start_again() {
    machine stop >/dev/null 2>&1 || true
    fill_machine
}
