"""What stays on the host after sandboxes have come and gone, and how noisy guests treat a quiet one.

    leftovers.py URL TAG COUNT RUN START [PART]

RUN is a command (split at spaces) that runs its arguments on the daemon's host, or `-` for this one; START is a shell
command here that starts the daemon again and returns when it answers. COUNT sandboxes are created and deleted. Then one
process of each program is killed. After each step the host has the namespaces, groups, sockets, packet filter rules,
directories, processes and open files of the network engine that it had before, apart from the pool. A source at its
memory limit is cut. PART selects cases by a part of their names. The last line counts cases.
"""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request

URL, TAG, COUNT, RUN, START = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5]
ONLY = sys.argv[6] if len(sys.argv) > 6 else ""
EACH = 10
passed = failed = 0

# Lines `kind number`. Namespaces of VMMs are left out: each VMM of the pool has its own.
LOOK = r"""
vmms=$(pgrep -x forkd-vmm | tr '\n' ' ')
echo processes $(echo $vmms | wc -w)
echo groups $(find /sys/fs/cgroup/forkd/vm -mindepth 2 -maxdepth 2 -type d 2>/dev/null | wc -l)
echo sockets $(find /run/forkd/vm -type s 2>/dev/null | wc -l)
echo directories $(ls /var/lib/forkd/sandboxes 2>/dev/null | wc -l)
echo staged $(ls /var/lib/forkd/staging 2>/dev/null | wc -l)
echo mounts $(grep -c forkd /proc/self/mountinfo)
echo engines $(pgrep -cx forkd-net)
echo spawners $(pgrep -cx forkd-spawn)
echo engine_files $(ls /proc/$(pgrep -x forkd-net | head -n 1)/fd 2>/dev/null | wc -l)
echo rules $(nft list ruleset | wc -l)
echo named_namespaces $(ls /run/netns 2>/dev/null | wc -l)
echo links $(ls /sys/class/net | wc -l)
for p in /proc/[0-9]*; do
    case " $vmms" in *" ${p#/proc/} "*) continue ;; esac
    readlink $p/ns/net $p/ns/mnt $p/ns/pid $p/ns/ipc $p/ns/uts $p/ns/user $p/ns/cgroup 2>/dev/null
done | sort -u | wc -l | sed 's/^/namespaces /'
"""


