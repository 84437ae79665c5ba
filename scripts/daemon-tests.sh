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
        sed -n 's/^ *daemon_case "\([^"]*\)".*/\1/p' "$root/scripts/daemon-tests.sh" | awk -v part="$part" 'index($0, part) == 1'
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

# Runs the scenario that all clients share. `python` is the interpreter of the SDK.
in_python_sdk() { PYTHONPATH=$root/sdk/python/src "$python" "$clients/scenario.py" "$root/sdk/conformance/scenario.json" "$@"; }

# A soak uses larger counts.
daemon_cases() {
    local url python daemon_done tag=run-python-numpy restart rounds=3 requests=300 at_once=20 branches=20 sandboxes=100
    if [ -n "$soak" ]; then rounds=200 requests=10000 at_once=100 branches=100 sandboxes=1000; fi
    daemon_done=$(passed_before forkd forkd-controller forkd-vmm forkd-spawn forkd-net forkd-agent)
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
        /var/lib/forkd/kernels/vmlinux /var/lib/forkd/images/python-numpy/root.ext4
    daemon_case "daemon: tools for models" "$(clients_python mcp==2.3.0)" "$clients/mcp_tools.py" "$bin/forkd" "$url" "$tag" "$url/mcp"
    python=$(clients_python e2b==2.63.0)
    daemon_case "daemon: the SDK of E2B" "$python" "$clients/e2b_sdk.py" "$url" "$tag"
    daemon_case "daemon: files, processes and ports" python3 "$clients/routes.py" "$url" "$tag"
    daemon_case "daemon: a container image" python3 "$clients/container.py" "$bin/forkd" "$work"
    python=$(clients_python "${python_sdk[@]}")
    daemon_case "daemon: one scenario, blocking Python" in_python_sdk "$url" "$tag" sync
    daemon_case "daemon: one scenario, asynchronous Python" in_python_sdk "$url" "$tag" async
    daemon_case "daemon: one scenario, command line" in_python_sdk "$url" "$tag" cli "$bin/forkd"
    build_typescript_sdk
    daemon_case "daemon: one scenario, TypeScript" node "$clients/scenario.mjs" "$root/sdk/typescript/dist/esm/index.js" \
        "$root/sdk/conformance/scenario.json" "$url" "$tag"
    daemon_case "daemon: volumes" bash "$clients/volumes.sh" "$bin/forkd" "$tag" "$bin/forkd" machine exec --no-sync --
    daemon_case "daemon: many branches" python3 "$clients/branches.py" "$url" "$tag" "$branches"
    # Runs in the machine: QEMU's user network drops connections if there are many and the guest is slow.
    machine cp "$clients/load.py" :/tmp/load.py
    daemon_case "daemon: many clients" ask_machine python3 /tmp/load.py http://127.0.0.1:8889 "$tag" "$requests" "$at_once"
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
        # Runs in the machine: it makes network namespaces there.
        machine cp "$clients/network.py" :/tmp/network.py
        daemon_case "daemon: the network of guests" ask_machine python3 /tmp/network.py /var/lib/forkd
        # A second daemon beside the first: only the machine has room for both.
        machine cp "$cache/tools/usr/bin/docker-registry" :/tmp/docker-registry
        machine cp "$clients/expect.sh" :/tmp/expect.sh
        machine cp "$clients/hub.sh" :/tmp/hub.sh
        daemon_case "daemon: a snapshot through a registry" ask_machine env HUB_SECOND_BOOT=1 bash /tmp/hub.sh \
            /usr/local/bin/forkd-controller /usr/local/bin/forkd /tmp/docker-registry "$tag"
        systemd_case
    fi
}
