"""The network of real guests: a daemon in a network namespace, and a world in another one.

    network.py STATE IMAGE [PART]       STATE is a data directory with kernels/ and images/IMAGE/

PART selects cases by a part of their names.

The guests of IMAGE have apt-get, pip, npm, git and curl. Runs as root on a KVM host. Addresses that look public exist
only inside the namespaces; `net_world.py` serves them. The last line counts cases.
"""

import contextlib
import hashlib
import http.client
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import net_world
from net_world import DATAGRAMS, ECHO, IDLE, LINK, NAME, PRIVATE, RESOLVER, STREAM, TLS, WORLD

HOST, GATE = "192.0.2.1", "192.0.2.2"
TAG = "net-parent"
CHILDREN = 50
BLOCKS = 150


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

    def __init__(self, state, image):
        self.home = pathlib.Path(tempfile.mkdtemp(prefix="net-", dir=pathlib.Path(state)))
        self.socket = str(self.home / "api.sock")
        self.inside, self.outside = f"fk{os.getpid()}d", f"fk{os.getpid()}w"
        self.world = self.process = None
        for part in ("kernels", f"images/{image}"):
            (self.home / part).mkdir(parents=True)
            for file in (pathlib.Path(state) / part).iterdir():
                if file.is_file():
                    os.link(file, self.home / part / file.name)

    def start(self):
        d, w = self.inside, self.outside
        for words in (
            f"netns add {d}",
            f"netns add {w}",
            f"link add {LINK} netns {d} type veth peer name {LINK} netns {w}",
            f"-n {d} link set lo up",
            f"-n {w} link set lo up",
            f"-n {d} link set {LINK} up",
            f"-n {w} link set {LINK} up",
            f"-n {d} address add {HOST}/24 dev {LINK}",
            f"-n {w} address add {GATE}/24 dev {LINK}",
            f"-n {d} route add default via {GATE}",
            *(f"-n {w} address add {one}/32 dev lo" for one in (WORLD, RESOLVER, PRIVATE)),
        ):
            subprocess.run(["ip", *words.split()], check=True)
        (self.home / "world").mkdir()
        self.world = subprocess.Popen(
            ["ip", "netns", "exec", w, sys.executable, net_world.__file__, str(self.home / "world")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.world.stdout.readline() == "ready\n"
        self.serve()

    def tell(self, command):
        """Gives the world a command."""
        print(command, file=self.world.stdin, flush=True)
        return json.loads(self.world.stdout.readline())

    def authority(self):
        """The certificate that programs of the guests have to trust."""
        return (self.home / "world/ca.pem").read_text()

    def serve(self):
        command = ["ip", "netns", "exec", self.inside, "forkd-controller", "serve", "--ready-timeout", "5m"]
        command += ["--data-dir", str(self.home), "--run-dir", str(self.home / "run"), "--socket", self.socket]
        command += ["--pool", "0", "--network-resolver", f"{RESOLVER}:53"]
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
        """The process of the network engine."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if words[0].endswith(b"forkd-net") and str(self.home).encode() in b" ".join(words):
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

    def wait_for(self, *paths):
        """Waits for files of the guest and returns their contents, one per line."""
        code = "for path in %r:\n    while not os.path.exists(path): time.sleep(0.05)\n    print(open(path).read())"
        return self.python(code % (paths,))

    def network(self, policy=None):
        method = "GET" if policy is None else "PUT"
        return self.daemon.ask(method, self.at + "/network", policy)

    def log(self):
        lines = self.daemon.send("GET", self.at + "/network/log").decode().splitlines()
        return [json.loads(line) for line in lines]


# The start of every program in a guest.
PRELUDE = """
import errno, hashlib, os, socket, ssl, sys, time
def name_of(error):
    return type(error).__name__ if isinstance(error, ssl.SSLError) else errno.errorcode.get(error.errno, str(error))
def why(work):
    try:
        work()
        return "open"
    except socket.gaierror as error:
        return "unknown" if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA) else str(error)
    except OSError as error:
        return name_of(error)
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
"""

# Reads a stream to its end and keeps the digest, or the error. Notes when half of it has come.
READER = f"""
link = socket.create_connection(({WORLD!r}, {STREAM}), timeout=600)
link.sendall(b"{BLOCKS}\\n")
seen, count = hashlib.sha256(), 0
try:
    while part := link.recv(4096):
        seen.update(part)
        count += len(part)
        if count == {BLOCKS // 2 * 1024}: keep("/tmp/begun", "yes")
    result = seen.hexdigest()
except OSError as error:
    result = name_of(error)
keep("/tmp/result", result)
"""
WHOLE = hashlib.sha256(b"".join(net_world.block(number) for number in range(BLOCKS))).hexdigest()

# Waits inside `recv`, without a time-out, for bytes that come late.
WAITER = f"""
link = socket.create_connection(({WORLD!r}, {IDLE}))
link.settimeout(None)
keep("/tmp/waits", "yes")
try:
    result = link.recv(16).decode() or "end"
except OSError as error:
    result = name_of(error)
keep("/tmp/waited", result)
"""

# Sends random bytes over TLS and compares the answers, until there is a file /tmp/stop.
TALKER = f"""
context = ssl.create_default_context(cadata=open("/tmp/ca.pem").read())
link = context.wrap_socket(socket.create_connection(({WORLD!r}, {TLS}), timeout=600), server_hostname={NAME!r})
rounds = 0
try:
    while not os.path.exists("/tmp/stop"):
        text, got = os.urandom(256), b""
        link.sendall(text)
        while len(got) < len(text):
            part = link.recv(4096)
            if not part: raise OSError(errno.EPIPE, "the end")
            got += part
        assert got == text
        rounds += 1
        keep("/tmp/rounds", str(rounds))
        time.sleep(0.05)
    result = "whole"
except OSError as error:
    result = name_of(error)
keep("/tmp/talked", result)
"""


# The cases -----------------------------------------------------------------------------------------------------------


def reaches_the_world(daemon):
    box = daemon.child("public")
    print("ready_us", daemon.ask("GET", box.at)["ready_us"])
    servers = box.python("print(open('/etc/resolv.conf').read())")
    assert servers == "nameserver 10.42.0.1", servers
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
    private = box.python("print(why(lambda: socket.gethostbyname('private.example')))")
    assert private == "unknown", private
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


def at_rest(daemon, ports):
    """The packets of connections to these ports, once no more come."""
    before = None
    while True:
        now = {flow: counts for flow, counts in daemon.tell("packets").items() if int(flow.split()[1]) in ports}
        if now == before:
            return now
        before = now
        time.sleep(0.5)


def forks_with_open_connections(daemon):
    """A download, an idle reader and a TLS conversation in a source that is forked."""
    box = daemon.child("public")
    box.python(f"keep('/tmp/ca.pem', {daemon.authority()!r})")
    daemon.tell("forget")
    for program in (READER, WAITER, TALKER):
        box.background(program)
    box.wait_for("/tmp/begun", "/tmp/waits", "/tmp/rounds")
    quiet = at_rest(daemon, (STREAM, IDLE))
    assert len(quiet) == 2, quiet
    start = time.monotonic()
    made = daemon.ask("POST", box.at + "/fork", {"n": 2})
    children = [Box(daemon, one["id"]) for one in made]
    print(f"forked after {time.monotonic() - start:.1f} s")
    for child in children:
        begin = time.monotonic()
        ends = child.wait_for("/tmp/result", "/tmp/waited", "/tmp/talked").split()
        assert ends == ["ECONNRESET"] * 3, ends
        print(f"a child says after {time.monotonic() - begin:.1f} s that its connections were reset")
    rounds = int(box.wait_for("/tmp/rounds"))
    code = "while int(open('/tmp/rounds').read()) < %d: time.sleep(0.05)" % (rounds + 5)
    box.python(code)
    # The children sent nothing: the idle connections of the source carried no packet, and there are no others.
    assert at_rest(daemon, (STREAM, IDLE)) == quiet
    talks = {flow: counts for flow, counts in daemon.tell("packets").items() if flow.endswith(f" {TLS}")}
    (talk,) = talks.values()
    assert (talk["syn"], talk["rst"], talk["fin"]) == (1, 0, 0), talk
    daemon.tell("release")
    assert (box.wait_for("/tmp/result"), box.wait_for("/tmp/waited")) == (WHOLE, "late")
    box.python("keep('/tmp/stop', '')")
    assert box.wait_for("/tmp/talked") == "whole"
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
    assert box.wait_for("/tmp/result") == "ECONNRESET"
    assert box.python(f"print(echo({WORLD!r}, {ECHO}, b'again').decode())") == "again"


# Each tool: its command, the output that shows its success, and the failure under the mode `none`, which is no time-out.
APT = "apt-get -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts=/tmp/sources -o Acquire::Retries=0"
NPM = "node /usr/local/lib/node_modules/npm/bin/npm-cli.js"
TOOLS = {
    "apt-get": (
        "mkdir -p /tmp/sources\n"
        f"printf 'Types: deb\\nURIs: https://{NAME}/debian\\nSuites: ./\\nTrusted: yes\\n' > /tmp/sources/world.sources\n"
        f"{APT} update --error-on=any && {APT} install -y world-hello && cat /usr/share/world-hello",
        "hello from a package",
        "Could not resolve",
    ),
    "pip": (
        f"python3 -m pip install --break-system-packages --disable-pip-version-check --no-cache-dir --root-user-action=ignore"
        f" --index-url https://{NAME}/simple world-hello && python3 -c 'import world_hello; print(world_hello.TEXT)'",
        "hello from a wheel",
        "Name or service not known",
    ),
    "git": (
        f"git clone https://{NAME}/project.git /tmp/project && cat /tmp/project/readme",
        "hello from a repository",
        "Could not resolve host",
    ),
    "npm": (
        f"mkdir -p /tmp/modules && cd /tmp/modules && {NPM} install --registry https://{NAME}/npm/ --no-audit --no-fund"
        " --no-update-notifier world-hello && node -p 'require(\"world-hello\")'",
        "hello from a module",
        "ENOTFOUND",
    ),
    "curl": (f"curl -sS https://{NAME}/", f"hello {NAME}", "Could not resolve host"),
}
STARTS = {"apt-get": "apt-get --version", "pip": "python3 -m pip --version", "git": "git --version", "npm": f"{NPM} --version", "curl": "curl --version"}
# Programs read this file, or are told to.
TRUST = "/etc/ssl/certs/ca-certificates.crt"


def shell(box, line):
    """Runs a line in the guest: exit code, output, seconds."""
    start = time.monotonic()
    line = f"export NODE_EXTRA_CA_CERTS={TRUST} HOME=/root\n{line}"
    done = box.daemon.ask("POST", box.at + "/exec", {"args": ["sh", "-c", line], "timeout_secs": 300})
    return done["exit_code"], done["stdout"] + done["stderr"], time.monotonic() - start


def installs_packages(daemon):
    """Every tool works over TLS through `public`, and is refused by name under `none`."""
    opened, closed = daemon.child("public"), daemon.child("none")
    for box in (opened, closed):
        box.python(f"open({TRUST!r}, 'a').write({daemon.authority()!r})")
    for tool, (line, shows, fails) in TOOLS.items():
        code, text, took = shell(opened, line)
        assert code == 0 and shows in text, (tool, code, text[-2000:])
        _, _, starts = shell(closed, STARTS[tool])
        # By default pip and npm try again for seconds or minutes, whatever the answer is. Without a retry pip gives no reason.
        code, text, refused = shell(closed, f"export PIP_RETRIES=1 npm_config_fetch_retries=0\n{line}")
        assert code != 0 and fails in text, (tool, code, text[-2000:])
        print(f"{tool}: {took:.1f} s through public; refused under none after {refused:.1f} s; starts in {starts:.1f} s")
    # By its address the server is refused, too.
    code, text, _ = shell(closed, f"curl -sS https://{WORLD}/")
    assert code == 7, (code, text)
    # The guest can read which policy denied it, and so can the owner.
    denied = json.loads(shell(closed, "curl -sS http://10.42.0.1/")[1])["denied"]
    assert {entry["reason"] for entry in denied} == {"the network mode none"}, denied
    assert {NAME, None} <= {entry["name"] for entry in denied}, denied
    assert {entry["reason"] for entry in closed.log()} == {"the mode none"}, closed.log()


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


def main(state, image, only=""):
    daemon = Daemon(state, image)
    passed = failed = 0
    try:
        daemon.start()
        daemon.ask("POST", "/v1/snapshots", {"tag": TAG, "image": image})
        for case in (
            reaches_the_world,
            is_refused_by_name,
            changes_live,
            forks_with_open_connections,
            goes_back,
            survives_the_engine,
            installs_packages,
            keeps_limits,
            fifty_are_online,
            leaves_nothing,
        ):
            if only not in case.__name__:
                continue
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
    sys.exit(main(*sys.argv[1:]))