def ask(method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, {"content-type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=600) as answer:
        text = answer.read()
        return json.loads(text) if text else None


def on_host(*command):
    words = ([] if RUN == "-" else RUN.split(" ")) + list(command)
    return subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False).stdout


def spawn(n=1, **more):
    return [one["id"] for one in ask("POST", "/v1/sandboxes", {"snapshot_tag": TAG, "n": n, "timeout_secs": 3600, **more})]


def delete(one):
    try:
        ask("DELETE", f"/v1/sandboxes/{one}")
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise


def run(one, line, seconds=300):
    return ask("POST", f"/v1/sandboxes/{one}/exec", {"args": ["sh", "-c", line], "timeout_secs": seconds})


def pool():
    """Shells that stand ready, and VMs that live."""
    with urllib.request.urlopen(URL + "/metrics", timeout=60) as answer:
        lines = [line.split() for line in answer.read().decode().splitlines()]
    value = {words[0]: float(words[1]) for words in lines if len(words) == 2}
    return int(value["forkd_pool_ready"]), int(value["forkd_vms_live"])


def look():
    """The host apart from the pool, once the pool stands still."""
    for _ in range(150):
        ready, live = pool()
        found = {kind: int(number) for kind, number in (line.split() for line in on_host("sh", "-c", LOOK).splitlines())}
        if found["processes"] == ready + live:
            break
        time.sleep(0.2)
    found["processes"] -= ready
    found["groups"] -= ready
    return found


def case(name, work):
    global passed, failed
    if ONLY not in name:
        return
    begin = time.monotonic()
    try:
        said = work() or ""
        passed += 1
        print(f"ok   {name} ({time.monotonic() - begin:.1f} s) {said}", flush=True)
    except Exception as error:  # noqa: BLE001 - a case that fails is counted and the next one runs
        failed += 1
        print(f"FAIL {name}: {type(error).__name__}: {error}", flush=True)


BEFORE = look()


def nothing_stays():
    # A process that has ended may take its group and its namespaces a moment later.
    for _ in range(100):
        now = look()
        if now == BEFORE:
            return str(now)
        time.sleep(0.2)
    raise AssertionError(f"{now} is not {BEFORE}")


def come_and_go():
    for _ in range(COUNT // EACH):
        for one in spawn(EACH):
            delete(one)
    return f"{COUNT} sandboxes, {nothing_stays()}"


def until_failed(ids):
    for _ in range(300):
        states = {one["id"]: one["state"] for one in ask("GET", "/v1/sandboxes")}
        if all(states.get(one) == "failed" for one in ids):
            return
        time.sleep(0.2)
    raise AssertionError(f"{states}")


def works(one):
    done = run(one, "echo $((6 * 7))")
    assert (done["exit_code"], done["stdout"]) == (0, "42\n"), done


def a_vmm_is_killed():
    victim, other = spawn(2)
    pid = next(one["pid"] for one in ask("GET", "/v1/sandboxes") if one["id"] == victim)
    on_host("kill", "-9", str(pid))
    until_failed([victim])
    works(other)
    delete(victim)
    delete(other)
    return nothing_stays()


def the_spawner_is_killed():
    ids = spawn(2)
    on_host("pkill", "-9", "-x", "forkd-spawn")
    until_failed(ids)
    new = spawn()[0]
    works(new)
    for one in [*ids, new]:
        delete(one)
    return nothing_stays()


def the_engine_is_killed():
    ids = spawn(2)
    on_host("pkill", "-9", "-x", "forkd-net")
    for one in ids:
        for _ in range(300):
            if ask("GET", f"/v1/sandboxes/{one}/network")["attached"]:
                break
            time.sleep(0.2)
        else:
            raise AssertionError(f"{one} has no network")
        works(one)
        delete(one)
    return nothing_stays()


def the_daemon_is_killed():
    ids = spawn(2)
    on_host("pkill", "-9", "-x", "forkd-controlle")
    end = time.monotonic() + 120
    while True:
        subprocess.run(START, shell=True, capture_output=True, stdin=subprocess.DEVNULL, check=False)
        try:
            ask("GET", "/healthz")
            break
        except OSError:
            if time.monotonic() > end:
                raise
    for one in ids:
        works(one)
        delete(one)
    return nothing_stays()


NOISE = {
    "fork bomb": "f() { f | f & }; while :; do f; done",
    "memory hog": 'while :; do python3 -c "x = []\nwhile True: x.append(bytearray(1 << 20))"; done',
    "disk hog": "while :; do dd if=/dev/zero of=/var/hog bs=1M count=64 conv=fsync; rm /var/hog; done",
    "busy loop": "while :; do :; done",
}


def exec_times(one):
    """Milliseconds of commands, sorted."""
    times = []
    for _ in range(20 if COUNT < 1000 else 200):
        begin = time.monotonic()
        works(one)
        times.append((time.monotonic() - begin) * 1000)
    return sorted(times)


def spread(times):
    return f"{times[len(times) // 2]:.0f} / {times[(len(times) - 1) * 99 // 100]:.0f} ms"


def noisy_neighbours():
    quiet = spawn()[0]
    works(quiet)
    alone = exec_times(quiet)
    noisy = []
    for line in NOISE.values():
        one = spawn(limits={"cpus": 0.2, "cpu_weight": 1})[0]
        noisy.append(one)
        done = run(one, f"setsid sh -c '{line}' >/dev/null 2>&1 &")
        assert done["exit_code"] == 0, done
    beside = exec_times(quiet)
    # A noisy guest may be too busy to answer, and it is still there to be deleted.
    states = {one["id"]: one["state"] for one in ask("GET", "/v1/sandboxes")}
    assert all(one in states for one in noisy), states
    for one in [quiet, *noisy]:
        delete(one)
    return f"{len(alone)} commands, p50 / p99 alone {spread(alone)}, beside {', '.join(NOISE)} {spread(beside)}; {nothing_stays()}"


# Writes to all pages of 48 MiB again and again. No quotes: a shell passes it on.
WRITES = """
import os
pages, rounds = bytearray(48 << 20), 0
while True:
    rounds += 1
    pages[::4096] = bytes([rounds & 255]) * (len(pages) // 4096)
    with open("/tmp/rounds.new", "w") as file: file.write(str(rounds))
    os.rename("/tmp/rounds.new", "/tmp/rounds")
"""


def rounds_after(one, least):
    """Waits until the writer has gone on."""
    done = run(one, f"until [ $(cat /tmp/rounds || echo 0) -gt {least} ]; do sleep 0.1; done 2>/dev/null; cat /tmp/rounds")
    assert done["exit_code"] == 0, done
    return int(done["stdout"])


def memory(pid):
    """The memory of a group that cannot be given back, in bytes, and how often a process of the group was killed."""
    text = on_host("sh", "-c", f"cd /sys/fs/cgroup$(sed -n s/^0:://p /proc/{pid}/cgroup) && cat memory.stat memory.events")
    value = {words[0]: int(words[1]) for words in (line.split() for line in text.splitlines())}
    return value["anon"] + value["kernel"], value["oom_kill"]


def cuts_at_the_memory_limit():
    """A cut of a source that is at `memory.max` and changes all its pages meanwhile."""
    source = spawn()[0]
    ask("POST", f"/v1/sandboxes/{source}/processes", {"args": ["python3", "-c", WRITES]})
    rounds = rounds_after(source, 3)
    pid = next(one["pid"] for one in ask("GET", "/v1/sandboxes") if one["id"] == source)
    used, _ = memory(pid)
    # Less than the pages that the source changes while it is cut: without more room it would be killed.
    limit = (used >> 20) + 12
    ask("PATCH", f"/v1/sandboxes/{source}", {"limits": {"memory_mib": limit}})
    cuts = 3 if COUNT < 1000 else 30
    for number in range(cuts):
        if number % 2:
            (child,) = (one["id"] for one in ask("POST", f"/v1/sandboxes/{source}/fork", {"n": 1}))
        else:
            ask("POST", f"/v1/sandboxes/{source}/branch", {"tag": "at-limit", "wait": True})
            (child,) = (one["id"] for one in ask("POST", "/v1/sandboxes", {"snapshot_tag": "at-limit"}))
        rounds = rounds_after(source, rounds + 1)
        rounds_after(child, 1)
        delete(child)
        if not number % 2:
            ask("DELETE", "/v1/snapshots/at-limit?force=true")
    used, killed = memory(pid)
    assert not killed and next(one for one in ask("GET", "/v1/sandboxes") if one["id"] == source)["pid"] == pid
    delete(source)
    return f"{cuts} cuts, limit {limit} MiB, {used >> 20} MiB used at the end, {rounds} rounds; {nothing_stays()}"


case("noisy neighbours", noisy_neighbours)
case("cuts at the memory limit", cuts_at_the_memory_limit)
case("sandboxes come and go", come_and_go)
case("a VMM is killed", a_vmm_is_killed)
case("forkd-spawn is killed", the_spawner_is_killed)
case("forkd-net is killed", the_engine_is_killed)
case("forkd-controller is killed", the_daemon_is_killed)
print(f"{passed} passed, {failed} failed")
sys.exit(1 if failed else 0)
