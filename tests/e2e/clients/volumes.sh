#!/usr/bin/env bash
# Volumes with real guests: a file system that outlives sandboxes, forks and a VMM that is killed.
#
#     volumes.sh FORKD TAG RESTART IN-MACHINE…
#
# RESTART starts a daemon that was killed. IN-MACHINE… runs a command where the VMMs are. The last line counts cases.
set -uo pipefail
forkd=$1 tag=$2 restart=$3
shift 3
source "$(dirname "${BASH_SOURCE[0]}")/expect.sh"

# Starts a sandbox with a volume and sets `id`.
start() {
    expect 0 '^✓ sb' spawn --tag "$tag" --timeout 1h --volume "$1"
    id=$(spawned)
}
write="import os, sys; f = open(sys.argv[1], 'w'); f.write(sys.argv[2]); f.flush(); os.fsync(f.fileno())"

# What a run that was cut short has left.
"$forkd" volume rm e2e >"$work/out" 2>&1 </dev/null

expect 0 '^e2e +64 MiB +1 ' volume create e2e --size 64M
start e2e:/data
writer=$id
expect 0 'ext4' exec "$writer" -- grep ' /data ' /proc/mounts
expect 0 '' exec "$writer" -- python3 -c "$write" /data/note first
expect 1 "sandbox $writer writes volume e2e" spawn --tag "$tag" --volume e2e:/data
# A fork has a copy of its own.
expect 0 '^✓ sb' spawn --sandbox "$writer" --timeout 1h
fork=$(spawned)
expect 0 '' exec "$fork" -- python3 -c "$write" /data/note fork
expect 0 '^first$' exec "$writer" -- sh -c 'cat /data/note; echo'
expect 0 '^fork$' exec "$fork" -- sh -c 'cat /data/note; echo'
# A branch has one, too, and a roll-back takes the volume back with the memory.
expect 0 '' branch "$writer" --tag e2e-volume
expect 0 '' checkpoint "$writer" --name point
expect 0 '' exec "$writer" -- python3 -c "$write" /data/note dropped
expect 0 '' rollback "$writer" --to point
expect 0 '^first$' exec "$writer" -- sh -c 'cat /data/note; echo'
expect 0 '^✓ sb' spawn --tag e2e-volume --timeout 1h
branch=$(spawned)
expect 0 '^first$' exec "$branch" -- sh -c 'cat /data/note; echo'
# The guest finds its disk full, and the rest of the volume stays as it is.
expect 1 'No space left on device' exec "$writer" -- dd if=/dev/zero of=/data/large bs=1M count=100
expect 0 '' exec "$writer" -- sh -c 'rm /data/large; sync'
# The daemon dies, and the next one takes the changes over.
"$@" pkill -9 -x forkd-controlle >"$work/out" 2>&1
eval "$restart" >"$work/out" 2>&1 </dev/null
expect 0 "\"writer\": \"$writer\"" volume inspect e2e --json
expect 0 '' exec "$writer" -- python3 -c "$write" /data/late 'after the daemon'
expect 0 "✓ $writer" kill "$writer"
expect 0 '"clean": true' volume inspect e2e --json
start e2e:/data:ro
expect 0 '^first$' exec "$id" -- sh -c 'cat /data/note; echo'
expect 0 '^after the daemon$' exec "$id" -- sh -c 'cat /data/late; echo'
expect 2 'Read-only file system' exec "$id" -- sh -c 'echo x > /data/x || exit 2'
expect 0 "✓ $id" kill "$id"
# A VMM that is killed loses nothing that a program synced.
start e2e:/data
expect 0 '' exec "$id" -- python3 -c "$write" /data/synced kept
pid=$("$forkd" ls --json </dev/null | python3 -c "import json, sys; print([s['pid'] for s in json.load(sys.stdin) if s['id'] == '$id'][0])")
"$@" kill -9 "$pid"
for _ in $(seq 100); do
    "$forkd" volume inspect e2e --json >"$work/out" 2>&1 </dev/null
    grep -q '"writer": null' "$work/out" && break
done
check 0 $? '"writer": null' 'volume inspect, after its VMM was killed'
expect 0 '"clean": false' volume inspect e2e --json
expect 1 'ended without unmounting it' spawn --tag "$tag" --volume e2e:/data:ro
start e2e:/data
expect 0 '^kept$' exec "$id" -- sh -c 'cat /data/synced; echo'
expect 0 "✓ $id" kill "$id"
expect 0 '"clean": true' volume inspect e2e --json
# One of two clones becomes the content.
start e2e:/data:clone
one=$id
start e2e:/data:clone
two=$id
expect 0 '' exec "$one" -- python3 -c "$write" /data/note one
expect 0 '' exec "$two" -- python3 -c "$write" /data/note two
expect 0 '^e2e ' volume commit "$two" e2e
expect 1 'has changed' volume commit "$one" e2e
expect 0 '' exec "$two" -- python3 -c "$write" /data/more 'after the commit'
start e2e:/data:ro
expect 0 '^two$' exec "$id" -- sh -c 'cat /data/note; echo'
expect 0 '' kill --all
expect 0 '' rmi e2e-volume
expect 0 '✓ e2e' volume rm e2e
finish
