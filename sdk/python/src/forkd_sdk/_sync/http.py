# Generated from `_async` by tools/generate_sync.py. Do not edit.
"""Requests to the daemon: address, token, retries, streams.

`AsyncHttp` makes its connections when the first request needs them, and again in a forked process or after `aclose`.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from forkd_sdk import _sio as io
from forkd_sdk import _address, _retry
from forkd_sdk._wire import parse_line
from forkd_sdk.errors import ConnectionFailed, ProtocolError, RequestTimeout, SandboxUnreachable, StreamCut, api_error

if TYPE_CHECKING:
    import ssl

    from httpx2 import Timeout

# The daemon sends a keepalive after every 15 s of silence: a stream that is silent for longer is dead.
SILENCE = 45.0
_CONNECT = 10.0


class Http:
    """One daemon, with the credentials for it."""

    def __init__(self, url: str | None, token: str | None, cacert: str | None, timeout: float, retries: int) -> None:
        self.address = _address.find(url)
        self.timeout = timeout
        self.retries = retries
        secret = _address.variable("FORKD_TOKEN") if token is None else token
        self.headers = {"user-agent": "forkd-sdk/0.1.0"}
        if secret:
            self.headers["authorization"] = f"Bearer {secret}"
        trusted = cacert or _address.variable("FORKD_CACERT")
        self._tls: ssl.SSLContext | None = None
        if trusted and self.address.base.startswith("https"):
            import ssl

            self._tls = ssl.create_default_context()
            self._tls.load_verify_locations(trusted)
        self._client: io.HttpClient | None = None
        self._pid = 0

    def _live(self) -> io.HttpClient:
        # A forked process must not use the connections of its parent.
        if self._client is None or self._pid != os.getpid():
            self._client = io.http_client(self.address, self.headers, self._tls)
            self._pid = os.getpid()
        return self._client

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None and self._pid == os.getpid():
            io.close(client)

    def _limits(self, read: float | None) -> Timeout:
        import httpx2

        return httpx2.Timeout(read, connect=_CONNECT, pool=None)

    def call(
        self,
        method: str,
        path: str,
        *,
        json: object = None,
        content: Any = None,
        params: dict[str, str] | None = None,
        key: str | None = None,
        timeout: float | None = None,
    ) -> io.Response:
        """The answer to a request, after retries. A refusal is raised as its `ApiError`.

        `key` is the idempotency key, the same for every repetition. A stream as `content` can be sent once only.
        """
        import httpx2

        headers = {"idempotency-key": key} if key else {}
        if content is not None:
            headers["content-type"] = "application/octet-stream"
        replayable = content is None or isinstance(content, bytes)
        harmless = replayable and (method in ("GET", "PUT", "DELETE") or key is not None)
        limits = self._limits(self.timeout if timeout is None else timeout)
        attempt = 0
        while True:
            last = attempt >= self.retries
            try:
                response: io.Response = self._live().request(
                    method, path, json=json, content=content, params=params, headers=headers, timeout=limits
                )
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                if last or not replayable:
                    raise ConnectionFailed(f"cannot reach the daemon at {self._name()}: {error}") from error
                wished = None
            except httpx2.TimeoutException as error:
                raise RequestTimeout(f"{method} {path}: no answer within {limits.read:g} s") from error
            except httpx2.TransportError as error:
                if last or not harmless:
                    raise ConnectionFailed(f"{method} {path}: {error or type(error).__name__}") from error
                wished = None
            else:
                if response.is_success:
                    return response
                body = _body(response)
                if last or not replayable or not _retry.is_transient(response.status_code, body, harmless):
                    raise api_error(response.status_code, body, str(response.url))
                wished = response.headers.get("retry-after")
            io.sleep(_retry.delay(attempt, wished))
            attempt += 1

    def json(self, method: str, path: str, **options: Any) -> Any:
        """The JSON of the answer; None if the answer is empty."""
        response = self.call(method, path, **options)
        if not response.content:
            return None
        try:
            return response.json()
        except ValueError as error:
            raise ProtocolError(f"{method} {path}: the answer is not JSON") from error

    @contextmanager
    def open(
        self, method: str, path: str, *, json: object = None, params: dict[str, str] | None = None, silence: float | None = None
    ) -> Generator[io.Response]:
        """A response whose body is read as it comes. `silence` is the longest time without a byte.

        Leaving the block closes the connection. The daemon then kills a foreground command.
        """
        import httpx2

        attempt = 0
        while True:
            try:
                with self._live().stream(method, path, json=json, params=params, timeout=self._limits(silence)) as response:
                    if not response.is_success:
                        response.read()
                        body = _body(response)
                        if attempt >= self.retries or not _retry.is_transient(response.status_code, body, method == "GET"):
                            raise api_error(response.status_code, body, str(response.url))
                        wished = response.headers.get("retry-after")
                    else:
                        yield response
                        return
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                if attempt >= self.retries:
                    raise ConnectionFailed(f"cannot reach the daemon at {self._name()}: {error}") from error
                wished = None
            except httpx2.TimeoutException as error:
                raise SandboxUnreachable(f"{method} {path}: no byte for {silence} s") from error
            except httpx2.TransportError as error:
                raise StreamCut(f"{method} {path}: {error or type(error).__name__}") from error
            io.sleep(_retry.delay(attempt, wished))
            attempt += 1

    def lines(
        self, method: str, path: str, *, json: object = None, params: dict[str, str] | None = None, silence: float | None = SILENCE
    ) -> Generator[object]:
        """The lines of an NDJSON stream."""
        with self.open(method, path, json=json, params=params, silence=silence) as response:
            for line in io.lines(response):
                if line:
                    yield parse_line(line, path)

    def socket(self, path: str) -> io.Socket:
        """A WebSocket. A refusal is raised as its `ApiError`."""
        from websockets.exceptions import InvalidStatus, WebSocketException

        try:
            return io.connect(self.address, path, self.headers, self._tls)
        except InvalidStatus as error:
            raise api_error(error.response.status_code, parse_line(bytes(error.response.body or b"null"), path), path) from error
        except (OSError, WebSocketException) as error:
            raise ConnectionFailed(f"{path}: {error}") from error

    def _name(self) -> str:
        return f"unix://{self.address.socket}" if self.address.socket else self.address.base


def _body(response: io.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text
