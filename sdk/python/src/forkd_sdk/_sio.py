"""Operations of the blocking client that have another form in the asynchronous one (`_aio`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    import ssl

    import httpx2
    from websockets.sync.client import ClientConnection

    from forkd_sdk._address import Address

    HttpClient: TypeAlias = httpx2.Client
    Response: TypeAlias = httpx2.Response
    Socket: TypeAlias = ClientConnection

T = TypeVar("T")
Job = Callable[[], T]
# More runs at the same time than this wait for a thread.
_THREADS = 64


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def gather(jobs: Iterable[Callable[[], T]]) -> list[T | BaseException]:
    """Runs the jobs at the same time and waits for all. A job that fails has its exception in the list."""
    from concurrent.futures import ThreadPoolExecutor

    def caught(job: Callable[[], T]) -> T | BaseException:
        try:
            return job()
        except Exception as error:
            return error

    work = list(jobs)
    if not work:
        return []
    with ThreadPoolExecutor(min(len(work), _THREADS)) as pool:
        return list(pool.map(caught, work))


def http_client(address: Address, headers: dict[str, str], tls: ssl.SSLContext | None) -> HttpClient:
    import httpx2

    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=32)
    transport = None
    if address.socket is not None:
        transport = httpx2.HTTPTransport(uds=address.socket, limits=limits)
    return httpx2.Client(
        base_url=address.base, headers=headers, verify=tls or True, transport=transport, trust_env=not address.loopback, limits=limits
    )


def close(client: HttpClient) -> None:
    client.close()


def connect(address: Address, path: str, headers: dict[str, str], tls: ssl.SSLContext | None) -> Socket:
    from websockets.sync.client import connect, unix_connect

    options: dict[str, Any] = {"additional_headers": headers, "max_size": 16 << 20, "compression": None, "open_timeout": 30}
    if address.socket is not None:
        return _socket(unix_connect(address.socket, "ws://forkd" + path, **options))
    if address.loopback:
        options["proxy"] = None
    if address.base.startswith("https"):
        import ssl

        options["ssl"] = tls or ssl.create_default_context()
    return _socket(connect("ws" + address.base.removeprefix("http") + path, **options))


def _socket(value: Any) -> Socket:
    from websockets.sync.client import ClientConnection

    # The other type that `connect` can return reconnects by itself, which nothing here asks for.
    if not isinstance(value, ClientConnection):
        raise TypeError(f"unexpected connection {type(value).__name__}")
    return value


def lines(response: Response) -> Iterator[str]:
    return response.iter_lines()
