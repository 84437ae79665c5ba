#!/usr/bin/env bash
# `clock-tests.sh`: compares the main operations with bench/expected.json, in a machine whose time is executed
# instructions. The same operation takes the same time there, whatever the load of the host. A measurement that misses its
# deadline is taken again.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
source "$root/scripts/daemon.sh"

export FORKD_MACHINE=${FORKD_MACHINE:-clock-test}
expected=/var/lib/forkd/expected.json
operations=(spawn exec eval)

at_end '"$bin/forkd" machine stop </dev/null >/dev/null'
"$bin/forkd" machine start --port 0 --clock instructions </dev/null
provide_image
copy_in "$root/bench/expected.json" "$expected"
in_machine forkd-bench operations "${operations[@]}" --rounds 2 --expect "$expected"
