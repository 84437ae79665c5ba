#!/usr/bin/env bash
# The power of a machine is cut while its daemon works. Acknowledged data is complete afterwards.
#
#     power.sh FORKD TAG START…
#
# START… starts the machine again. The last line counts cases.
set -uo pipefail
forkd=$1 tag=$2
shift 2
source "$(dirname "${BASH_SOURCE[0]}")/expect.sh"

field() { sed -n "s/^ *\"$1\": \"\\{0,1\\}\\([^\",]*\\).*/\\1/p" "$work/out" | head -n 1; }

# What a run that was cut short has left.
"$forkd" workspace delete power-ws >"$work/out" 2>&1 </dev/null
"$forkd" rmi --force power-branch power-half >"$work/out" 2>&1 </dev/null

expect 0 '^✓ sb-' spawn --tag "$tag" --timeout 1h
origin=$(spawned)
# No process in the guest syncs: a branch contains every write that the guest was told was durable.
expect 0 '' exec "$origin" -- sh -c 'echo acknowledged > /root/said'
expect 0 '' eval "$origin" -- 'kept = 6 * 7'
expect 0 '^tag: power-branch$' branch "$origin" --tag power-branch
expect 0 '"status": "running"' workspace create power-ws --snapshot "$tag" --json
workspace=$(field live_sandbox_id)
expect 0 '' exec "$workspace" -- sh -c 'echo asleep > /root/said'
expect 0 'suspended' workspace suspend power-ws
# These have no name and need none: they end with the power.
expect 0 '^✓ sb-' spawn --sandbox "$origin" -n 2 --timeout 1h
"$forkd" branch "$origin" --tag power-half >/dev/null 2>&1 </dev/null &
sleep 0.5

expect 0 '"pid"' machine status --json
kill -9 "$(field pid)"
wait
"$@" >"$work/out" 2>&1 </dev/null
check 0 $? '' 'machine start, after the power was gone'

expect 0 ', 0 problems$' store --check --deep
expect 0 '^power-branch +ready' images
"$forkd" ls --json >"$work/out" 2>&1 </dev/null
grep -q '"state": "running"' "$work/out"
check 1 $? '' 'ls: no sandbox outlives the power'
expect 0 '^✓ sb-' spawn --tag power-branch --timeout 1h
child=$(spawned)
expect 0 '^acknowledged$' exec "$child" -- cat /root/said
expect 0 '^42$' eval "$child" -- kept
expect 0 'running' workspace resume power-ws
expect 0 "\"live_sandbox_id\": \"$workspace\"" workspace list --json
expect 0 '^asleep$' exec "$workspace" -- cat /root/said
# The unacknowledged branch is complete or absent, and its name can be used.
"$forkd" rmi power-half >/dev/null 2>&1 </dev/null
expect 0 '^tag: power-half$' branch "$child" --tag power-half
expect 0 '✓ power-branch' rmi --cascade power-branch
expect 0 '✓ power-ws' workspace delete power-ws
expect 0 '' kill --all
finish
