#!/usr/bin/env bash
# Every command of `forkd` that talks to a daemon, as people type it, with real guests.
#
#     cli.sh FORKD
#
# The last line counts cases. The snapshot run-python-numpy stays for the tests after this one.
set -uo pipefail
forkd=$1
tag=run-python-numpy
source "$(dirname "${BASH_SOURCE[0]}")/expect.sh"

# What a run that was cut short has left.
"$forkd" rmi --force run.c2.m384-python-numpy cli-boot cli-diff cli-flat cli-half cli-live cli-of-a-fork quickstart >"$work/out" 2>&1 </dev/null

expect 0 '^\[0\.0, 0\.0, 0\.0, 0\.0, 0\.0\]$' run --image python-numpy -- python3 -c 'import numpy; print(numpy.zeros(5).tolist())'
expect 7 '' run -- sh -c 'exit 7'
expect 0 '"stdout": "hello' run --json -- echo hello
export CLI_PASSED_ON=yes
expect 0 '^b yes nobody /tmp$' run -e A=b -e CLI_PASSED_ON -u nobody -w /tmp -- sh -c 'echo $A $CLI_PASSED_ON $(id -un) $PWD'
printf 'hello' | "$forkd" run -i -- tr a-z A-Z >"$work/out" 2>&1
check 0 $? '^HELLO$' 'run -i -- tr a-z A-Z'
expect 143 'killed after 1 s' run --timeout-secs 1 -- sleep 60
# Another shape has a snapshot of its own, and the one of the image stays as it is.
expect 0 '^2$' run --vcpus 2 --memory 384M -- nproc
expect 0 '^run.c2.m384-python-numpy +ready' images
expect 0 '^vcpus +2$' snapshot-info run.c2.m384-python-numpy
expect 0 '✓ run.c2.m384-python-numpy' rmi run.c2.m384-python-numpy
expect 0 '"sandbox": "sb' run --keep --json --label of=cli-keep -- touch /root/kept
kept=$("$forkd" ls -q | tail -n 1)
expect 0 '' exec "$kept" -- test -e /root/kept
expect 0 "✓ $kept" kill "$kept"
expect 0 '' run --rm -- true
expect 0 '' ls -q
check 0 "$(wc -l <"$work/out")" '' 'run leaves no sandbox behind'
expect 0 '"memory_limit_mib": 300' spawn --tag $tag --memory-limit 300M --json --label of=cli --timeout 1h
expect 0 '"cpus": 0.5' spawn --tag $tag --cpus 0.5 --cpu-weight 50 --pids-limit 64 --json --label of=limits --timeout 1h
limited=$("$forkd" ls -q | tail -n 1)
expect 0 "✓ $limited" kill "$limited"
expect 1 'limits.memory_mib is 1: give 16 to' spawn --tag $tag --memory-limit 1M
id=$("$forkd" ls -q | tail -n 1)
expect 0 "^$id +$tag +running" ls
expect 0 '"pong": true' ping "$id"
expect 0 '^hello$' exec "$id" -- echo hello
expect 42 '' exec "$id" -- sh -c 'exit 42'
expect 137 '' exec "$id" -- sh -c 'kill -9 $$'
expect 127 'cannot run nosuch' exec "$id" -- nosuch
expect 126 'cannot run /etc/passwd' exec "$id" -- /etc/passwd
expect 0 '^b /tmp$' exec -e A=b -w /tmp "$id" -- sh -c 'echo $A $PWD'
expect 0 '^nobody$' exec -u nobody "$id" -- id -un
expect 143 'killed after 1 s' exec --timeout-secs 1 "$id" -- sleep 60
expect 0 '"exit_code": 0' exec --json "$id" -- true
expect 2 'variable bad is not set here: write KEY=VALUE' exec -e bad "$id" -- true
expect 2 'cannot be used with' exec -i --json "$id" -- true
printf 'hello' | "$forkd" exec -i "$id" -- tr a-z A-Z >"$work/out" 2>&1
check 0 $? '^HELLO$' "exec -i $id -- tr a-z A-Z"
# A terminal without input, if the host has a program that provides one.
used+='shell '
if command -v script >/dev/null; then
    mkfifo "$work/keys"
    exec 3<>"$work/keys"
    script -qec "'$forkd' shell '$id' -- sh -c 'test -t 0 && echo terminal && exit 5'" /dev/null >"$work/out" 2>&1 <&3
    check 5 $? '^terminal' "shell $id -- sh -c …"
    script -qec "'$forkd' exec -t '$id' -- sh -c 'test -t 0 && echo terminal && exit 6'" /dev/null >"$work/out" 2>&1 <&3
    check 6 $? '^terminal' "exec -t $id -- sh -c …"
    script -qec "'$forkd' run -t -- sh -c 'test -t 0 && echo terminal && exit 4'" /dev/null >"$work/out" 2>&1 <&3
    check 4 $? '^terminal' 'run -t -- sh -c …'
    # On a terminal no escape sequence of the guest gets through.
    "$forkd" exec "$id" -- sh -c 'printf "\033]0;title\007mark\n" >/dev/console' >"$work/out" 2>&1 </dev/null
    script -qec "'$forkd' logs '$id'" /dev/null >"$work/out" 2>&1 <&3
    check 0 $? 'mark' "logs $id on a terminal"
    grep -q "$(printf '\033')" "$work/out"
    check 1 $? '' 'logs on a terminal: no escape sequences'
    exec 3>&-
