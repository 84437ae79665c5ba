"""The network of real guests: a daemon in a network namespace, and a world in another one.

    network.py STATE        runs the cases; STATE has kernels/ and images/python-numpy/ of a data directory
    network.py world DIR    serves the world, in its namespace

Runs as root on a KVM host. Addresses that look public exist only inside the namespaces. The last line counts cases.
"""

import contextlib
import functools
import hashlib
import http.client
import http.server
import json
import os
import pathlib
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib

WORLD, RESOLVER, PRIVATE = "198.51.100.7", "198.51.100.53", "10.9.9.9"
HOST, GATE = "192.0.2.1", "192.0.2.2"
STREAM, ECHO, DATAGRAMS = 7000, 7001, 7002
NAMES = {"world.example": WORLD, "private.example": PRIVATE}
TAG = "net-parent"
CHILDREN = 50
# An emulated machine is slow; a denial is still far below a time-out of TCP, which is minutes.
SOON = 10


# The world -----------------------------------------------------------------------------------------------------------


def block(number):
    return hashlib.sha256(b"%d" % number).digest() * 32


def serve_stream(link):
    """Sends as many blocks as the client asks for, one at a time."""
    with link, link.makefile("rb") as lines:
        for number in range(int(lines.readline())):
            link.sendall(block(number))
            time.sleep(0.02)


def serve_echo(link):
    with link:
        while part := link.recv(1 << 16):
            link.sendall(part)


def accept(port, serve):
    listener = socket.create_server((WORLD, port))
    while True:
        link, _ = listener.accept()
        threading.Thread(target=swallow, args=(serve, link), daemon=True).start()


def swallow(serve, link):
    """A client that goes away is no failure of the server."""
    with contextlib.suppress(OSError):
        serve(link)


def datagrams():
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((WORLD, DATAGRAMS))
    while True:
        payload, peer = server.recvfrom(65536)
        server.sendto(payload[::-1], peer)


def names():
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((RESOLVER, 53))
    while True:
        question, peer = server.recvfrom(4096)
        server.sendto(answered(question), peer)


def answered(question):
    """The answer to a question with one name."""
    labels, at = [], 12
    while question[at]:
        labels.append(question[at + 1 : at + 1 + question[at]].decode().lower())
        at += 1 + question[at]
    asked, kind = question[12 : at + 5], struct.unpack(">H", question[at + 1 : at + 3])[0]
    address = NAMES.get(".".join(labels))
    code = 0 if address else 3
    records = 1 if address and kind == 1 else 0
    head = question[:2] + struct.pack(">HHHHH", 0x8180 | code, 1, records, 0, 0)
    record = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 60, 4) + socket.inet_aton(address) if records else b""
    return head + asked + record


class Page(http.server.SimpleHTTPRequestHandler):
    """Files below the folder of the world, and a greeting at the root."""

    def do_GET(self):
        if self.path != "/":
            return super().do_GET()
        body = f"hello {self.headers['host']}".encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def repository(folder):
    """A package source as plain files."""

    def run(*words, **options):
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, **options)

    debian = folder / "debian"
    content = folder / "package"
    (content / "usr/share").mkdir(parents=True)
    (content / "usr/share/world-hello").write_text("hello from a package\n")
    (content / "DEBIAN").mkdir()
    control = "Package: world-hello\nVersion: 1\nArchitecture: all\nMaintainer: test <t@world.example>\nDescription: test\n"
    (content / "DEBIAN/control").write_text(control)
    debian.mkdir()
    run("dpkg-deb", "--build", "--root-owner-group", str(content), str(debian / "world-hello.deb"))
    package = (debian / "world-hello.deb").read_bytes()
    (debian / "Packages").write_text(
        control + f"Filename: ./world-hello.deb\nSize: {len(package)}\nSHA256: {hashlib.sha256(package).hexdigest()}\n"
    )
    listing = (debian / "Packages").read_bytes()
    (debian / "Release").write_text(
        "Date: Thu, 01 Jan 2026 00:00:00 UTC\n"
        f"SHA256:\n {hashlib.sha256(listing).hexdigest()} {len(listing)} Packages\n"
    )


