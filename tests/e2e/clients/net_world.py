"""The world that guests reach in the tests of the network: servers, a name server and a record of packets.

    net_world.py DIRECTORY      runs in a network namespace; serves files below DIRECTORY

Prints `ready`. A line on standard input is a command, and each is answered by one line of JSON:

    release     lets the streams that wait go on
    forget      forgets all packets
    packets     returns the packets from clients, by client port and server port
"""

import contextlib
import functools
import hashlib
import http.server
import io
import json
import pathlib
import socket
import ssl
import struct
import subprocess
import sys
import tarfile
import threading
import zipfile
import zlib

WORLD, RESOLVER, PRIVATE = "198.51.100.7", "198.51.100.53", "10.9.9.9"
LINK = "up0"
STREAM, ECHO, DATAGRAMS, TLS, IDLE = 7000, 7001, 7002, 7003, 7004
NAME = "world.example"
NAMES = {NAME: WORLD, "private.example": PRIVATE}
# The kinds of packets that are counted, and their flag in a TCP header.
FLAGS = {"syn": 2, "rst": 4, "fin": 1}
ETH_P_IP = 0x0800


def block(number):
    return hashlib.sha256(b"%d" % number).digest() * 32


# Servers -------------------------------------------------------------------------------------------------------------


class Gate:
    """Holds streams until a command lets them go on. Streams that come later wait for the next command."""

    def __init__(self):
        self.event = threading.Event()

    def wait(self):
        self.event.wait()

    def release(self):
        self.event.set()
        self.event = threading.Event()


GATE = Gate()


def serve_stream(link):
    """Sends half of the blocks that the client asks for, waits, and sends the others."""
    with link, link.makefile("rb") as lines:
        count = int(lines.readline())
        for number in range(count // 2):
            link.sendall(block(number))
        GATE.wait()
        for number in range(count // 2, count):
            link.sendall(block(number))


def serve_idle(link):
    with link:
        GATE.wait()
        link.sendall(b"late")


def serve_echo(link):
    with link:
        while part := link.recv(1 << 16):
            link.sendall(part)


def accept(port, serve):
    listener = socket.create_server((WORLD, port), backlog=256)
    while True:
        link, _ = listener.accept()
        threading.Thread(target=swallow, args=(serve, link), daemon=True).start()


def swallow(serve, link):
    """A client that goes away is no failure of the server."""
    with contextlib.suppress(OSError, ValueError):
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

    # The client closes: a server that does must end TLS in order first.
    protocol_version = "HTTP/1.1"
    context = None

    def setup(self):
        # In the thread of the connection: a client that does not finish its handshake holds up no other.
        if self.context:
            self.request = self.context.wrap_socket(self.request, server_side=True)
        super().setup()

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


class Web(http.server.ThreadingHTTPServer):
    request_queue_size = 256

    def handle_error(self, *_):
        """A client that goes away is no failure of the server."""


# The link ------------------------------------------------------------------------------------------------------------


class Record:
    """Counts the TCP packets that arrive on the link."""

    def __init__(self):
        self.lock = threading.Lock()
        self.flows = {}
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_IP))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 20)
        self.socket.bind((LINK, ETH_P_IP))

    def run(self):
        while True:
            packet, (_, _, kind, *_) = self.socket.recvfrom(96)
            tcp = packet[(packet[0] & 15) * 4 :]
            if kind == socket.PACKET_OUTGOING or packet[9] != 6 or len(tcp) < 20:
                continue
            source, target = struct.unpack(">HH", tcp[:4])
            with self.lock:
                flow = self.flows.setdefault(f"{source} {target}", {"packets": 0, **dict.fromkeys(FLAGS, 0)})
                flow["packets"] += 1
                for name, flag in FLAGS.items():
                    flow[name] += bool(tcp[13] & flag)

    def take(self):
        with self.lock:
            return {flow: dict(counts) for flow, counts in self.flows.items()}

    def forget(self):
        with self.lock:
            self.flows.clear()


# Files ---------------------------------------------------------------------------------------------------------------


def run(*words, **options):
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)


