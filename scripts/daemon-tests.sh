# shellcheck shell=bash
# Sourced by vm-tests.sh: tests of the daemon over HTTP, with real guests. They run on this host, wherever the daemon
# runs. Each test prints its cases and ends with a line `N passed, N failed`.

clients=$root/tests/e2e/clients

# Copies kernel, initramfs and image to the daemon's data directory. The scenarios use the same files.
provide_daemon() {
    ask_machine sh -c "cd $inside && mkdir -p ../kernels ../images/python-numpy &&
        ln -f vmlinux ../kernels/vmlinux && ln -f initramfs ../kernels/initramfs.cpio &&
        ln -f python-numpy.ext4 ../images/python-numpy/root.ext4"
    machine cp "$(dirname "$(readlink "$assets/python-numpy.ext4")")/image.json" ":/var/lib/forkd/images/python-numpy/image.json"
}

daemon_url() { machine status --json | sed -n 's/^ *"port": \([0-9]*\),$/http:\/\/127.0.0.1:\1/p'; }

# All of them begin with this, unless a run names others.
daemon_only=daemon

# The names in the order of the runs. `list_daemon_cases [PART…]` prints those that begin with a part.
list_daemon_cases() {
    local part
    if [ $# -eq 0 ]; then set -- ''; fi
    for part in "$@"; do
        sed -n -E 's/^ *(daemon|recipe)_case "([^"]*)".*/\2/p' "$root/scripts/daemon-tests.sh" | awk -v part="$part" 'index($0, part) == 1'
    done | awk '!seen[$0]++'
}

# `daemon_case NAME COMMAND…`: its last line counts. A soak says what it does meanwhile, and remembers what has passed.
daemon_case() {
    local name=$1 log=$work/daemon.log begin failed_before=$failed
    shift
    if [[ $name != "$daemon_only"* ]]; then return; fi
    if [ -n "$soak" ] && grep -qxF "$name" "$daemon_done"; then
        say "    $name: passed before"
        passed=$((passed + 1))
        return
    fi
    begin=$(now_ms)
    if [ -n "$soak" ]; then
        say "    $name"
        "$@" </dev/null 2>&1 | tee "$log" >&2 || true
    else
        "$@" >"$log" 2>&1 </dev/null || true
    fi
    took "$name" $(($(now_ms) - begin))
    if [[ $(tail -n 1 "$log") =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed$ ]]; then
        passed=$((passed + BASH_REMATCH[1]))
        failed=$((failed + BASH_REMATCH[2]))
    else
        printf '%s did not come to an end\n' "$name" >>"$log"
        failed=$((failed + 1))
    fi
    if [ -n "$soak" ]; then
        say "    $name: $(tail -n 1 "$log") ($(elapsed "$begin"))"
        if [ "$failed" -eq "$failed_before" ]; then printf '%s\n' "$name" >>"$daemon_done"; fi
        return
    fi
    {
        printf '%s (%s):\n' "$name" "$(elapsed "$begin")"
        cat "$log"
    } >&2
}

# Runs all cases; runs them again in a new machine if this one was lost.
daemon_tests() {
    local try passed failed
    for try in 1 2 3; do
        passed=0 failed=0
        daemon_cases || failed=$((failed + 1))
        if [ "$failed" -eq 0 ] || ! machine_is_lost; then break; fi
        say "    machine $FORKD_MACHINE is lost (try $try of 3)"
        start_again
    done
    printf 'ok %d cases of the daemon\nFAILED %d cases of the daemon\n' "$passed" "$failed" | grep -v '^FAILED 0 ' >>"$work/results"
}

# `recipe_case NAME RECIPE CHILDREN`: builds the image of a recipe, installs it in the machine, forks it, and runs its
# check in every child. Further arguments are another command to run instead of the check. pip and npm come from the
# cache: a host may have none.
recipe_case() {
    local name=$1 recipe=$2 children=$3 disk image at
    shift 3
    if [[ $name != "$daemon_only"* ]]; then return; fi
    image=$(sed -n '/^name = /{ s/^name = "\(.*\)"$/\1/p; q }' "$recipe/recipe.toml")
    at=/var/lib/forkd/images/$image
    disk=$(use_node && "$bin/forkd-image" build "$recipe")
    ask_machine mkdir -p "$at"
    machine cp "$disk" ":$at/root.ext4"
    machine cp "$(dirname "$disk")/image.json" ":$at/image.json"
    if [ $# -eq 0 ]; then set -- "$bin/forkd" image check "$image" -n "$children"; fi
    daemon_case "$name" "$@"
    ask_machine rm -rf "$at"
}

# Installs the Debian package in a container with systemd in the machine, and tests its units.
systemd_case() {
    local at=$inside/systemd
    "$bin/forkd-image" install python-numpy --data-dir "$work/state" >&2
    (use_node && python3 "$root/packaging/tools/package.py" "$bin" "$work/package" --only deb --state "$work/state" >&2)
    ask_machine sh -c "rm -rf $at && mkdir -p $at"
    machine cp "$(echo "$work"/package/*.deb)" ":$at/forkd.deb"
    machine cp "$root/tests/e2e/systemd/check.sh" ":$at/check.sh"
    machine cp "$("$bin/forkd-image" build "$root/tests/e2e/systemd")" ":$at/root.ext4"
    daemon_case "daemon: under systemd" ask_machine bash "$at/check.sh" "$at"
    ask_machine rm -rf "$at"
}

# An authority, and a certificate for api.example: `make_certificates FOLDER`.
make_certificates() {
    mkdir -p "$1"
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30 -subj "/CN=the world" \
        -keyout "$1/ca.key" -out "$1/ca.pem" 2>/dev/null
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=api.example" \
        -keyout "$1/key.pem" -out "$1/cert.csr" 2>/dev/null
    openssl x509 -req -in "$1/cert.csr" -CA "$1/ca.pem" -CAkey "$1/ca.key" -CAcreateserial -days 30 \
        -extfile <(printf 'subjectAltName=DNS:api.example') -out "$1/cert.pem" 2>/dev/null
}

# Runs the scenario that all clients share. `python` is the interpreter of the SDK.
in_python_sdk() { PYTHONPATH=$root/sdk/python/src "$python" "$clients/scenario.py" "$root/sdk/conformance/scenario.json" "$@"; }

# Loses the sandbox, the daemon or the network path under calls of the SDK: `in_python_faults sync|async START`.
in_python_faults() {
    PYTHONPATH=$root/sdk/python/src "$python" "$clients/faults.py" "$url" "$tag" "$1" "$level" "$bin/forkd machine exec --no-sync --" "$2"
}

# Tests the adapter for a framework: `in_framework NAME`.
in_framework() { FORKD_URL=$url scripts/adapter-tests.sh "$1" "$tag"; }

# A soak uses larger counts.
daemon_cases() {
    local url python daemon_done tag=run-python-numpy restart rounds=3 requests=300 at_once=20 branches=20 sandboxes=100 interrupts=1 level=quick
    if [ -n "$soak" ]; then rounds=200 requests=10000 at_once=100 branches=100 sandboxes=1000 interrupts=30 level=whole; fi
    daemon_done=$(passed_before forkd forkd-controller forkd-vmm forkd-spawn forkd-net forkd-broker forkd-agent)
    provide_daemon
    # The data disk survives a run, and this build may not be able to run snapshots of an earlier one.
    "$bin/forkd" kill --all </dev/null >/dev/null 2>&1 || true
    "$bin/forkd" rmi --force "$tag" </dev/null >/dev/null 2>&1 || true
    url=$(daemon_url)
    python=$(clients_python forkd==0.5.3 forkd-mcp==0.2.1)
    restart="'$bin/forkd' machine start"
    daemon_case "daemon: the command line" bash "$clients/cli.sh" "$bin/forkd"
    # The others start from this snapshot. It is missing if the first test was left out, and a run makes it.
    "$bin/forkd" run --image python-numpy -- true </dev/null >&2
    daemon_case "daemon: published clients" "$python" "$clients/pypi.py" "$url" \
        /var/lib/forkd/kernels/vmlinux /var/lib/forkd/images/python-numpy/root.ext4 "$bin/forkd"
    daemon_case "daemon: tools for models" "$(clients_python mcp==2.3.0)" "$clients/mcp_tools.py" "$bin/forkd" "$url" "$tag" "$url/mcp"
    python=$(clients_python e2b==2.63.0 e2b-code-interpreter==2.11.5)
    daemon_case "daemon: the SDK of E2B" "$python" "$clients/e2b_sdk.py" "$url" "$tag"
    daemon_case "daemon: files, processes and ports" python3 "$clients/routes.py" "$url" "$tag"
    daemon_case "daemon: ports of a guest" python3 "$clients/ports.py" "$bin/forkd" "$url" "$tag"
    daemon_case "daemon: ports and namespaces" bash "$clients/netns.sh" "$bin/forkd" "$tag"
    daemon_case "daemon: a container image" python3 "$clients/container.py" "$bin/forkd" "$work"
    run scripts/unpack-tools.sh
    daemon_case "daemon: a build" python3 "$clients/build.py" "$bin/forkd" "$work" "$cache/tools/usr/bin/umoci" "$interrupts"
    recipe_case "daemon: a recipe with a service" "$root/tests/e2e/recipe" 3
    python=$(clients_python "${python_sdk[@]}")
    daemon_case "daemon: one scenario, blocking Python" in_python_sdk "$url" "$tag" sync
    daemon_case "daemon: one scenario, asynchronous Python" in_python_sdk "$url" "$tag" async
    daemon_case "daemon: one scenario, command line" in_python_sdk "$url" "$tag" cli "$bin/forkd"
    daemon_case "daemon: faults under blocking Python" in_python_faults sync "$restart"
    daemon_case "daemon: faults under asynchronous Python" in_python_faults async "$restart"
    build_typescript_sdk
    daemon_case "daemon: faults under TypeScript" node "$clients/faults.mjs" "$root/sdk/typescript/dist/esm/index.js" \
        "$url" "$tag" "$level" "$bin/forkd machine exec --no-sync --" "$restart"
    daemon_case "daemon: one scenario, TypeScript" node "$clients/scenario.mjs" "$root/sdk/typescript/dist/esm/index.js" \
        "$root/sdk/conformance/scenario.json" "$url" "$tag"
    daemon_case "daemon: many branches" python3 "$clients/branches.py" "$url" "$tag" "$branches"
    # Runs in the machine: QEMU's user network drops connections if there are many and the guest is slow.
    machine cp "$clients/load.py" :/tmp/load.py
    daemon_case "daemon: many clients" ask_machine python3 /tmp/load.py http://127.0.0.1:8889 "$tag" "$requests" "$at_once"
    machine cp "$clients/engine_lost.py" :/tmp/engine_lost.py
    daemon_case "daemon: the network engine is lost" ask_machine python3 /tmp/engine_lost.py http://127.0.0.1:8889 "$tag"
    # Runs in the machine: it makes network namespaces there.
    make_certificates "$work/tls"
    machine cp "$clients/network.py" :/tmp/network.py
    machine cp "$clients/injected.py" :/tmp/injected.py
    ask_machine mkdir -p /tmp/tls
    for file in ca.pem cert.pem key.pem; do machine cp "$work/tls/$file" ":/tmp/tls/$file"; done
    daemon_case "daemon: secrets" ask_machine python3 /tmp/injected.py /var/lib/forkd /tmp/tls
    daemon_case "daemon: nothing stays behind" python3 "$clients/leftovers.py" "$url" "$tag" "$sandboxes" \
        "$bin/forkd machine exec --no-sync --" "$restart"
    daemon_case "daemon: killed under load" python3 "$clients/kills.py" "$url" "$tag" "$rounds" \
        "$bin/forkd machine exec --no-sync --" "$restart"
    daemon_case "daemon: without power" without_locks bash "$clients/power.sh" "$bin/forkd" "$tag" \
        "$bin/forkd" machine start --port 0 --memory "$(machine_memory)"
    # Data that was not on the machine's disk is lost.
    fill_machine
    url=$(daemon_url)
    if [ -n "$soak" ]; then
        python=$(clients_python schemathesis==4.32.5)
        # The machine was filled anew, perhaps without the snapshot.
        "$bin/forkd" run --image python-numpy -- true </dev/null >&2
        daemon_case "daemon: requests made from the document" python3 "$clients/document.py" "$(dirname "$python")/schemathesis" "$url" "$tag"
        daemon_case "daemon: the adapter for autogen" in_framework autogen
        daemon_case "daemon: the adapter for crewai" in_framework crewai
        daemon_case "daemon: the adapter for deepagents" in_framework deepagents
        daemon_case "daemon: the adapter for inspect_ai" in_framework inspect_ai
        daemon_case "daemon: the adapter for openai_agents" in_framework openai_agents
        daemon_case "daemon: the adapter for pydantic_ai" in_framework pydantic_ai
        daemon_case "daemon: the adapter for swarm" in_framework swarm
        daemon_case "daemon: the adapter for ai-sdk" in_framework ai-sdk
        daemon_case "daemon: the adapter for deepagents-js" in_framework deepagents-js
        daemon_case "daemon: the adapter for mastra" in_framework mastra
        daemon_case "daemon: the adapter for openai-agents-js" in_framework openai-agents-js
        # Runs in the machine: it makes network namespaces there.
        machine cp "$clients/network.py" :/tmp/network.py
        daemon_case "daemon: the network of guests" ask_machine python3 /tmp/network.py /var/lib/forkd
        recipe_case "daemon: the recipe python-numpy" "$root/recipes/python-numpy" 10
        recipe_case "daemon: the recipe nodejs" "$root/recipes/nodejs" 10
        recipe_case "daemon: the recipe postgres" "$root/recipes/postgres" 10
        recipe_case "daemon: the recipe coding-agent" "$root/recipes/coding-agent" 10
        recipe_case "daemon: the recipe jupyter-kernel" "$root/recipes/jupyter-kernel" 10
        recipe_case "daemon: the recipe code-interpreter" "$root/recipes/code-interpreter" 10
        python=$(clients_python e2b-code-interpreter==2.11.5)
        recipe_case "daemon: the code interpreter of E2B" "$root/recipes/code-interpreter" 10 \
            "$python" "$clients/code_interpreter.py" "$bin/forkd" "$url" code-interpreter
        recipe_case "daemon: the recipe playwright" "$root/recipes/playwright" 10
        systemd_case
    fi
}
