#!/usr/bin/env bash
# Runs the conformance suite of the Model Context Protocol against `/mcp` of a daemon that has no sandboxes. The suite
# comes from its npm package. tests/e2e/mcp names the scenarios that do not pass, with the reason: most call tools, prompts
# or resources that only a server made for the suite has. A scenario beside them that fails, or one of them that passes,
# is an error.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

suite=@modelcontextprotocol/conformance@0.2.0-alpha.12
use_node
folder=$cache/npm/$(printf '%s' "$suite" | sha256sum | cut -c1-16)
if [ ! -e "$folder/done" ]; then
    say "    installing $suite"
    mkdir -p "$folder"
    npm install --prefix "$folder" --no-audit --no-fund --loglevel=error "$suite" >&2
    touch "$folder/done"
fi

work=$(mktemp -d)
port=$(python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$bin/forkd-controller" serve --bind "127.0.0.1:$port" --data-dir "$work/data" --run-dir "$work/run" --mcp all \
    >"$work/log" 2>&1 </dev/null &
daemon=$!
at_end 'kill "$daemon" 2>/dev/null; wait "$daemon" 2>/dev/null; rm -rf "$work"'
tenths=300
until FORKD_URL=http://127.0.0.1:$port "$bin/forkd" ls </dev/null >/dev/null 2>&1; do
    kill -0 "$daemon" 2>/dev/null || { cat "$work/log" >&2; die "the daemon ended at once"; }
    ((tenths-- > 0)) || die "the daemon does not answer"
    sleep 0.1
done

passed=0 failed=0
for revision in 2026-07-28 2025-11-25; do
    if "$folder/node_modules/.bin/conformance" server --url "http://127.0.0.1:$port/mcp" --requirements "$revision" \
        --expected-failures "$root/tests/e2e/mcp/$revision.yml" >"$work/$revision" 2>&1 </dev/null; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        cat "$work/$revision"
    fi
    printf '%s: %s\n' "$revision" "$(grep '^Total' "$work/$revision" || true)"
done
printf '%d passed, %d failed\n' "$passed" "$failed"
[ "$failed" -eq 0 ]
