"""Ports of a real guest: host names, streams, WebSocket, `forkd forward`, roll-backs.

    ports.py FORKD URL TAG

The server runs in the guest and listens on 127.0.0.1 and ::1 only. The last line counts cases.
"""

import base64
import hashlib
import json
import os
import socket
import subprocess
import sys
import urllib.parse
import urllib.request

from cases import case, finish

FORKD, URL, TAG = sys.argv[1:4]
ADDRESS = urllib.parse.urlsplit(URL).hostname, urllib.parse.urlsplit(URL).port
SIZE = 4 << 20

# One connection is one request. /ws echoes WebSocket frames as raw bytes after the handshake.
SERVER = r"""
import asyncio, base64, hashlib
async def serve(reader, writer):
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    line, *rest = head.split("\r\n")
    headers = dict(part.lower().split(": ", 1) for part in rest if ": " in part)
    path = line.split(" ")[1]
    if path == "/ws":
        key = [part.split(": ", 1)[1] for part in rest if part.lower().startswith("sec-websocket-key")][0]
        digest = hashlib.sha1((key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()
        accept = base64.b64encode(digest).decode()
        writer.write(("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Accept: " + accept + "\r\n\r\n").encode())
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    elif path == "/big":
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        for _ in range(%d // 65536):
            writer.write(bytes(65536))
            await writer.drain()
    elif path == "/sum":
        digest = hashlib.sha256(await reader.readexactly(int(headers["content-length"]))).hexdigest()
        writer.write(("HTTP/1.1 200 OK\r\nContent-Length: 64\r\n\r\n" + digest).encode())
    elif path == "/wait":
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nbegun")
        await writer.drain()
        await asyncio.sleep(3600)
    else:
        body = headers.get("host", "").encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %%d\r\n\r\n" %% len(body) + body)
    await writer.drain()
    writer.close()
async def main():
    servers = [await asyncio.start_server(serve, "127.0.0.1", 3000), await asyncio.start_server(serve, "::1", 3001)]
    open("/tmp/serving", "w").close()
    await asyncio.gather(*(server.serve_forever() for server in servers))
asyncio.run(main())
""" % SIZE


def ask(method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, {"content-type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=300) as answer:
        text = answer.read()
        return json.loads(text) if text else None


ID = ask("POST", "/v1/sandboxes", {"snapshot_tag": TAG, "timeout_secs": 3600})[0]["id"]
BOX = f"/v1/sandboxes/{ID}"


def by_name(port, path, data=None):
    """A request to the host name of a port."""
    request = urllib.request.Request(URL + path, data, {"Host": f"{port}-{ID}.localhost"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return answer.read()


def exactly(stream, count):
    got = b""
    while len(got) < count:
        part = stream.recv(count - len(got))
        assert part, f"the end after {len(got)} of {count} bytes"
        got += part
    return got


def web_socket(address=ADDRESS):
    """A WebSocket to port 3000, after one message went there and back."""
    stream = socket.create_connection(address, timeout=300)
    key = base64.b64encode(os.urandom(16)).decode()
    stream.sendall(
        f"GET /ws HTTP/1.1\r\nHost: 3000-{ID}.localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
    )
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += exactly(stream, 1)
    assert head.startswith(b"HTTP/1.1 101"), head
    accept = base64.b64encode(hashlib.sha1((key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest())
    assert accept in head, head
    # A masked binary frame of 64 KiB; the server returns it as it is.
    payload, mask = os.urandom(65000), os.urandom(4)
    masked = bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))
    frame = b"\x82\xfe" + len(payload).to_bytes(2, "big") + mask + masked
    stream.sendall(frame)
    assert exactly(stream, len(frame)) == frame
    return stream


def ends(stream):
    """The stream ends, in whatever way, and nothing more comes."""
    try:
        return stream.recv(1) == b""
    except ConnectionError:
        return True


with case("a server on 127.0.0.1 and one on ::1 are listed and reached by host name"):
    ask("POST", BOX + "/processes", {"args": ["python3", "-c", SERVER]})
    wait = "until [ -e /tmp/serving ]; do sleep 0.2; done"
    assert ask("POST", BOX + "/exec", {"args": ["sh", "-c", wait], "timeout_secs": 120})["exit_code"] == 0
    ports = {port["port"]: port for port in ask("GET", BOX + "/ports")}
    assert ports[3000]["address"] == "127.0.0.1" and ports[3001]["address"] == "::1", ports
    assert ports[3000]["access"] == "owner" and f"//3000-{ID}." in ports[3000]["url"], ports
    for port in (3000, 3001):
        assert by_name(port, "/host") == f"{port}-{ID}.localhost".encode()
with case("bodies are streamed both ways"):
    assert by_name(3000, "/big") == bytes(SIZE)
    sent = os.urandom(SIZE)
    assert by_name(3000, "/sum", sent).decode() == hashlib.sha256(sent).hexdigest()
with case("a WebSocket"):
    web_socket().close()
with case("forkd forward leads to a port"):
    forward = subprocess.Popen(
        [FORKD, "forward", ID, "0:3000", "--daemon-url", URL], stdout=subprocess.PIPE, text=True
    )
    local = forward.stdout.readline().split(" ")[0].rsplit(":", 1)
    local = local[0], int(local[1])
    with urllib.request.urlopen(f"http://{local[0]}:{local[1]}/big", timeout=300) as answer:
        assert answer.read() == bytes(SIZE)
with case("no connection outlives a roll-back, and new ones work"):
    ask("POST", BOX + "/checkpoints", {"name": "here"})
    old = [web_socket(), web_socket(local)]
    ask("POST", BOX + "/rollback", {"to": "here"})
    assert all(ends(stream) for stream in old)
    web_socket().close()
    web_socket(local).close()
with case("a stream ends with its sandbox"):
    stream = socket.create_connection(ADDRESS, timeout=300)
    stream.sendall(f"GET /wait HTTP/1.1\r\nHost: 3000-{ID}.localhost\r\n\r\n".encode())
    seen = b""
    while b"begun" not in seen:
        seen += exactly(stream, 1)
    ask("DELETE", BOX)
    # The body has no length: its end must not look like a complete one.
    rest = stream.recv(100)
    assert b"0\r\n\r\n" not in rest, rest
forward.terminate()
forward.wait(30)
finish()
