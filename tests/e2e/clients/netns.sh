#!/usr/bin/env bash
# The network namespace of a real child, in a machine where the daemon runs as root. The last line counts cases.
#
#     netns.sh FORKD TAG
set -euo pipefail
forkd=$1 tag=$2
passed=0 failed=0

check() {
    if "${@:2}"; then
        passed=$((passed + 1))
        echo "ok   $1"
    else
        failed=$((failed + 1))
        echo "FAIL $1"
    fi
}

# `ask NAMESPACE LINE`: the answer of the line-based protocol at the address of the guest.
ask() {
    "$forkd" machine exec --no-sync -- ip netns exec "$1" bash -c \
        'exec 3<>/dev/tcp/10.42.0.2/8888; printf "%s\n" "$1" >&3; cat <&3' bash "$2" </dev/null
}

children=$("$forkd" spawn --tag "$tag" -n 2 --per-child-netns </dev/null)
echo "$children"
mapfile -t ids < <(sed -n 's/^✓ \([^ ]*\) .*/\1/p' <<<"$children")
mapfile -t names < <(sed -n 's/.* netns=\([^ ]*\).*/\1/p' <<<"$children")

two_namespaces() { [ "${#names[@]}" -eq 2 ] && [ "${names[0]}" != "${names[1]}" ] && [[ ${names[0]} == forkd-child-* ]]; }
own_children() {
    "$forkd" exec "${ids[0]}" -- sh -c 'echo first >/tmp/mark' </dev/null
    [[ $(ask "${names[0]}" '{"action": "exec", "args": ["cat", "/tmp/mark"]}') == *'"stdout":"first\n"'* ]] &&
        [[ $(ask "${names[1]}" '{"action": "exec", "args": ["ls", "/tmp/mark"]}') != *'"exit_code":0'* ]]
}
nothing_left() {
    "$forkd" kill "${ids[@]}" </dev/null >/dev/null
    [ -z "$("$forkd" machine exec --no-sync -- ip netns list </dev/null)" ]
}

check "each child has a namespace" two_namespaces
check "the address of the guest is the own child" own_children
check "the namespaces end with the children" nothing_left
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
