"""Branches one sandbox more often than the limit on layers, through the daemon.

    branches.py URL TAG COUNT

Each branch has a file more than the one before. Children of the first, of one in the middle and of the last have exactly
the files of their instant; so has a flat copy of the last when everything it came from is gone. What a fork without a name
was started from goes with its children. The last line counts cases.
"""

import json
import sys
import time
import urllib.request

from cases import check, finish

URL, TAG, COUNT = sys.argv[1], sys.argv[2], int(sys.argv[3])
PREFIX = "branches-"
FLAT = PREFIX + "flat"
# Above these limits the daemon merges disk layers, and stores all memory.
DISK_LAYERS, MEMORY_LAYERS = 16, 32
# The daemon collects unused content every five seconds.
COLLECTED = 8


def ask(method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, {"content-type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=600) as answer:
        text = answer.read()
        return json.loads(text) if text else None


def run(sandbox, line):
    done = ask("POST", f"/v1/sandboxes/{sandbox}/exec", {"args": ["sh", "-c", line], "timeout_secs": 120})
    assert done["exit_code"] == 0, done
    return done["stdout"]


def spawn(tag):
    return ask("POST", "/v1/sandboxes", {"snapshot_tag": tag, "timeout_secs": 3600})[0]["id"]


def branch_often():
    source = spawn(TAG)
    try:
        for number in range(1, COUNT + 1):
            run(source, f"echo {number} > /root/made-{number}")
            ask("POST", f"/v1/sandboxes/{source}/branch", {"tag": f"{PREFIX}{number}"})
            if number % 10 == 0:
                print(f"     {number} branches", flush=True)
        assert run(source, "cat /root/made-* | wc -l").strip() == str(COUNT)
    finally:
        ask("DELETE", f"/v1/sandboxes/{source}")


def has_its_files(tag, number):
    child = spawn(tag)
    try:
        found = run(child, "cat /root/made-* | sort -n").split()
        assert found == [str(one) for one in range(1, number + 1)], found
    finally:
        ask("DELETE", f"/v1/sandboxes/{child}")


def few_layers():
    info = ask("GET", f"/v1/snapshots/{PREFIX}{COUNT}/info")
    # Above what is frozen there is what the snapshot itself brings.
    assert info["disk_layers"] <= DISK_LAYERS + 1 and info["memory_layers"] <= MEMORY_LAYERS + 1, info


def flat():
    ask("POST", f"/v1/snapshots/{PREFIX}{COUNT}/compact", {"to": FLAT})
    for number in range(COUNT, 0, -1):
        ask("DELETE", f"/v1/snapshots/{PREFIX}{number}?force=true")
    info = ask("GET", f"/v1/snapshots/{FLAT}/info")
    assert info["chain_depth"] == 0 and info["memory_layers"] == 1, info
    has_its_files(FLAT, COUNT)


def files():
    return ask("GET", "/v1/store")["blobs"]


def settled():
    """Number of files after the collection of unused content."""
    last = None
    while (now := files()) != last:
        last = now
        time.sleep(COLLECTED)
    return now


def forks_leave_nothing():
    before, tags = settled(), ask("GET", "/v1/snapshots")
    sandboxes = [spawn(TAG)]
    try:
        run(sandboxes[0], "echo forked > /root/forked")
        forked = ask("POST", f"/v1/sandboxes/{sandboxes[0]}/fork", {"n": 2, "timeout_secs": 3600})
        sandboxes += [child["id"] for child in forked]
        time.sleep(COLLECTED)
        for child in sandboxes[1:]:
            assert run(child, "cat /root/forked").strip() == "forked"
        # What they share is in memory.
        assert files() == before, (files(), before)
        assert ask("GET", "/v1/snapshots") == tags
    finally:
        for sandbox in sandboxes:
            ask("DELETE", f"/v1/sandboxes/{sandbox}")
    after = settled()
    assert after == before, (after, before)


def clean():
    for one in ask("GET", "/v1/snapshots"):
        if one["tag"].startswith(PREFIX):
            ask("DELETE", f"/v1/snapshots/{one['tag']}?force=true")


clean()
check(f"{COUNT} branches of one sandbox", branch_often)
for number in (1, COUNT // 2, COUNT):
    check(f"a child of branch {number} has its files", lambda number=number: has_its_files(f"{PREFIX}{number}", number))
check("layers do not pile up", few_layers)
check("a flat copy stands alone", flat)
clean()
check("a fork leaves nothing behind", forks_leave_nothing)
finish()
