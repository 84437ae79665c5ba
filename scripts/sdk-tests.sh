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

(python_tests)
