#!/usr/bin/env bash
# Runs the test of one framework adapter against a daemon: `adapter-tests.sh FRAMEWORK TAG`, where TAG is a snapshot with
# Python. The daemon is the one that FORKD_URL names. The framework is installed into the cache. `make soak` runs all of
# them, `make test` none: frameworks are large. The last line is `N passed, N failed`. A failure that is expected is named
# in expected.txt beside the tests, with its reason, and does not count; if it passes, that is a failure.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

python_adapters="autogen crewai deepagents inspect_ai openai_agents pydantic_ai swarm"
node_adapters="ai-sdk deepagents-js mastra openai-agents-js"
if [ "${1:-}" = --list ]; then
    printf '%s\n' $python_adapters $node_adapters
    exit
fi
if [ $# -ne 2 ]; then die "usage: adapter-tests.sh FRAMEWORK TAG" "adapter-tests.sh --list prints the frameworks"; fi
framework=$1
export FORKD_TEST_TAG=$2

work=
at_end 'rm -rf "$work"'

# `count PASSED FAILED`: ends the run.
count() {
    printf '%d passed, %d failed\n' "$1" "$2"
    [ "$2" -eq 0 ] && [ "$1" -gt 0 ]
}

run_python() {
    local python
    work=$(mktemp -d)
    python=$(clients_python httpx2==2.16.0 pytest==9.1.1 anyio "$@")
    cd "$root/sdk/python/tests/adapters"
    PYTHONPATH=$root/sdk/python/src "$python" -m pytest -q --tb=short --rootdir=. -p no:cacheprovider -o python_files='check_*.py' \
        --junitxml "$work/result.xml" "check_$framework.py" || true
    # An expected failure is reported as skipped.
    read -r passed failed < <("$python" - "$work/result.xml" <<'PY'
import sys, xml.etree.ElementTree as xml
suite = xml.parse(sys.argv[1]).getroot().find("testsuite")
total, skipped, failed = (int(suite.get(name)) for name in ("tests", "skipped", "failures"))
failed += int(suite.get("errors"))
print(total - skipped - failed, failed)
PY
    ) || true
    count "${passed:-0}" "${failed:-1}"
}

# `node_packages PACKAGE…`: prints a folder in the cache with these packages from npm, installed once.
node_packages() {
    local folder
    folder=$cache/npm/$(printf '%s\n' "$@" | sha256sum | cut -c1-16)
    if [ ! -e "$folder/done" ]; then
        say "    installing $*"
        rm -rf "$folder"
        mkdir -p "$folder"
        # Peers of these packages contradict each other; the versions here work together.
        npm install --prefix "$folder" --legacy-peer-deps --no-audit --no-fund --loglevel=error "$@" >&2
        touch "$folder/done"
    fi
    printf '%s' "$folder"
}

# `run_node MODULE PACKAGE…`: tests a module of the npm package as a user has it: installed beside the framework. First its
# source is compiled with the types of the framework.
run_node() {
    local module=$1 packages test=check_${1//-/_}
    shift
    build_typescript_sdk
    packages=$(node_packages @types/node@24 "$@")
    # Below the packages: there the test, the adapter and the compiler find them.
    work=$(mktemp -d -p "$packages" run.XXXXXX)
    cp -r "$root/sdk/typescript/src" "$root/sdk/typescript/tsconfig.json" "$work/"
    find "$work/src/adapters" -type f ! -name "$module.ts" -delete
    cp "$root/sdk/typescript/tests/adapters/types_${module//-/_}.ts" "$work/src/types.ts"
    sed -i -e 's/"types": \[\]/"types": ["node"], "skipLibCheck": true, "noEmit": true/' "$work/tsconfig.json"
    printf '{ "type": "module" }\n' >"$work/package.json"
    "$root/sdk/typescript/node_modules/.bin/tsc" -p "$work"
    mkdir -p "$work/node_modules/forkd"
    cp -r "$root/sdk/typescript/dist" "$root/sdk/typescript/package.json" "$work/node_modules/forkd/"
    cp "$root/sdk/typescript/tests/adapters/$test.mjs" "$work/"
    cd "$work"
    node --test --test-reporter=tap "$test.mjs" | tee "$work/tap" || true
    count "$(sed -n 's/^# pass //p' "$work/tap")" "$(sed -n 's/^# fail //p' "$work/tap")"
}

case $framework in
    autogen) run_python websockets==17.4 autogen-core==0.7.5 autogen-agentchat==0.7.5 ;;
    crewai) run_python websockets==17.4 crewai==1.15.30 ;;
    deepagents) run_python websockets==17.4 deepagents==0.7.32 langchain-tests==1.1.9 ;;
    inspect_ai) run_python websockets==17.4 inspect-ai==0.3.285 ;;
    # The OpenAI SDK wants an older websockets.
    openai_agents) run_python websockets==15.0.1 openai-agents==0.24.0 ;;
    pydantic_ai) run_python websockets==17.4 pydantic-ai-slim==2.66.0 ;;
    swarm) run_python websockets==17.4 openai-swarm==0.1.1 ;;
    ai-sdk) run_node ai-sdk ai@7.0.169 zod@4 ;;
    deepagents-js) run_node deepagents deepagents@1.14.1 langchain@1.5.10 langsmith@0.9 zod@4 @langchain/core@1.2.13 \
        @langchain/langgraph@1.4.10 @langchain/langgraph-checkpoint@1.1.5 @langchain/langgraph-sdk@1.9.23 ;;
    mastra) run_node mastra @mastra/core@1.71.0 ;;
    openai-agents-js) run_node openai-agents @openai/agents-core@0.20.0 zod@4 ;;
    *) die "there is no adapter $framework" ;;
esac
