#!/usr/bin/env bash
# Runs E2B's own test suites against a daemon that serves the E2B protocol.
#
#     e2b-suite.sh prepare base|interpreter                 make the template `base` or `code-interpreter-v1`
#     e2b-suite.sh python VERSION CHECKOUT [TEST-PART…]     the suite of the Python SDK
#     e2b-suite.sh js VERSION CHECKOUT [FILE-PART…]         the suite of the JavaScript SDK
#     e2b-suite.sh interpreter VERSION CHECKOUT [PART…]     the Python suite of the code interpreter
#     e2b-suite.sh matrix                                   write the results so far into docs/e2b.md
#
# VERSION is that of the SDK on the package registry. CHECKOUT is a copy of E2B's repository, or of that of the code
# interpreter; no part of it is in this repository. The daemon is the one that FORKD_URL names, and `prepare` needs the
# machine of FORKD_MACHINE. Results are kept in the cache, one file for each suite and version. FORKD_E2B_JOBS is the
# number of tests at once. FORKD_E2B_PATIENCE multiplies the time of a test, the ten seconds that the sandboxes of the
# git tests live, and the sixty of those of the code interpreter, for emulated machines; 1 is as E2B has them.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

suite=$root/tests/e2e/e2b
results=$cache/e2b-suite
mkdir -p "$results"
jobs=${FORKD_E2B_JOBS:-2}
export FORKD_E2B_PATIENCE=${FORKD_E2B_PATIENCE:-1}

usage() { die "usage: e2b-suite.sh prepare base|interpreter | matrix | python|js|interpreter VERSION CHECKOUT [PART…]"; }
url() { printf '%s' "${FORKD_URL:-$(FORKD_MACHINE=${FORKD_MACHINE:-default} "$bin/forkd" machine status --json | sed -n 's/^ *"port": \([0-9]*\),$/http:\/\/127.0.0.1:\1/p')}"; }
pytest_packages=('pytest>=9' pytest-asyncio pytest-timeout pytest-xdist pytest-dotenv httpx attrs)

export_access() {
    E2B_API_URL=$(url)
    [ -n "$E2B_API_URL" ] || die "no daemon" "set FORKD_URL, or FORKD_MACHINE to a machine that runs"
    # Names of ports are made of the domain. This one leads nowhere; the default would lead to E2B.
    export E2B_DOMAIN=e2b.invalid
    export E2B_API_URL E2B_SANDBOX_URL=$E2B_API_URL E2B_API_KEY=e2b_0000000000000000000000000000000000000000
}

# `install_image RECIPE NAME`: builds an image and puts it into the machine.
install_image() {
    local image at
    image=$(use_node && "$bin/forkd-image" build "$1")
    at=/var/lib/forkd/images/$2
    "$bin/forkd" machine exec --no-sync -- mkdir -p "$at" </dev/null
    "$bin/forkd" machine cp "$image" ":$at/root.ext4" </dev/null
    "$bin/forkd" machine cp "$(dirname "$image")/image.json" ":$at/image.json" </dev/null
}

# The template of the code interpreter is the recipe that comes with forkd; that of the other suites has the programs that
# they call.
prepare() {
    local python tag=code-interpreter-v1
    case $1 in
        base)
            install_image "$suite" e2b
            "$bin/forkd" run --image e2b -- true </dev/null
            python=$(clients_python e2b==2.63.0 e2b-code-interpreter==2.11.5)
            "$python" "$suite/prepare.py" "$(url)" run-e2b
            ;;
        interpreter)
            install_image "$root/recipes/code-interpreter" code-interpreter
            "$bin/forkd" rmi --force "$tag" </dev/null >/dev/null 2>&1 || true
            "$bin/forkd" snapshot --tag "$tag" --image code-interpreter --ready-timeout-secs 3600 </dev/null
            ;;
        *) usage ;;
    esac
}

# `collect SUITE VERSION REPORT`: keeps the results of a run and prints the failures.
collect() { python3 "$suite/results.py" collect "$results" "$@"; }

