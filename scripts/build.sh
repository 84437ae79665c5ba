#!/usr/bin/env bash
# Builds the programs into target/release. The agent is linked statically, since it runs in guests of any distribution.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

agent_target=x86_64-unknown-linux-gnu

run cargo build --locked --release --workspace --bins --exclude xtask --exclude forkd-agent
# Naming the target keeps these flags away from build scripts and procedural macros.
RUSTFLAGS="-C target-feature=+crt-static -C relocation-model=static" \
    run cargo build --locked --profile agent --target "$agent_target" -p forkd-agent
# A process may be reading the old file: replace it atomically.
cp "$target/$agent_target/agent/forkd-agent" "$bin/.forkd-agent.$$"
mv "$bin/.forkd-agent.$$" "$bin/forkd-agent"
