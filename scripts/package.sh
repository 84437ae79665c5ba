#!/usr/bin/env bash
# `make package`: builds the programs, kernel and first image, and writes wheel, npm packages, Debian package and bill of
# materials to target/package, with SHA256SUMS.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

out=$target/package
work=$(mktemp -d)
at_end 'rm -rf "$work"'

fill_state() { "$bin/forkd-image" install python-numpy --data-dir "$work/state" >&2; }
write_packages() {
    use_node
    python3 packaging/tools/package.py "$bin" "$out" --state "$work/state"
}

step "set-up" scripts/setup.sh
step "build" scripts/build.sh
step "kernel and image" fill_state
rm -rf "$out"
step "packages" write_packages
