"""A registry for one image, read-only, on loopback.

    registry.py FOLDER PORT [USER:PASSWORD]

Serves FOLDER/manifests/TAG and every file of FOLDER/blobs by its name, with range requests. With USER:PASSWORD it asks
for them. It runs until it is killed.
"""

import base64
import http.server
import pathlib
import sys

FOLDER, PORT = pathlib.Path(sys.argv[1]), int(sys.argv[2])
LOGIN = "Basic " + base64.b64encode(sys.argv[3].encode()).decode() if len(sys.argv) > 3 else None
KINDS = {"manifests": "application/vnd.oci.image.manifest.v1+json", "blobs": "application/octet-stream"}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if LOGIN and self.headers.get("authorization") != LOGIN:
            return self.answer(401, b"", ("www-authenticate", 'Basic realm="test"'))
        kind, name = self.path.split("/")[-2:]
        path = FOLDER / kind / name
        if kind not in KINDS or not path.is_file():
            return self.answer(404, b"")
        content, begin = path.read_bytes(), 0
        asked = self.headers.get("range", "")
        if asked.startswith("bytes=") and asked.endswith("-"):
            begin = int(asked[6:-1])
        span = ("content-range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        extra = [span] if begin else []
        self.answer(206 if begin else 200, content[begin:], ("content-type", KINDS[kind]), *extra)

    def answer(self, status, body, *headers):
        self.send_response(status)
        for name, value in [("content-length", str(len(body))), *headers]:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
