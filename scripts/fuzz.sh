#!/usr/bin/env bash
# `fuzz.sh SECONDS [TARGET…]`: runs each fuzz target for SECONDS and prints the number of runs.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

seconds=${1:-60}
shift || true
[[ $seconds =~ ^[0-9]+$ ]] || die "not a number of seconds: $seconds"

# Sanitizer coverage is an unstable compiler flag. This variable enables it in the pinned toolchain.
export RUSTC_BOOTSTRAP=1
run scripts/setup.sh
if ! have cargo-fuzz; then
    step "installing cargo-fuzz" cargo install cargo-fuzz --locked
fi

targets=("$@")
if [ ${#targets[@]} -eq 0 ]; then
    mapfile -t targets < <(cd fuzz && cargo fuzz list)
fi
[ ${#targets[@]} -gt 0 ] || die "fuzz/ has no targets"

programs=${CARGO_TARGET_DIR:-$root/fuzz/target}/x86_64-unknown-linux-gnu/release
logs=$(mktemp -d)
at_end 'rm -rf "$logs"'
failed=()

# New inputs go to the first folder. The inputs in the repository are only read.
fuzz_one() {
    local name=$1 found=$cache/fuzz/$1
    mkdir -p "$found" "fuzz/corpus/$name" "fuzz/artifacts/$name"
    # Starts the program directly: `cargo fuzz run` would rebuild it if a file has changed meanwhile.
    "$programs/$name" "$found" "fuzz/corpus/$name" -artifact_prefix="fuzz/artifacts/$name/" \
        -max_total_time="$seconds" -print_final_stats=1 >"$logs/$name" 2>&1
}

step "building ${#targets[@]} fuzz targets" cargo fuzz build --fuzz-dir fuzz
for name in "${targets[@]}"; do
    if ! step "fuzzing $name for $seconds s" fuzz_one "$name"; then
        failed+=("$name")
        tail -n 40 "$logs/$name" >&2
    fi
done

printf '\n%-32s %14s  %s\n' target executions result
for name in "${targets[@]}"; do
    count=$(sed -n 's/^stat::number_of_executed_units: *\([0-9]*\).*/\1/p' "$logs/$name" | tail -n 1)
    result=ok
    case " ${failed[*]-} " in *" $name "*) result="FAILED (input below fuzz/artifacts/$name)" ;; esac
    printf '%-32s %14s  %s\n' "$name" "${count:-0}" "$result"
done
[ ${#failed[@]} -eq 0 ]
