#!/usr/bin/env bash
# `make bench`: runs every benchmark in sequence and writes the JSON of each to target/bench. Benchmarks with real
# guests run on this host, or in a machine.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
source "$root/scripts/daemon.sh"

step "set-up" scripts/setup.sh
step "build" scripts/build.sh
mapfile -t names < <("$bin/forkd-bench" --help |
    awk '/^Commands:/ { on = 1; next } on && NF == 0 { exit } on && $1 != "help" { print $1 }')
[ ${#names[@]} -gt 0 ] || die "forkd-bench names no benchmarks"
mkdir -p "$target/bench"
bench_one() {
    "$bin/forkd" bench "$1" --json >"$target/bench/$1.json.new" </dev/null &&
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
