#!/usr/bin/env bash
# The one place that runs the scenarios with real guests (tests/e2e) and the tests of the daemon from outside
# (daemon-tests.sh): directly where the host's KVM is native, otherwise in machines, which end with the run. An emulated
# machine has one processor, so there are two of them. Arguments choose scenarios by parts of their names. A first argument
# that begins with `daemon` leaves the scenarios out and chooses tests of the daemon: `daemon` all of them, `daemon: many`
# those whose names begin so. `--list` lists names and runs nothing. Progress goes to stderr; stdout ends with a line `N passed, N failed`.
#
#     vm-tests.sh [--soak] [--list] [daemon | NAME-PART…]
#
# NAME-PART selects scenarios by parts of their names. `daemon` runs only the tests of the daemon. `--list` only lists
# the scenarios. `--soak` uses large counts and skips scenarios that have passed with the same programs. Progress goes
# to stderr; stdout ends with a line `N passed, N failed`.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
source "$root/scripts/machines.sh"
source "$root/scripts/daemon-tests.sh"

soak=
if [ "${1:-}" = --soak ]; then
    soak=1
    shift
fi

work=$(mktemp -d)
at_end 'rm -rf "$work"'
touch "$work/todo" "$work/results"

# Fills a folder with links to the files in the cache, and names it in `assets`.
make_assets() {
    assets=$work/assets
    mkdir "$assets"
    local kernel
    kernel=$("$bin/forkd-image" kernel)
    ln -s "$kernel/vmlinux" "$kernel/vmlinuz" "$assets/"
    ln -s "$("$bin/forkd-image" initramfs)" "$assets/initramfs"
    ln -s "$("$bin/forkd-image" build python-numpy)" "$assets/python-numpy.ext4"
}

# ---- the list of work

# Prints the file that records passed names for these programs: `passed_before PROGRAM…`. Only soaks use it.
passed_before() {
    local key
    [ -n "$soak" ] || { printf '%s' /dev/null; return; }
    key=$(cd "$bin" && sha256sum "$@" | sha256sum | cut -c1-16)
    mkdir -p "$cache/soak"
    touch "$cache/soak/$key"
    printf '%s' "$cache/soak/$key"
}

