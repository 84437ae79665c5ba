#!/usr/bin/env bash
# A snapshot goes from one daemon through Debian's registry to another, and a child answers there. Runs where the VMMs are.
#
#     hub.sh FORKD-CONTROLLER FORKD REGISTRY TAG
#
# The last line counts cases.
set -uo pipefail
controller=$1 forkd=$2 registry=$3 tag=$4
source "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
export HOME=$work XDG_CACHE_HOME=$work/cache

cat >"$work/config.yml" <<END
version: 0.1
log: {level: error}
storage: {filesystem: {rootdirectory: $work/registry}}
http: {addr: '127.0.0.1:5055'}
END
"$registry" serve "$work/config.yml" >"$work/registry.log" 2>&1 &
served=$!
"$controller" serve --data-dir "$work/second" --run-dir "$work/run" --socket "$work/second.sock" >"$work/second.log" 2>&1 &
second=$!
trap 'kill $served $second; wait; rm -rf "$work"' EXIT
for _ in $(seq 300); do
    if curl -fs http://127.0.0.1:5055/v2/ >/dev/null && curl -fs --unix-socket "$work/second.sock" http://x/healthz >/dev/null; then break; fi
    sleep 0.1
done
target=oci://127.0.0.1:5055/team/machines:py
there=(--daemon-url "unix://$work/second.sock")

expect 0 '"new_bytes": [1-9]' push "$tag" $target --json
expect 0 '"new_bytes": 0,' push "$tag" $target --json
expect 1 'there is no snapshot "other"' pull oci://127.0.0.1:5055/team/machines:other "${there[@]}"
expect 0 '' pull $target --tag arrived --memory require "${there[@]}"
expect 0 '^✓ sb' spawn --tag arrived "${there[@]}"
id=$(spawned)
expect 0 '^42$' eval "$id" "${there[@]}" -- '6 * 7'
expect 0 '' kill --all "${there[@]}"
# A second boot of the same image sends what differs.
if [ -n "${HUB_SECOND_BOOT:-}" ]; then
    expect 0 '' snapshot --tag hub-second --image python-numpy
    expect 0 '"new_bytes": [1-9]' push hub-second $target --json
    sed 's/^/     | /' "$work/out"
    expect 0 '' rmi hub-second
fi
finish
