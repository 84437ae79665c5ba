#!/usr/bin/env bash
# `make bench`: runs every benchmark in sequence and writes the JSON of each to target/bench. Benchmarks with real
# guests run on this host, or in a machine.
#
#     bench.sh [--clock instructions] [NAME [ARG…]]
#
# NAME runs one benchmark and prints its result as text. `--clock instructions` runs it in a machine of its own whose
# time is executed instructions: `bench.sh --clock instructions operations spawn burst`.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
source "$root/scripts/daemon.sh"

clock=
if [ "${1:-}" = --clock ]; then
    [ "${2:-}" = instructions ] || die "unknown clock: ${2:-}" "the only other clock is: --clock instructions"
    clock=$2
    shift 2
    # A second machine: the default one keeps the host's clock.
    export FORKD_MACHINE=${FORKD_MACHINE:-clock}
    machine_options=(--port 0 --clock "$clock")
fi
if [ -n "$clock" ] && [ $# -eq 0 ]; then set -- operations; fi

# `bench_program NAME ARG…`: runs one benchmark. That of the clients gets interpreters with the client libraries.
bench_program() {
    if [ "$1" = clients ]; then
        local python
        python=$(clients_python "${python_sdk[@]}" e2b==2.63.0)
        build_typescript_sdk >&2
        set -- "$@" --python "$python" --typescript "$root/sdk/typescript/dist/esm/index.js"
        export PYTHONPATH=$root/sdk/python/src
    fi
    "$bin/forkd" bench "$@"
}

step "set-up" scripts/setup.sh
step "build" scripts/build.sh
if [ $# -gt 0 ]; then
    need_daemon
    # In a machine with another clock even on a host with KVM of its own.
    if [ -n "$clock" ]; then
        step "bench $1" "$bin/forkd" machine exec -- forkd-bench "$@"
    else
        step "bench $1" bench_program "$@"
    fi
    exit
fi
mapfile -t names < <("$bin/forkd-bench" --help |
    awk '/^Commands:/ { on = 1; next } on && NF == 0 { exit } on && $1 != "help" { print $1 }')
[ ${#names[@]} -gt 0 ] || die "forkd-bench names no benchmarks"
mkdir -p "$target/bench"
bench_one() {
    bench_program "$1" --json >"$target/bench/$1.json.new" </dev/null &&
        mv "$target/bench/$1.json.new" "$target/bench/$1.json"
}
# Benchmarks without guests run before the machine starts, because the host is quieter then.
step "bench primitives" bench_one primitives
cat "$target/bench/primitives.json"
need_daemon
for name in "${names[@]}"; do
    [ "$name" != primitives ] || continue
    step "bench $name" bench_one "$name"
    cat "$target/bench/$name.json"
done