# Copies the tests away from the source of the SDK, so that the installed SDK is the one that runs.
python_suite() {
    local version=$1 checkout=$2 python work ids=()
    shift 2
    [ -d "$checkout/packages/python-sdk/tests" ] || die "$checkout is not a checkout of E2B's repository"
    python=$(clients_python "e2b==$version" "${pytest_packages[@]}")
    work=$(mktemp -d)
    at_end "rm -rf '$work'"
    cp -r "$checkout/packages/python-sdk/tests" "$checkout/packages/python-sdk/pytest.ini" "$work/"
    if [ -e "$work/tests/shared/git/conftest.py" ]; then sed -i "s/sandbox_factory(timeout=10)/sandbox_factory(timeout=$((10 * FORKD_E2B_PATIENCE)))/" "$work/tests/shared/git/conftest.py"; fi
    mapfile -t ids < <(cd "$work" && python3 "$suite/results.py" select "$suite/python.txt" "$@")
    (cd "$work" && "$python" -m pytest -q -n "$jobs" --timeout $((30 * FORKD_E2B_PATIENCE)) -p no:cacheprovider -o junit_family=xunit1 --junitxml="$work/report.xml" \
        --continue-on-collection-errors "${ids[@]}") >"$results/python-$version.log" 2>&1 || true
    collect python "$version" "$work/report.xml"
}

interpreter_suite() {
    local version=$1 checkout=$2 python work
    shift 2
    [ -d "$checkout/python/tests" ] || die "$checkout is not a checkout of the code interpreter's repository"
    python=$(clients_python "e2b-code-interpreter==$version" e2b==2.63.0 "${pytest_packages[@]}")
    work=$(mktemp -d)
    at_end "rm -rf '$work'"
    cp -r "$checkout/python/tests" "$checkout/python/pytest.ini" "$work/"
    sed -i "s/setdefault(\"timeout\", 60)/setdefault(\"timeout\", $((60 * FORKD_E2B_PATIENCE)))/" "$work/tests/conftest.py"
    (cd "$work" && "$python" -m pytest -q -n "$jobs" -p no:cacheprovider --timeout $((60 * FORKD_E2B_PATIENCE)) -o junit_family=xunit1 \
        --junitxml="$work/report.xml" ${1:+-k "$1"} tests) >"$results/interpreter-$version.log" 2>&1 || true
    collect interpreter "$version" "$work/report.xml"
}

# The tests import the source of the SDK; here that name leads to the installed package.
js_suite() {
    local version=$1 checkout=$2 work=$cache/e2b-js-$1 files=()
    shift 2
    [ -d "$checkout/packages/js-sdk/tests" ] || die "$checkout is not a checkout of E2B's repository"
    use_node
    mkdir -p "$work/src/sandbox"
    if [ ! -e "$work/done" ]; then
        printf '{"name":"suite","private":true,"type":"module"}\n' >"$work/package.json"
        (cd "$work" && npm install --no-audit --no-fund --loglevel=error "e2b@$version" vitest@4 msw dotenv typescript error-stack-parser-es >&2)
        touch "$work/done"
    fi
    rm -rf "$work/tests"
    cp -r "$checkout/packages/js-sdk/tests" "$work/tests"
    echo "export * from 'e2b'" | tee "$work/src/index.ts" "$work/src/errors.ts" >"$work/src/sandbox/filesystem.ts"
    cp "$suite/vitest.config.mjs" "$work/"
    mapfile -t files < <(cd "$work" && python3 "$suite/results.py" select "$suite/js.txt" "$@")
    (cd "$work" && FORKD_E2B_JOBS=$jobs npx vitest run --reporter=json --outputFile="$work/report.json" "${files[@]}") \
        >"$results/js-$version.log" 2>&1 || true
    collect js "$version" "$work/report.json"
}

case ${1:-} in
    prepare) prepare "${2:-}" ;;
    matrix) python3 "$suite/results.py" matrix "$results" "$root/docs/e2b.md" ;;
    python | js | interpreter)
        [ $# -ge 3 ] || usage
        what=$1
        shift
        export_access
        "${what}_suite" "$@"
        ;;
    *) usage ;;
esac