def project(bare):
    """A git repository for the plain HTTP protocol, without git: one commit with one file."""

    def put(kind, content):
        whole = kind + b" %d\0" % len(content) + content
        name = hashlib.sha1(whole).hexdigest()
        path = bare / "objects" / name[:2] / name[2:]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(zlib.compress(whole))
        return name

    blob = put(b"blob", b"hello from a repository\n")
    tree = put(b"tree", b"100644 readme\0" + bytes.fromhex(blob))
    who = "test <t@world.example> 1767225600 +0000"
    commit = put(b"commit", f"tree {tree}\nauthor {who}\ncommitter {who}\n\none\n".encode())
    (bare / "HEAD").write_text("ref: refs/heads/main\n")
    (bare / "info").mkdir()
    (bare / "info/refs").write_text(f"{commit}\trefs/heads/main\n")


def world(folder):
    folder = pathlib.Path(folder)
    repository(folder)
    project(folder / "project.git")
    pages = functools.partial(Page, directory=str(folder))
    web = http.server.ThreadingHTTPServer((WORLD, 80), pages)
    for work in (lambda: accept(STREAM, serve_stream), lambda: accept(ECHO, serve_echo), datagrams, names, web.serve_forever):
        threading.Thread(target=work, daemon=True).start()
    time.sleep(0.2)
    print("ready", flush=True)
    sys.stdin.read()


# The daemon ----------------------------------------------------------------------------------------------------------


class Connection(http.client.HTTPConnection):
    """HTTP over the daemon's Unix socket."""

    def __init__(self, path):
        super().__init__("forkd", timeout=600)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


