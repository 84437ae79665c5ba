"""Secrets of real guests: a guest uses a secret that it never has.

    injected.py STATE TLS     runs the cases; STATE as for network.py, TLS has ca.pem, and cert.pem and key.pem of api.example
    injected.py world DIR     serves the world, in its namespace

Runs as root on a KVM host, beside network.py. The last line counts cases.
"""

import contextlib
import hashlib
import http.server
import mmap
import os
import pathlib
import signal
import ssl
import sys
import threading
import time

import network

HOST = "api.example"
VALUE, NEXT = "sk-live-1f6c2a9b7d3e", "sk-next-84d1b07c5a2f"
network.NAMES[HOST] = network.WORLD
RULE = {"host": HOST, "header": "Authorization", "value": "${secret:key}", "env": "API_KEY"}
POLICY = {"mode": "custom", "rules": [f"allow {HOST}:443"], "inject": [RULE]}

# Prints the status and the body of the answer, or why there is none.
ASK = f"""
import urllib.error, urllib.request
request = urllib.request.Request("https://{HOST}/", headers={{"Authorization": "Bearer " + os.environ.get("API_KEY", "none")}})
try:
    with urllib.request.urlopen(request, timeout=120) as answer:
        print(answer.status, answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
except OSError as error:
    print("failed", error)
"""


class Digest(http.server.BaseHTTPRequestHandler):
    """Answers with the digest of the header, so that the value does not come back."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        body = digest(self.headers["authorization"] or "").encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def serve_tls():
    tls = pathlib.Path(os.environ["FORKD_TEST_TLS"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls / "cert.pem", tls / "key.pem")
    server = http.server.ThreadingHTTPServer((network.WORLD, 443), Digest)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


def world():
    for work in (network.names, serve_tls):
        threading.Thread(target=work, daemon=True).start()
    time.sleep(0.2)
    print("ready", flush=True)
    sys.stdin.read()


def brokers(daemon):
    found = []
    for pid in daemon.engine():
        with contextlib.suppress(OSError):
            if b"forkd-broker" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]:
                found.append(pid)
    return found


def holding(folder, text):
    """Files below a folder that have the text."""
    found = []
    for path in pathlib.Path(folder).rglob("*"):
        if not path.is_file() or path.is_symlink() or not path.stat().st_size:
            continue
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(text.encode()) >= 0:
                found.append(str(path))
    return found


def put(daemon, value):
    daemon.ask("PUT", "/v1/secrets/key", {"value": value})


def uses_a_secret(daemon):
    put(daemon, VALUE)
    daemon.box = box = daemon.child(POLICY)
    assert box.python(ASK) == f"200 {digest('Bearer ' + VALUE)}", box.python(ASK)
    assert box.python("print(os.environ['API_KEY'])").startswith("fkd_")


def never_has_it(daemon):
    box = daemon.box
    # The text is put together in the guest, so that the program itself does not have it.
    parts = [VALUE[:8], VALUE[8:]]
    search = f"""
import glob
wanted, found = "".join({parts!r}).encode(), []
for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/etc/forkd/*") + glob.glob("/tmp/*"):
    try:
        if wanted in open(path, "rb").read(): found.append(path)
    except OSError: pass
print(found)
"""
    assert box.python(search) == "[]"
    placeholder = box.python("print(os.environ['API_KEY'])")
    box.background("import time\ntime.sleep(600)")
    daemon.ask("POST", box.at + "/branch", {"tag": "with-secret"})
    # The memory of the guest is on disk now: the placeholder is in it, and the value is not.
    assert holding(daemon.home, placeholder)
    assert holding(daemon.home, VALUE) == []
    packed = daemon.send("POST", "/v1/snapshots/with-secret/pack", {})
    assert len(packed) > 1 << 20 and VALUE.encode() not in packed
    child = daemon.ask("POST", "/v1/sandboxes", {"snapshot_tag": "with-secret", "network": "public"})[0]
    answer = network.Box(daemon, child["id"]).python(ASK)
    assert digest("Bearer " + VALUE) not in answer, answer


def forks_have_none(daemon):
    fork = network.Box(daemon, daemon.ask("POST", daemon.box.at + "/fork", {"n": 1})[0]["id"])
    assert fork.network()["policy"].get("inject", []) == []
    assert fork.python("print(os.environ.get('API_KEY'))") == "None"
    assert digest("Bearer " + VALUE) not in fork.python(ASK)
    asked = daemon.ask("POST", daemon.box.at + "/fork", {"n": 1, "network": POLICY})[0]["id"]
    assert network.Box(daemon, asked).python(ASK) == f"200 {digest('Bearer ' + VALUE)}"


def rotates(daemon):
    put(daemon, NEXT)
    assert daemon.box.python(ASK) == f"200 {digest('Bearer ' + NEXT)}"


def survives_the_broker(daemon):
    (first,) = brokers(daemon)
    os.kill(first, signal.SIGKILL)
    for _ in range(600):
        if (now := brokers(daemon)) and now != [first]:
            break
        time.sleep(0.1)
    for _ in range(60):
        answer = daemon.box.python(ASK)
        if answer == f"200 {digest('Bearer ' + NEXT)}":
            return
        # Until the new one has the rules, nothing goes out.
        assert not answer.startswith("200"), answer
        time.sleep(0.5)
    raise AssertionError(answer)


def refuses_without_it(daemon):
    daemon.ask("DELETE", "/v1/secrets/key")
    answer = daemon.box.python(ASK)
    assert answer.startswith("403 ") and "secret_missing" in answer, answer


def is_nowhere(daemon):
    texts = [daemon.send("GET", path) for path in ("/v1/secrets", "/metrics", daemon.box.at, daemon.box.at + "/network")]
    for value in (VALUE, NEXT):
        assert all(value.encode() not in text for text in texts)
        assert holding(daemon.home, value) == []


def leaves_nothing(daemon):
    assert daemon.end() == (0, [])


def main(state, tls):
    os.environ["FORKD_TEST_TLS"] = tls
    network.Daemon.script = __file__
    network.Daemon.arguments = ("--secrets-roots", str(pathlib.Path(tls) / "ca.pem"))
    daemon = network.Daemon(state)
    passed = failed = 0
    try:
        daemon.start()
        daemon.ask("POST", "/v1/snapshots", {"tag": network.TAG, "image": "python-numpy"})
        cases = (uses_a_secret, never_has_it, forks_have_none, rotates, survives_the_broker)
        for case in (*cases, refuses_without_it, is_nowhere, leaves_nothing):
            start = time.monotonic()
            try:
                case(daemon)
                passed += 1
                print(f"ok {case.__name__} ({time.monotonic() - start:.1f} s)", flush=True)
            except Exception as error:
                failed += 1
                print(f"FAILED {case.__name__}: {error!r}", flush=True)
        if failed:
            print((daemon.home / "log").read_text()[-6000:])
    finally:
        daemon.remove()
    print(f"{passed} passed, {failed} failed")
    return failed


if __name__ == "__main__":
    if sys.argv[1] == "world":
        world()
    else:
        sys.exit(main(*sys.argv[1:3]))
