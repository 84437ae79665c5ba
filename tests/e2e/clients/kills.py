"""Kills the daemon with SIGKILL under load, again and again, and looks at what is left after each restart.

    kills.py URL TAG ROUNDS RUN START

RUN is a command (split at spaces) that runs its arguments on the daemon's host, or `-` for this one; START is a shell
command here that starts the daemon again and returns when it answers. After each restart: what was acknowledged is there and works,
what was not is not half there, and no process, file, group or socket is without its sandbox. The last line counts cases.
"""

import http.client
import json
import random
import subprocess
import sys
import threading
import time
import urllib.parse

URL, TAG, ROUNDS, RUN, START = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5]
HOST = urllib.parse.urlsplit(URL).netloc
PREFIX = "kills-"
WORKERS = 4
lock = threading.Lock()
# The kernel keeps fifteen characters of a name.
DAEMON = "forkd-controlle"


def ask(method, path, body=None, timeout=300):
    """Status and value; `None` when the answer did not come to its end."""
    link = http.client.HTTPConnection(HOST, timeout=timeout)
    try:
        headers = {} if body is None else {"content-type": "application/json"}
        link.request(method, path, None if body is None else json.dumps(body), headers)
        answer = link.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text else None
    except (OSError, http.client.HTTPException, ValueError):
        return None, None
    finally:
        link.close()


def on_host(*command):
    words = ([] if RUN == "-" else RUN.split(" ")) + list(command)
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    return done.stdout


class Book:
    """What was acknowledged."""

    def __init__(self):
        self.sandboxes = {}  # id -> lines that were written
        self.doubtful = set()  # a delete was under way
        self.tags = set()
        self.doubtful_tags = set()


def worker(book, stop):
    number = 0
    while not stop.is_set():
        number += 1
        dice = random.random()
        with lock:
            mine = [one for one in book.sandboxes if one not in book.doubtful]
        if dice < 0.4 or not mine:
            if len(mine) >= 12:
                dice = 0.9
            else:
                status, made = ask("POST", "/v1/sandboxes", {"snapshot_tag": TAG, "labels": {"of": "kills"}})
                if status == 201:
                    with lock:
                        book.sandboxes[made[0]["id"]] = set()
                continue
        one = random.choice(mine)
        if dice < 0.6:
            marker = str(random.randrange(10**9))
            # Several write at once, and what was not acknowledged may be written all the same: lines have no order.
            status, done = ask("POST", f"/v1/sandboxes/{one}/exec", {"args": ["sh", "-c", f"echo {marker} >> /tmp/markers"]})
            with lock:
                if one in book.sandboxes and status == 200 and done["exit_code"] == 0:
                    book.sandboxes[one].add(marker)
        elif dice < 0.75:
            tag = f"{PREFIX}{random.randrange(10**9)}"
            with lock:
                book.doubtful_tags.add(tag)
            status, _ = ask("POST", f"/v1/sandboxes/{one}/branch", {"tag": tag})
            if status == 201:
                with lock:
                    book.tags.add(tag)
        else:
            with lock:
                if one in book.doubtful:
                    continue
                book.doubtful.add(one)
            status, _ = ask("DELETE", f"/v1/sandboxes/{one}")
            if status in (204, 404):
                with lock:
                    book.sandboxes.pop(one, None)
                    book.doubtful.discard(one)


def leftovers(live):
    """Processes, files, groups and sockets on the daemon's host that belong to no live sandbox."""
    text = on_host("sh", "-c",
                   "ls /var/lib/forkd/sandboxes | sed s/^/dir:/; ls /run/forkd/vm | sed s/^/sock:/;"
                   # A group belongs to a VM or a shell, and is numbered: one without a process is left over.
                   "for g in /sys/fs/cgroup/forkd/vm/*/*/; do [ -d $g ] && [ -z \"$(cat $g/cgroup.procs)\" ] && echo group:$g; done;"
                   "ls /var/lib/forkd/staging 2>/dev/null | sed s/^/staging:/;"
                   "echo vmm:$(pgrep -cx forkd-vmm); echo spawn:$(pgrep -cx forkd-spawn); echo controller:$(pgrep -cx forkd-controlle)")
    found = []
    numbers = {}
    for line in text.split():
        kind, _, name = line.partition(":")
        if kind in ("vmm", "spawn", "controller"):
            numbers[kind] = int(name)
            continue
        base = name.rstrip("/").rsplit("/", 1)[-1].removesuffix(".sock")
        if base not in live:
            found.append(line)
    return found, numbers