def certificates(folder):
    """A certificate authority, `ca.pem`, and a certificate of the world."""
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    signs = ["-addext", "keyUsage=critical,keyCertSign,cRLSign", "-days", "3650", "-subj", "/CN=test world"]
    run("openssl", "req", "-x509", *key, *signs, "-keyout", "ca.key", "-out", "ca.pem", cwd=folder)
    run("openssl", "req", *key, "-keyout", "world.key", "-out", "world.csr", "-subj", f"/CN={NAME}", cwd=folder)
    # Python 3.13 checks certificates strictly.
    (folder / "names").write_text(
        f"subjectAltName=DNS:{NAME},IP:{WORLD}\nbasicConstraints=critical,CA:FALSE\n"
        "keyUsage=critical,digitalSignature\nsubjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
    )
    issue = ["openssl", "x509", "-req", "-in", "world.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"]
    run(*issue, "-days", "3650", "-extfile", "names", "-out", "world.pem", cwd=folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "world.pem", folder / "world.key")
    return context


def debian(folder):
    """A package source of apt-get."""
    content, source = folder / "package", folder / "debian"
    (content / "usr/share").mkdir(parents=True)
    (content / "usr/share/world-hello").write_text("hello from a package\n")
    (content / "DEBIAN").mkdir()
    control = "Package: world-hello\nVersion: 1\nArchitecture: all\nMaintainer: test <t@world.example>\nDescription: test\n"
    (content / "DEBIAN/control").write_text(control)
    source.mkdir()
    run("dpkg-deb", "--build", "--root-owner-group", str(content), str(source / "world-hello.deb"))
    package = (source / "world-hello.deb").read_bytes()
    (source / "Packages").write_text(
        control + f"Filename: ./world-hello.deb\nSize: {len(package)}\nSHA256: {hashlib.sha256(package).hexdigest()}\n"
    )
    listing = (source / "Packages").read_bytes()
    (source / "Release").write_text(
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


def wheels(folder):
    """An index of pip with one wheel."""
    name = "world_hello-1-py3-none-any.whl"
    files = {
        "world_hello.py": 'TEXT = "hello from a wheel"\n',
        "world_hello-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: world-hello\nVersion: 1\n",
        "world_hello-1.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, "world_hello-1.dist-info/RECORD"])
    place = folder / "simple/world-hello"
    place.mkdir(parents=True)
    with zipfile.ZipFile(place / name, "w") as wheel:
        for path, text in {**files, "world_hello-1.dist-info/RECORD": record}.items():
            wheel.writestr(path, text)
    digest = hashlib.sha256((place / name).read_bytes()).hexdigest()
    (place / "index.html").write_text(f'<!DOCTYPE html><a href="{name}#sha256={digest}">{name}</a>')


def modules(folder):
    """A registry of npm with one package."""
    about = {"name": "world-hello", "version": "1.0.0", "main": "index.js"}
    (folder / "npm-files").mkdir()
    path = folder / "npm-files/world-hello-1.0.0.tgz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in (("package.json", json.dumps(about)), ("index.js", 'module.exports = "hello from a module"\n')):
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    dist = {"tarball": f"https://{NAME}/npm-files/{path.name}", "shasum": hashlib.sha1(path.read_bytes()).hexdigest()}
    (folder / "npm").mkdir()
    (folder / "npm/world-hello").write_text(
        json.dumps({"name": "world-hello", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": {**about, "dist": dist}}})
    )


def main(folder):
    for make in (debian, wheels, modules):
        make(folder)
    project(folder / "project.git")
    context = certificates(folder)
    pages = functools.partial(Page, directory=str(folder))
    secure = functools.partial(type("SecurePage", (Page,), {"context": context}), directory=str(folder))
    record = Record()
    works = [
        record.run,
        datagrams,
        names,
        Web((WORLD, 80), pages).serve_forever,
        Web((WORLD, 443), secure).serve_forever,
        lambda: accept(STREAM, serve_stream),
        lambda: accept(ECHO, serve_echo),
        lambda: accept(IDLE, serve_idle),
        lambda: accept(TLS, lambda link: serve_echo(context.wrap_socket(link, server_side=True))),
    ]
    for work in works:
        threading.Thread(target=work, daemon=True).start()
    for port in (STREAM, ECHO, IDLE, TLS):
        listening(port)
    print("ready", flush=True)
    commands = {"release": GATE.release, "forget": record.forget, "packets": record.take}
    for line in sys.stdin:
        print(json.dumps(commands[line.strip()]()), flush=True)


def listening(port):
    """Returns when a server listens."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((WORLD, port)).close()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
