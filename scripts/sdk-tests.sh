#!/usr/bin/env bash
# Checks the SDKs without a guest: generated files are up to date, types, faults on the wire. `make test` runs it.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

python=$(clients_python "${python_sdk[@]}" unasync==0.6.0 mypy==2.4.1)

python_tests() {
    cd "$root/sdk/python"
    "$python" tools/generate_sync.py --check
    "$python" -m mypy --cache-dir "$target/mypy"
    cd tests
    PYTHONPATH=../src "$python" -W error::ResourceWarning -m unittest -q
}

typescript_tests() {
    cd "$root/sdk/typescript"
    build_typescript_sdk
    node --test --test-reporter=dot tests/*.test.mjs
    # The package is at most 25 kB, compressed.
    local size
    size=$(cat dist/esm/*.js | gzip -9 | wc -c)
    if [ "$size" -gt 25000 ]; then die "the TypeScript client has $size bytes, compressed: at most 25000 are allowed"; fi
    # The lock file works with every registry.
    if grep -nE 'https?://' package-lock.json; then die "package-lock.json names a registry"; fi
}

(python_tests)
(typescript_tests)
