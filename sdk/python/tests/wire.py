"""A server on loopback that answers each request with the next scripted bytes, to put faults on the wire."""

import json
import socket
import threading


def answer(status, body=None, **headers):
    """A whole HTTP answer with a JSON body."""
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(data)}", "content-type: application/json", "connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def stream(*frames, end=True):
    """A chunked NDJSON answer. Without `end` the connection breaks after the last frame."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    for frame in frames:
        data = frame if isinstance(frame, bytes) else json.dumps(frame).encode() + b"\n"
        head += f"{len(data):x}\r\n".encode() + data + b"\r\n"
    return head + (b"0\r\n\r\n" if end else b"")


SILENCE = object()


class Script:
    """Serves the answers in order. An empty answer closes the connection. `requests` are (line, headers, body)."""

    def __init__(self, *answers, path=None):
        self.answers = list(answers)
        self.requests = []
        self.held = []
        self.listener = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
        self.listener.bind(path or ("127.0.0.1", 0))
        self.listener.listen()
        self.url = f"unix://{path}" if path else "http://127.0.0.1:%d" % self.listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.requests.append(self._read(connection.makefile("rb")))
            reply = self.answers.pop(0) if self.answers else b""
            if reply is SILENCE:
                # The client sees the head of a stream, then nothing.
                connection.sendall(stream(end=False))
                self.held.append(connection)
                continue
            connection.sendall(reply)
            connection.close()

    @staticmethod
    def _read(file):
        line = file.readline().decode().strip()
        headers = {}
        while text := file.readline().decode().strip():
            name, _, value = text.partition(":")
            headers[name.lower()] = value.strip()
        return line, headers, file.read(int(headers.get("content-length", 0)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.close()
        for connection in self.held:
            connection.close()


def sandbox(name="sb1", **fields):
    """A record as the daemon sends it."""
    return {"id": name, "snapshot_tag": "py", "created_at_unix": 1, "state": "running", **fields}