def pool():
    link = http.client.HTTPConnection(HOST, timeout=60)
    link.request("GET", "/metrics")
    text = link.getresponse().read().decode()
    value = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if line.startswith("forkd_") and "{" not in line}
    return int(value.get("forkd_pool_ready", 0)), int(value.get("forkd_vms_live", 0))


def check(book, problems):
    status, listed = ask("GET", "/v1/sandboxes?label=of=kills")
    if status != 200:
        problems.append(f"the list of sandboxes answers {status}")
        return
    states = {one["id"]: one["state"] for one in listed}
    for one, markers in book.sandboxes.items():
        if one in book.doubtful and one not in states:
            continue
        if states.get(one) != "running":
            problems.append(f"{one} was acknowledged and is {states.get(one)}")
            continue
        status, done = ask("POST", f"/v1/sandboxes/{one}/exec", {"args": ["sh", "-c", "touch /tmp/markers; cat /tmp/markers"], "timeout_secs": 60})
        if status != 200 or not markers <= set(done["stdout"].split()):
            problems.append(f"{one} does not know all of {markers}: {status} {done}")
    unknown = set(states) - set(book.sandboxes)
    for one in unknown:
        if states[one] != "running":
            problems.append(f"{one} was not acknowledged and is {states[one]}")
    status, snapshots = ask("GET", "/v1/snapshots")
    found = {one["tag"]: one["status"] for one in snapshots}
    for tag in book.tags:
        if found.get(tag) != "ready":
            problems.append(f"branch {tag} was acknowledged and is {found.get(tag)}")
    for tag, state in found.items():
        if state != "ready":
            problems.append(f"branch {tag} is {state}")
    all_live = {one["id"] for one in ask("GET", "/v1/sandboxes")[1]}
    extra, numbers = leftovers(all_live)
    problems.extend(f"left over: {line}" for line in extra)
    # The pool fills itself in the background.
    for _ in range(50):
        ready, live = pool()
        _, numbers = leftovers(all_live)
        if numbers.get("vmm") == ready + live and live == len(all_live):
            break
        time.sleep(0.2)
    else:
        problems.append(f"{numbers.get('vmm')} VMM processes for {len(all_live)} sandboxes, {live} VMs and a pool of {ready}")
    if numbers.get("controller") != 1 or numbers.get("spawn") != 1:
        problems.append(f"processes: {numbers}")
    for one in unknown:
        ask("DELETE", f"/v1/sandboxes/{one}")


def trim(book):
    """Keeps the host from filling up."""
    for one in list(book.sandboxes)[4:] + sorted(book.doubtful):
        ask("DELETE", f"/v1/sandboxes/{one}")
        book.sandboxes.pop(one, None)
    book.doubtful.clear()
    for tag in book.doubtful_tags:
        ask("DELETE", f"/v1/snapshots/{tag}?force=true")
    book.tags.clear()
    book.doubtful_tags.clear()


def start():
    """Starts the daemon until it answers: its supervisor may not have noticed yet that it is dead."""
    end = time.monotonic() + 120
    while True:
        done = subprocess.run(START, shell=True, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        if done.returncode == 0 and ask("GET", "/healthz")[0] == 200:
            return None
        if time.monotonic() > end:
            return f"the daemon did not start: {done.stderr[-500:]}"


def main():
    book = Book()
    bad = 0
    for number in range(1, ROUNDS + 1):
        stop = threading.Event()
        threads = [threading.Thread(target=worker, args=(book, stop)) for _ in range(WORKERS)]
        for thread in threads:
            thread.start()
        time.sleep(random.uniform(2, 8))
        on_host("pkill", "-9", "-x", DAEMON)
        stop.set()
        begin = time.monotonic()
        complaint = start()
        back = time.monotonic() - begin
        for thread in threads:
            thread.join()
        problems = [complaint] if complaint else []
        held = len(book.sandboxes), len(book.tags)
        if not problems:
            check(book, problems)
            trim(book)
        bad += bool(problems)
        print(f"{'FAIL' if problems else 'ok  '} kill {number}: {held[0]} sandboxes and {held[1]} branches acknowledged, "
              f"back after {back:.1f} s", flush=True)
        for problem in problems[:10]:
            print("     ", problem, flush=True)
    for one in list(book.sandboxes):
        ask("DELETE", f"/v1/sandboxes/{one}")
    print(f"{ROUNDS - bad} passed, {bad} failed")
    sys.exit(1 if bad else 0)


main()