fi
expect 125 'standard input is not a terminal' shell "$id"
expect 0 '' limits "$id"
expect 0 'public|none' net show "$id"
expect 0 'python-numpy' image ls
expect 1 'error' from-image --tag cli-from tar:"$work/no-such-file"
# The round trip of an artifact takes minutes on an emulated processor; tests/daemon makes it with fake VMMs.
expect 1 'no snapshot' pack cli-none "$work/packed"
expect 1 'no snapshot' push cli-none "$work/hub"
expect 1 'error' unpack "$work/no-such-file"
expect 1 'error' pull oci:"$work/hub":cli-none
expect 0 'forkd' mcp install cursor --dry-run
expect 0 '^\[0, 1, 4\]$' eval "$id" -- '[x * x for x in range(3)]'
expect 1 'ZeroDivisionError' eval "$id" -- '1 / 0'
expect 0 '' eval "$id" -- 'kept = 41'
names() { "$forkd" exec "$id" -- sh -c 'cat /etc/machine-id; uname -n' </dev/null; }
names >"$work/names" 2>&1
expect 0 '^before$' checkpoint "$id" --name before
expect 0 '' eval "$id" -- 'kept = 42'
expect 0 '^back at before$' rollback "$id" --to before
expect 0 '^41$' eval "$id" -- kept
names 2>&1 | diff "$work/names" - >"$work/out"
check 0 $? '' 'a roll-back keeps machine ID and host name'
grep -Eq '^[0-9a-f]{32}$' "$work/names"
check 0 $? '' 'the machine ID is one'
expect 0 '^before  [0-9]+ KiB$' checkpoint "$id" --list
expect 0 '"ok": true' checkpoint "$id" --rm before --json
expect 1 '"code": "checkpoint_not_found"' rollback "$id" --to before --json
# More than one buffer of every part on the way.
head -c 3000000 /dev/urandom >"$work/big"
expect 0 '3000000 bytes written' cp "$work/big" "$id:/root/big"
expect 0 '' cp "$id:/root/big" "$work/back"
cmp "$work/big" "$work/back" >"$work/out" 2>&1
check 0 $? '' 'cp there and back: the same bytes'
expect 0 '"bytes": 3000000' cp --json "$id:/root/big" "$work/back"
expect 1 'cannot open /nope' cp "$id:/nope" "$work/x"
find "$work" -name 'x*' >"$work/out"
check 0 "$(wc -l <"$work/out")" '' 'cp of nothing leaves nothing'
expect 0 '' logs "$id"
expect 0 '' logs "$id" --raw --tail 100
expect 0 'OWN +SHARED' top
expect 0 '^tag: cli-half$' branch "$id" --tag cli-half
expect 1 'already a snapshot cli-half' branch "$id" --tag cli-half
expect 0 '^cli-half +ready' images
expect 0 '^parent +run-python-numpy$' snapshot-info cli-half
expect 0 '^tag: cli-live$' snapshot --from-sandbox "$id" --tag cli-live --live
expect 0 '^branched_from: ' snapshot --from-sandbox "$id" --tag cli-diff --diff
expect 0 '✓ cli-diff' rmi --force cli-live cli-diff
expect 0 '^tag: cli-flat$' snapshot-compact --from cli-half --to cli-flat
expect 0 '^parent +-$' snapshot-info cli-flat
expect 0 '^✓ cli-flat can be used by everyone$' snapshot-share cli-flat
expect 0 '^✓ cli-flat can be used by its owner$' snapshot-share cli-flat --private
# A parent that is there already spares the boot of one.
expect 0 '^tag: quickstart$' snapshot-compact --from cli-half --to quickstart
expect 0 'fork 2 children of the branch' quickstart -n 2
"$forkd" images >"$work/out" 2>&1 </dev/null
grep -q quickstart-branch "$work/out"
check 1 $? '' 'quickstart takes its branch away'
expect 0 '✓ quickstart' rmi cli-flat quickstart
expect 0 '^tag: cli-boot$' snapshot --tag cli-boot --image python-numpy --warmup 'touch /root/warm' --warmup-code 'warm = 6 * 7'
expect 0 '^✓ sb[^ ]+( ready=[0-9.]+ms)?$' spawn --tag cli-boot --timeout 1h
warm=$(spawned)
expect 0 '^42$' eval "$warm" -- warm
expect 0 '' exec "$warm" -- test -e /root/warm
expect 1 'KeyboardInterrupt|TimeoutError' eval --timeout-secs 1 "$warm" -- '__import__("time").sleep(60)'
expect 0 "✓ $warm" kill --tag cli-boot
expect 0 '✓ cli-boot' rmi cli-boot
expect 0 '^2 / 2 children alive$' fork --tag cli-half -n 2 --settle-secs 0
expect 0 '"alive": 1' fork --sandbox "$id" -n 1 --settle-secs 0 --json
expect 0 '' exec "$id" -- touch /root/before-the-fork
expect 0 '^✓ sb[^ ]+( ready=[0-9.]+ms)?$' spawn --sandbox "$id" --timeout 1h
forked=$(spawned)
expect 0 '' exec "$forked" -- test -e /root/before-the-fork
# It can itself be branched, though what it was started from has no name. The processes of the child run: it thaws them.
expect 0 '^tag: cli-of-a-fork$' branch "$forked" --tag cli-of-a-fork --freeze
expect 0 "✓ $forked" kill "$forked"
expect 0 '^✓ sb[^ ]+( ready=[0-9.]+ms)?$' spawn --tag cli-of-a-fork --timeout 1h
expect 0 '' exec "$(spawned)" -- test -e /root/before-the-fork
expect 0 '^✓ sb' kill --tag cli-of-a-fork
expect 0 '✓ cli-of-a-fork' rmi cli-of-a-fork
expect 0 '^limit +none$' store
expect 0 '"physical_bytes": [1-9]' store --json
expect 0 '^[1-9][0-9]* snapshots and [1-9][0-9]* files checked, 0 problems$' store --check --deep
expect 0 '^parent_tag +cli-half$' snapshot-diff --from cli-half --tag cli-diff --exec 'touch /root/made'
expect 1 'cli-diff' rmi cli-half
expect 0 '✓ cli-half' rmi --cascade cli-half
expect 1 '"ok": false' rmi --json cli-half
expect 1 'no snapshot cli-half.*\(snapshot_not_found, request ' spawn --tag cli-half
expect 0 'running source=run-python-numpy' workspace create cli-ws --snapshot $tag
expect 0 'suspended' workspace suspend cli-ws --diff
expect 0 'running' workspace resume cli-ws
expect 0 '^cli-ws +running' workspace list
expect 0 '"name": "cli-ws"' workspace list --json
expect 0 '✓ cli-ws' workspace delete cli-ws
expect 0 '"ok": true' kill --tag $tag --json
expect 125 'no sandbox' exec "$id" -- true
expect 125 '"code": "sandbox_not_found"' exec --json "$id" -- true
# The first token would close the daemon for every other test, so only refusals are tried here.
expect 1 'first token must have the role admin' token create cli-user --role use
expect 0 '^NAME +OWNER +ROLE' token ls
expect 1 'no token cli-user' token revoke cli-user
expect 0 '^NAME +STATE +LOAD' node ls
expect 1 'there is no image cli-none' export cli-none oci-archive:"$work/none.tar"
expect 1 'there is no volume cli-none' volume rm cli-none
expect 0 'nothing to remove|WHAT' cleanup
expect 0 'fail=0' doctor

# Those that speak to no daemon are tested elsewhere; ports, forward and build have tests of their own.
used+='bench build completions forward gateway machine man parent ports where '
"$forkd" --help | sed -n '/^Commands:$/,/^$/s/^  \([a-z-]*\) .*/\1/p' >"$work/names"
while read -r name; do
    case $used in
        *" $name "*) ;;
        *) echo "$name" ;;
    esac
done <"$work/names" >"$work/out"
check 0 "$(wc -l <"$work/out")" '' 'commands: each has a case here'
finish
