"""A guest that only waits for bytes notices that it is a child of a live fork, and that the network engine was lost.

    engine_lost.py URL TAG      runs on the host of the daemon, as root; the last line counts checks

The guest connects to a server of this program on the host, which the policy of the sandbox allows.
"""

import json
import os
import pathlib
import signal
import socket
import sys
import threading
import time
import urllib.request

URL, TAG = sys.argv[1:3]

# Waits for a byte that never comes, and keeps the reason of the end.
READER = """
import errno, os, socket
link = socket.create_connection(("%s", %d), timeout=300)
def keep(path, text):
    open(path + ".new", "w").write(text)
    os.rename(path + ".new", path)
keep("/tmp/begun", "yes")
try:
    link.recv(1)
    keep("/tmp/result", "end")
except OSError as error:
    keep("/tmp/result", errno.errorcode.get(error.errno, str(error)))
"""
WAIT = "import os, time\nwhile not os.path.exists(%r): time.sleep(0.05)\nprint(open(%r).read())"


def ask(method, path, body=None):
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(URL + path, data, {"content-type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=600) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def python(box, code):
    done = ask("POST", f"/v1/sandboxes/{box}/exec", {"args": ["python3", "-c", code], "timeout_secs": 300})
    assert done["exit_code"] == 0, done
    return done["stdout"].strip()


def wait_for(box, path):
    return python(box, WAIT % (path, path))


def engines():
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*/comm"):
        try:
            if entry.read_text().strip() == "forkd-net":
                found.append(int(entry.parent.name))
        except OSError:
            pass
    return found


def own_address():
    """The address of this host that it would use to reach another one. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return probe.getsockname()[0]


def main():
    address = own_address()
    server = socket.create_server((address, 0))
    port = server.getsockname()[1]
    links = []
    threading.Thread(target=lambda: [links.append(server.accept()) for _ in iter(int, 1)], daemon=True).start()
    policy = {"mode": "custom", "rules": [f"allow host:{port}"]}
    made = ask("POST", "/v1/sandboxes", {"snapshot_tag": TAG, "n": 1, "network": policy})
    box = made[0]["id"]
    try:
        ask("POST", f"/v1/sandboxes/{box}/processes", {"args": ["python3", "-c", READER % (address, port)]})
        wait_for(box, "/tmp/begun")
        # A child loses the connection, the source keeps it, and the server has one client as before.
        child = ask("POST", f"/v1/sandboxes/{box}/fork", {"n": 1})[0]["id"]
        result = wait_for(child, "/tmp/result")
        assert result == "ECONNRESET", result
        ask("DELETE", f"/v1/sandboxes/{child}")
        assert python(box, "import os\nprint(os.path.exists('/tmp/result'))") == "False"
        assert len(links) == 1, links
        before = engines()
        assert before, "no engine runs"
        for engine in before:
            os.kill(engine, signal.SIGKILL)
        # The agent resets the connection; so does the new engine, if a segment meets it.
        result = wait_for(box, "/tmp/result")
        assert result == "ECONNRESET", result
        again = f"import socket\nsocket.create_connection(('{address}', {port}), timeout=60)\nprint('open')"
        start = time.monotonic()
        while not ask("GET", f"/v1/sandboxes/{box}/network")["attached"]:
            assert time.monotonic() - start < 60
        assert python(box, again) == "open"
        # A refusal names the policy, inside the guest too.
        denied = f"import socket\ntry: socket.create_connection(('{address}', 1), timeout=60)\nexcept OSError: pass\n"
        page = "import urllib.request\nprint(urllib.request.urlopen('http://10.42.0.1/', timeout=60).read().decode())"
        last = json.loads(python(box, denied + page))["denied"][0]
        assert last["port"] == 1 and "group host" in last["reason"], last
        walls = ask("GET", "/v1/status")["network"]["isolation"]
        assert walls == {"walls": ["capabilities", "seccomp", "user", "landlock"], "missing": []}, walls
    finally:
        ask("DELETE", f"/v1/sandboxes/{box}")
    print("6 passed, 0 failed")


if __name__ == "__main__":
    main()