class Daemon:
    """A daemon and a world, each in a namespace, joined by a link."""

    # The program of the world, and arguments of the daemon beside those that every test needs.
    script, arguments = __file__, ()

    def __init__(self, state):
        self.home = pathlib.Path(tempfile.mkdtemp(prefix="net-", dir=pathlib.Path(state)))
        self.socket = str(self.home / "api.sock")
        self.inside, self.outside = f"fk{os.getpid()}d", f"fk{os.getpid()}w"
        self.world = self.process = None
        for part in ("kernels", "images/python-numpy"):
            (self.home / part).mkdir(parents=True)
            for file in (pathlib.Path(state) / part).iterdir():
                if file.is_file():
                    os.link(file, self.home / part / file.name)

    def start(self):
        d, w = self.inside, self.outside
        for words in (
            f"netns add {d}",
            f"netns add {w}",
            f"link add up0 netns {d} type veth peer name up0 netns {w}",
            f"-n {d} link set lo up",
            f"-n {w} link set lo up",
            f"-n {d} link set up0 up",
            f"-n {w} link set up0 up",
            f"-n {d} address add {HOST}/24 dev up0",
            f"-n {w} address add {GATE}/24 dev up0",
            f"-n {d} route add default via {GATE}",
            *(f"-n {w} address add {one}/32 dev lo" for one in (WORLD, RESOLVER, PRIVATE)),
        ):
            subprocess.run(["ip", *words.split()], check=True)
        (self.home / "world").mkdir()
        self.world = subprocess.Popen(
            ["ip", "netns", "exec", w, sys.executable, self.script, "world", str(self.home / "world")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.world.stdout.readline() == b"ready\n"
        self.serve()

    def serve(self):
        command = ["ip", "netns", "exec", self.inside, "forkd-controller", "serve", "--ready-timeout", "5m"]
        command += ["--data-dir", str(self.home), "--run-dir", str(self.home / "run"), "--socket", self.socket]
        command += ["--pool", "0", "--network-resolver", f"{RESOLVER}:53", *self.arguments]
        with open(self.home / "log", "ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        for _ in range(600):
            with contextlib.suppress(OSError):
                if self.ask("GET", "/healthz")["ok"]:
                    return
            assert self.process.poll() is None, (self.home / "log").read_text()
            time.sleep(0.1)
        raise AssertionError("the daemon does not answer")

    def send(self, method, path, body=None):
        link = Connection(self.socket)
        link.request(method, path, json.dumps(body) if body is not None else None, {"content-type": "application/json"})
        answer = link.getresponse()
        text = answer.read()
        link.close()
        assert answer.status < 300 or answer.status == 503, (method, path, answer.status, text)
        return text

    def ask(self, method, path, body=None):
        text = self.send(method, path, body)
        return json.loads(text) if text else None

    def engine(self):
        """The processes of the network engine and of the broker of secrets."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if words[0].endswith((b"forkd-net", b"forkd-broker")) and str(self.home).encode() in b" ".join(words):
                    found.append(int(entry.name))
        return found

    def child(self, network, n=1):
        wish = {"snapshot_tag": TAG, "n": n, "network": network, "timeout_secs": 3600}
        made = self.ask("POST", "/v1/sandboxes", wish)
        boxes = [Box(self, one["id"]) for one in made]
        return boxes if n > 1 else boxes[0]

    def end(self):
        for box in self.ask("GET", "/v1/sandboxes"):
            self.ask("DELETE", f"/v1/sandboxes/{box['id']}")
        left = self.ask("GET", "/v1/status")["network"]["sandboxes"]
        self.process.terminate()
        self.process.wait(60)
        return left, self.engine()

    def remove(self):
        for process in (self.process, self.world):
            if process and process.poll() is None:
                process.kill()
                process.wait()
        for pid in self.engine():
            os.kill(pid, signal.SIGKILL)
        for name in (self.inside, self.outside):
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(self.home, ignore_errors=True)


class Box:
    def __init__(self, daemon, id):
        self.daemon, self.id, self.at = daemon, id, f"/v1/sandboxes/{id}"

    def python(self, code):
        """Runs a program in the guest and returns its output."""
        wish = {"args": ["python3", "-c", PRELUDE + code], "timeout_secs": 300}
        done = self.daemon.ask("POST", self.at + "/exec", wish)
        assert done["exit_code"] == 0, done
        return done["stdout"].strip()

    def background(self, code):
        wish = {"args": ["python3", "-c", PRELUDE + code]}
        self.daemon.ask("POST", self.at + "/processes", wish)

    def wait_for(self, path):
        """Waits for a file of the guest and returns its content."""
        code = f"import time\nwhile not os.path.exists({path!r}): time.sleep(0.05)\nprint(open({path!r}).read())"
        return self.python(code)

    def network(self, policy=None):
        method = "GET" if policy is None else "PUT"
        return self.daemon.ask(method, self.at + "/network", policy)

    def log(self):
        lines = self.daemon.send("GET", self.at + "/network/log").decode().splitlines()
        return [json.loads(line) for line in lines]


# The start of every program in a guest.
PRELUDE = """
import errno, hashlib, os, socket, sys, time
def why(work):
    start = time.monotonic()
    try:
        work()
        name = "open"
    except socket.gaierror:
        name = "unknown"
    except OSError as error:
        name = errno.errorcode.get(error.errno, str(error))
    return name if time.monotonic() - start < %d else name + " late"
def connect(host, port):
    return why(lambda: socket.create_connection((host, port), timeout=60).close())
def echo(host, port, text):
    with socket.create_connection((host, port), timeout=60) as link:
        link.sendall(text)
        link.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: link.recv(65536), b""))
def keep(path, text):
    with open(path + ".new", "w") as file: file.write(text)
    os.rename(path + ".new", path)
""" % SOON

# Reads a stream to its end and keeps the digest, or the error. Says when the first byte has come.
READER = f"""
link = socket.create_connection(({WORLD!r}, {STREAM}), timeout=120)
link.sendall(b"150\\n")
seen, count, result = hashlib.sha256(), 0, None
try:
    while part := link.recv(4096):
        seen.update(part)
        if not count: keep("/tmp/begun", "yes")
        count += len(part)
    result = seen.hexdigest()
except OSError as error:
    result = errno.errorcode.get(error.errno, str(error))
keep("/tmp/result", result)
"""
WHOLE = hashlib.sha256(b"".join(block(number) for number in range(150))).hexdigest()


# The cases -----------------------------------------------------------------------------------------------------------


def reaches_the_world(daemon):
    box = daemon.child("public")
    print("ready_us", daemon.ask("GET", box.at)["ready_us"])
    assert box.python("print(open('/etc/resolv.conf').read())") == "nameserver 10.42.0.1"
    said = box.python(
        f"print(socket.gethostbyname('world.example'))\n"
        f"import urllib.request\n"
        f"print(urllib.request.urlopen('http://world.example/', timeout=60).read().decode())\n"
        f"data = os.urandom(1 << 20)\n"
        f"print(echo('world.example', {ECHO}, data) == data)\n"
        f"link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        f"link.settimeout(30)\n"
        f"link.sendto(b'abc', ({WORLD!r}, {DATAGRAMS}))\n"
        f"print(link.recv(100).decode())"
    )
    assert said.splitlines() == [WORLD, "hello world.example", "True", "cba"], said
    # Addresses that a policy must name, and a closed port.
    for target in (PRIVATE, HOST, "127.0.0.1", "169.254.169.254", "10.42.0.1", WORLD):
        assert box.python(f"print(connect({target!r}, 81))") == "ECONNREFUSED", target
    # A public name does not lead into a private network.
    assert box.python("print(why(lambda: socket.gethostbyname('private.example')))") == "unknown"
    counters = box.network()["counters"]
    assert counters["bytes_down"] > 1 << 20 and counters["flows"] >= 3 and counters["denied"] >= 3, counters


def is_refused_by_name(daemon):
    box = daemon.child("none")
    assert box.python(f"print(connect({WORLD!r}, {ECHO}))") == "ECONNREFUSED"
    assert box.python("print(why(lambda: socket.gethostbyname('world.example')))") == "unknown"
    log = box.log()
    assert {entry["verdict"] for entry in log} == {"denied"}, log
    assert {entry["reason"] for entry in log} == {"the mode none"}, log
    assert "world.example" in [entry.get("name") for entry in log], log


def changes_live(daemon):
    box = daemon.child({"mode": "custom", "rules": ["allow world.example:80", f"allow {WORLD}:{STREAM}"]})
    assert "hello" in box.python(
        "import urllib.request\nprint(urllib.request.urlopen('http://world.example/', timeout=60).read().decode())"
    )
    assert box.python(f"print(connect({WORLD!r}, {ECHO}))") == "ECONNREFUSED"
    box.background(READER)
    box.wait_for("/tmp/begun")
    shown = box.network("none")
    assert (shown["generation"], shown["open_flows"]) == (2, 0), shown
    assert box.wait_for("/tmp/result") == "ECONNRESET"
    # Durable: a daemon that is killed finds the policy again.
    daemon.process.kill()
    daemon.process.wait()
    engine = daemon.engine()
    daemon.serve()
    assert daemon.engine() == engine, "the engine was not adopted"
    assert box.network()["policy"]["mode"] == "none"
    assert box.python(f"print(connect({WORLD!r}, 80))") == "ECONNREFUSED"


def forks_with_an_open_connection(daemon):
    box = daemon.child("public")
    box.background(READER)
    box.wait_for("/tmp/begun")
    made = daemon.ask("POST", box.at + "/fork", {"n": 2})
    children = [Box(daemon, one["id"]) for one in made]
    for child in children:
        assert child.wait_for("/tmp/result") == "ECONNRESET"
    assert box.wait_for("/tmp/result") == WHOLE
    # Each child has its own connections: the same ports, other bytes.
    texts = [os.urandom(32).hex() for _ in children]
    for child, text in zip(children, texts):
        child.background(
            f"link = socket.socket()\nlink.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
            f"link.bind(('', 40000))\nlink.connect(({WORLD!r}, {ECHO}))\n"
            f"data, got = {text!r}.encode() * 2048, b''\nlink.sendall(data)\n"
            f"while len(got) < len(data): got += link.recv(65536)\n"
            f"keep('/tmp/own', str(got == data))"
        )
    assert [child.wait_for("/tmp/own") for child in children] == ["True", "True"]


def goes_back(daemon):
    box = daemon.child("public")
    box.background(READER)
    box.wait_for("/tmp/begun")
    daemon.ask("POST", box.at + "/checkpoints", {"name": "here"})
    daemon.ask("POST", box.at + "/rollback", {"to": "here"})
    assert box.wait_for("/tmp/result") == "ECONNRESET"
    assert box.python(f"print(connect({WORLD!r}, {ECHO}))") == "open"


def survives_the_engine(daemon):
    box = daemon.child("public")
    box.background(READER)
    box.wait_for("/tmp/begun")
    (engine,) = daemon.engine()
    os.kill(engine, signal.SIGKILL)
    start = time.monotonic()
    while not box.network()["attached"]:
        assert time.monotonic() - start < 60
        time.sleep(0.01)
    print(f"attached again after {time.monotonic() - start:.3f} s")
    assert daemon.engine() != [engine]
    # The agent aborts the connection; a segment that met the new engine would be reset.
    result = box.wait_for("/tmp/result")
    assert result in ("ECONNABORTED", "ECONNRESET"), result
    assert box.python(f"print(echo({WORLD!r}, {ECHO}, b'again').decode())") == "again"


def installs_packages(daemon):
    """apt-get and git through the policy `public`, and refused at once under `none`."""
    apt = (
        "import subprocess\n"
        "open('/etc/apt/sources.list.d/world.sources', 'w').write("
        "'Types: deb\\nURIs: http://world.example/debian\\nSuites: ./\\nTrusted: yes\\n')\n"
        "def run(*words):\n"
        "    done = subprocess.run(words, capture_output=True, text=True, timeout=200)\n"
        "    return done.returncode, (done.stdout + done.stderr)[-600:]\n"
        "only = ('-o', 'Dir::Etc::sourcelist=/dev/null', '-o', 'Acquire::Retries=0')\n"
        "os.system('mkdir -p /tmp/parts; cp /etc/apt/sources.list.d/world.sources /tmp/parts')\n"
        "only += ('-o', 'Dir::Etc::sourceparts=/tmp/parts')\n"
    )
    install = apt + (
        "assert run('apt-get', *only, 'update')[0] == 0, run('apt-get', *only, 'update')\n"
        "done = run('apt-get', *only, 'install', '-y', 'world-hello')\n"
        "assert done[0] == 0, done\n"
        "print(open('/usr/share/world-hello').read().strip())"
    )
    clone = apt + (
        "done = run('git', 'clone', 'http://world.example/project.git', '/tmp/project')\n"
        "assert done[0] == 0, done\n"
        "print(open('/tmp/project/readme').read().strip())"
    )
    box = daemon.child("public")
    assert box.python(install) == "hello from a package"
    assert box.python(clone) == "hello from a repository"
    closed = daemon.child("none")
    for words in ("'apt-get', *only, 'update', '--error-on=any'", "'git', 'clone', 'http://world.example/project.git', '/tmp/p'"):
        code = apt + f"start = time.monotonic()\ncode, text = run({words})\nprint(code != 0, time.monotonic() - start < {SOON}, text)"
        assert closed.python(code).startswith("True True"), closed.python(code)
    page = "import urllib.request\nprint(urllib.request.urlopen('http://10.42.0.1/', timeout=60).read().decode())"
    denied = json.loads(closed.python(page))["denied"]
    assert {entry["reason"] for entry in denied} == {"the network mode none"}, denied


def fifty_are_online(daemon):
    """Fifty children of one snapshot talk at once, and each hears its own words only."""
    boxes = daemon.child("public", CHILDREN)
    texts = [os.urandom(16).hex() for _ in boxes]
    found = [None] * len(boxes)

    def talk(number):
        code = f"text = {texts[number]!r}.encode() * 512\nprint(echo('world.example', {ECHO}, text) == text)"
        found[number] = boxes[number].python(code)

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(len(boxes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["True"] * len(boxes), found
    for box in boxes:
        daemon.ask("DELETE", box.at)


def keeps_limits(daemon):
    box = daemon.child({"mode": "public", "limits": {"egress_mib_total": 1, "connections": 2}})
    big = (
        f"link = socket.create_connection(({WORLD!r}, {ECHO}), timeout=60)\n"
        f"def send():\n    for _ in range(64): link.sendall(bytes(65536))\n"
        f"print(why(send))"
    )
    assert box.python(big) in ("ECONNRESET", "EPIPE"), box.log()
    assert "egress_mib_total" in [entry for entry in box.log() if entry["verdict"] == "denied"][-1]["reason"]
    shown = daemon.ask("PATCH", box.at + "/network", {"limits": {"egress_mib_total": 0, "egress_mbit": 80}})
    assert shown["policy"]["limits"] == {"connections": 2, "egress_mbit": 80}, shown
    assert box.python(f"print(echo({WORLD!r}, {ECHO}, bytes(3000000)) == bytes(3000000))") == "True"
    assert box.network()["counters"]["limited"] > 0


def leaves_nothing(daemon):
    assert daemon.end() == (0, [])


def main(state):
    daemon = Daemon(state)
    passed = failed = 0
    try:
        daemon.start()
        daemon.ask("POST", "/v1/snapshots", {"tag": TAG, "image": "python-numpy"})
        for case in (
            reaches_the_world,
            is_refused_by_name,
            changes_live,
            forks_with_an_open_connection,
            goes_back,
            survives_the_engine,
            installs_packages,
            keeps_limits,
            fifty_are_online,
            leaves_nothing,
        ):
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
        world(sys.argv[2])
    else:
        sys.exit(main(sys.argv[1]))
