#!/usr/bin/env bash
# `build.sh [--tests] [PROGRAM…]`: builds the named programs into target/release; without names all that people run.
# --tests adds the unit tests. The guest agent is always built: static, since it runs in guests of any distribution.
#
# Every call selects the whole workspace and then names its programs. Cargo unifies features over the selected packages,
# so this way all calls share one set of compiled dependencies, and a later call compiles only what is new to it.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

wanted=()
while [ "${1:-}" = --tests ]; do
    wanted+=("${unit_test_targets[@]}")
    shift
done
if [ $# -eq 0 ]; then set -- forkd forkd-controller forkd-vmm forkd-fc forkd-spawn forkd-net forkd-broker forkd-gateway forkd-image forkd-bench; fi
for program in "$@"; do wanted+=(--bin "$program"); done

build_programs() { cargo build --locked --release --workspace "${wanted[@]}"; }

# Naming the target keeps these flags away from build scripts and procedural macros.
build_agent() {
    RUSTFLAGS="-C target-feature=+crt-static -C relocation-model=static" \
        cargo build --locked --profile agent --target "$agent_target" -p forkd-agent
}

# Side by side: the agent has a profile folder, and with it a lock, of its own, and fills the time in which the programs
# wait for one large crate.
build_both() {
    local agent status=0
    build_agent &
    agent=$!
    build_programs || status=$?
    wait "$agent" || status=$?
    return "$status"
}

run build_both
# The tests of the agent leave a dynamically linked one here, and a running test may read it: replace it in one step.
cp "$static_agent" "$bin/.forkd-agent.$$"
mv "$bin/.forkd-agent.$$" "$bin/forkd-agent"