# Each argument is a part of a name; no argument selects all.
list_scenarios() {
    local part
    if [ $# -eq 0 ]; then set -- ''; fi
    for part in "$@"; do FORKD_SOAK=$soak "$bin/forkd-e2e" --list "$part" 2>/dev/null; done | sed -n 's/: test$//p' | awk '!seen[$0]++'
}

fill_todo() {
    local name
    done_list=$(passed_before forkd-vmm forkd-spawn forkd-agent forkd-e2e)
    # The longest first: the tests of the daemon are many and share a machine.
    if [ $# -eq 0 ] || [[ $1 == daemon* ]]; then printf 'daemon\n' >>"$work/todo"; fi
    if [[ ${1:-} == daemon* ]]; then
        daemon_only=$1
        return
    fi
    while read -r name; do
        if grep -qxF "$name" "$done_list"; then
            say "    $name: passed before"
            printf 'ok %s\n' "$name" >>"$work/results"
        else
            printf '%s\n' "$name" >>"$work/todo"
        fi
    done < <(list_scenarios "$@")
}

# Prints the next name and removes it from the list.
next() {
    (
        flock 9
        head -n 1 "$work/todo"
        sed -i 1d "$work/todo"
    ) 9>"$work/lock"
}

# ---- execution

on_host() { FORKD_ASSETS=$assets FORKD_SOAK=$soak "$bin/forkd-e2e" --exact "$1" --nocapture; }

# Prints the measurements of a scenario. Logs of forkd's programs are shown only if the scenario failed.
show() {
    local verdict=$1 name=$2 log=$3 begin=$4
    took "scenario $name" $(($(now_ms) - begin))
    {
        printf 'test %-46s ... %s (%s)\n' "$name" "$verdict" "$(elapsed "$begin")"
        if [ "$verdict" = ok ]; then
            sed -E -e 's/^test [a-z_:#0-9]+ +\.\.\. //' -e '/^(ok|$)/d' -e '/^(running |test result)/d' \
                -e '/^[0-9T:.-]+Z +(INFO|WARN|ERROR) /d' -e '/^[0-9]+ passed, [0-9]+ failed$/d' -e 's/^/    /' "$log"
        else
            tail -n 200 "$log"
        fi
    } >&2
}

# A soak prints its progress; an everyday run prints everything at its end.
follow() {
    if [ -n "$soak" ]; then sed -u -n -E "s/^(test [^ ]+ +\.\.\. )?([0-9]+ [a-z]+ after .*)/    $1: \2/p" >&2; else cat >/dev/null; fi
}

# `scenario NAME [second]`. If an emulated machine dies, the scenario runs again in a new machine. A scenario that
# fails on an emulated CPU gets a second, visible try. On real hardware a failure is a failure.
scenario() {
    local name=$1 second=${2:-} log=$work/$1.log begin status=0 try
    begin=$(now_ms)
    for try in 1 2 3; do
        status=0
        "$place" "$name" </dev/null 2>&1 | tee "$log" | follow "$name" || status=${PIPESTATUS[0]}
        if [ "$status" -eq 0 ] || [ "$place" = on_host ] || ! machine_is_lost; then break; fi
        say "    machine $FORKD_MACHINE is lost in $name (try $try of 3); its console says:"
        last_words
        start_again
    done
    if [ "$status" -eq 0 ]; then
        show ok "$name" "$log" "$begin"
        printf 'ok %s\n' "$name" >>"$work/results"
        if [ -n "$soak" ]; then printf '%s\n' "$name" >>"$done_list"; fi
        return
    fi
    show FAILED "$name" "$log" "$begin"
    if [ -z "$second" ] && [ "$place" = in_machine ] && machine_is_emulated; then
        say "    $name failed on an emulated processor: a second try"
        scenario "$name" second
    else
        printf 'FAILED %s\n' "$name" >>"$work/results"
    fi
}

worker() {
    local name
    export FORKD_MACHINE=$1
    if [ "$place" = in_machine ]; then fill_machine; fi
    while name=$(next) && [ -n "$name" ]; do
        if [ "$name" != daemon ]; then
            scenario "$name"
        else
            # The tested daemon always runs in a machine.
            if [ "$place" = on_host ]; then fill_machine; fi
            daemon_tests
        fi
    done
}

workers() {
    local name pids=() pid status=0
    for name in "${machines[@]}"; do
        worker "$name" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
    return "$status"
}

if [ "${1:-}" = --list ]; then
    shift
    list_scenarios "$@"
    list_daemon_cases "$@"
    exit
fi

make_assets
fill_todo "$@"
total=$(wc -l <"$work/todo")
kvm=$(probe_kvm)
if [ "$kvm" = native ]; then
    say "    guests run directly on /dev/kvm"
    place=on_host
    take_machines 1
else
    say "    /dev/kvm is $kvm: guests run in machines"
    place=in_machine
    take_machines "$((total < 2 ? 1 : 2))"
fi

status=0
run workers || status=$?

# A line of `results` is a scenario or a number of cases: `ok NAME`, `FAILED NAME`, `ok N cases`, `FAILED N cases`.
count() { awk -v verdict="$1" '$1 == verdict { n += $3 == "cases" ? $2 : 1 } END { print n + 0 }' "$work/results"; }
sed -n 's/^FAILED /    failed: /p' "$work/results" >&2
# Work that no worker has taken counts as failed.
left=$(wc -l <"$work/todo")
if [ "$left" -gt 0 ]; then say "    $left not run: $(tr '\n' ' ' <"$work/todo")"; fi
passed=$(count ok) failed=$(($(count FAILED) + left))
printf '%d passed, %d failed\n' "$passed" "$failed"
[ "$status" -eq 0 ] && [ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
