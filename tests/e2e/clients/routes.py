"""Files, processes, interpreters and ports of a guest, over the REST API.

    routes.py URL TAG

The last line counts cases.
"""

import io
import json
import sys
import tarfile
import urllib.error
import urllib.request

from cases import check, finish

URL, TAG = sys.argv[1], sys.argv[2]


def send(method, path, body=None, kind="application/json", headers=None):
    data = json.dumps(body).encode() if kind == "application/json" and body is not None else body
    request = urllib.request.Request(URL + path, data, {"content-type": kind, **(headers or {})}, method=method)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return answer.status, answer.read()


def ask(method, path, body=None, **more):
    text = send(method, path, body, **more)[1]
    return json.loads(text) if text else None


def refused(method, path, body=None):
    try:
        send(method, path, body)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["code"]
    raise AssertionError(f"{method} {path} was not refused")


BOX = "/v1/sandboxes/" + ask(
    "POST",
    "/v1/sandboxes",
    {"snapshot_tag": TAG, "timeout_secs": 3600, "env": {"GREETING": "hello"}, "metadata": {"task": "routes"}},
)[0]["id"]


def run(*args):
    done = ask("POST", BOX + "/exec", {"args": args, "timeout_secs": 120})
    assert done["exit_code"] == 0, done
    return done["stdout"]


def output(pid, since=0):
    """Everything a process printed from a position on, and the position of its first byte."""
    frames = send("GET", f"{BOX}/processes/{pid}/output?since={since}")[1].decode().splitlines()
    frames = [json.loads(line) for line in frames]
    said = [frame for frame in frames if frame["type"] == "stdout"]
    return "".join(frame["text"] for frame in said), said[0].get("offset", 0)


def files():
    send("PUT", BOX + "/files?path=/tmp/a", b"0123456789", kind="application/octet-stream")
    status, part = send("GET", BOX + "/files?path=/tmp/a", headers={"range": "bytes=2-5"})
    assert (status, part) == (206, b"2345"), (status, part)
    assert ask("GET", BOX + "/files/stat?path=/tmp/a")["size"] == 10
    ask("POST", BOX + "/files/rename", {"from": "/tmp/a", "to": "/tmp/b"})
    ask("POST", BOX + "/files/attributes", {"path": "/tmp/b", "mode": "600"})
    assert run("stat", "-c", "%a %s", "/tmp/b") == "600 10\n"
    assert refused("GET", BOX + "/files/stat?path=/tmp/a") == (404, "file_not_found")


def archives():
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo("deep/er/file")
        info.size = 5
        tar.addfile(info, io.BytesIO(b"hello"))
    run("mkdir", "-p", "/tmp/in")
    send("PUT", BOX + "/files/archive?path=/tmp/in", out.getvalue(), kind="application/x-tar")
    assert run("cat", "/tmp/in/deep/er/file") == "hello"
    back = send("GET", BOX + "/files/archive?path=/tmp/in")[1]
    with tarfile.open(fileobj=io.BytesIO(back)) as tar:
        names = [name for name in tar.getnames() if name.endswith("deep/er/file")]
        assert tar.extractfile(names[0]).read() == b"hello"


def input_in_parts():
    pid = ask("POST", BOX + "/processes", {"args": ["cat"], "open_stdin": True})["pid"]
    for part, last in [(b"one ", "false"), (b"two", "true")]:
        send("POST", f"{BOX}/processes/{pid}/stdin?eof={last}", part, kind="application/octet-stream")
    assert output(pid) == ("one two", 0), output(pid)
    assert output(pid, since=4) == ("two", 4), output(pid, since=4)


def terminals():
    line = "read x; stty size; exit"
    body = {"args": ["sh", "-c", line], "terminal": {"rows": 20, "cols": 70}}
    pid = ask("POST", BOX + "/processes", body)["pid"]
    ask("POST", f"{BOX}/processes/{pid}/resize", {"rows": 33, "cols": 99})
    send("POST", f"{BOX}/processes/{pid}/stdin", b"go\n", kind="application/octet-stream")
    assert "33 99" in output(pid)[0], output(pid)


def environment():
    assert run("sh", "-c", "echo $GREETING") == "hello\n"
    assert ask("GET", BOX)["metadata"] == {"task": "routes"}


def ports():
    server = "import http.server as h; h.ThreadingHTTPServer(('127.0.0.1', 3000), h.SimpleHTTPRequestHandler).serve_forever()"
    run("sh", "-c", "mkdir -p /tmp/www; head -c 300000 /dev/zero >/tmp/www/big")
    assert refused("GET", BOX + "/proxy/3000/big") == (502, "port_closed")
    ask("POST", BOX + "/processes", {"args": ["python3", "-c", server], "cwd": "/tmp/www"})
    run("sh", "-c", "for i in $(seq 100); do python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 3000))' && exit; sleep 0.2; done")
    assert send("GET", BOX + "/proxy/3000/big")[1] == bytes(300000)


def wrong_requests():
    assert refused("DELETE", BOX + "/files?path=/&recursive=true") == (400, "invalid_request")
    assert refused("DELETE", BOX + "/files?path=/tmp/..") == (400, "invalid_request")
    assert refused("POST", BOX + "/files/rename", {"from": "/", "to": "/x"}) == (400, "invalid_request")
    assert refused("POST", BOX + "/processes", {"args": [""]}) == (400, "invalid_request")
    assert run("ls", "/bin/sh") == "/bin/sh\n"


def killed_is_gone():
    pid = ask("POST", BOX + "/processes", {"args": ["sleep", "4242"]})["pid"]
    ask("POST", f"{BOX}/processes/{pid}/signal", {"signal": 9})
    assert [one["running"] for one in ask("GET", BOX + "/processes") if one["pid"] == pid] == [False]


def a_key_makes_a_fork_once():
    key = {"idempotency-key": f"routes-{BOX[-8:]}"}
    first, second = (ask("POST", BOX + "/fork", {"n": 1}, headers=key) for _ in range(2))
    assert [child["id"] for child in first] == [child["id"] for child in second], (first, second)
    assert ask("GET", f"/v1/sandboxes/{first[0]['id']}")["metadata"] == {"task": "routes"}
    send("DELETE", f"/v1/sandboxes/{first[0]['id']}")


check("files: ranges, stat, rename, attributes", files)
check("archives go in and come out", archives)
check("input comes in parts, and output goes on where it was left", input_in_parts)
check("a terminal is resized", terminals)
check("the sandbox has an environment and metadata", environment)
check("a server on 127.0.0.1 of the guest is reached through the daemon", ports)
check("wrong requests are refused and change nothing", wrong_requests)
check("a process that was killed does not run", killed_is_gone)
check("a key makes a fork once", a_key_makes_a_fork_once)
send("DELETE", BOX)
finish()
