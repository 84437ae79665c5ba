# shellcheck shell=bash
# Sourced by tests of commands: `forkd` is the program, `work` a folder of the test, `passed` and `failed` are counters.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0 failed=0 used=' '

# `expect STATUS PATTERN COMMAND…`: stdout and stderr must hold the pattern, unless it is empty.
expect() {
    local status=$1 pattern=$2 got=0
    shift 2
    used+="$1 "
    "$forkd" "$@" >"$work/out" 2>&1 </dev/null || got=$?
    check "$status" "$got" "$pattern" "$*"
}

# `check WANTED GOT PATTERN NAME`, with the output in `$work/out`.
check() {
    if [ "$1" = "$2" ] && { [ -z "$3" ] || grep -qE -- "$3" "$work/out"; }; then
        passed=$((passed + 1))
        echo "ok   forkd $4"
    else
        failed=$((failed + 1))
        echo "FAIL forkd $4"
        echo "     exit $2, wanted $1; wanted output: $3"
        sed 's/^/     | /' "$work/out" | head -n 20
    fi
}

# The sandbox that `spawn` has just named.
spawned() { sed -n 's/^✓ \(sb[^ ]*\).*/\1/p' "$work/out" | head -n 1; }

finish() {
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ]
}
