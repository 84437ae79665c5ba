"""Operations of the asynchronous client that have another form in the blocking one (`_sio`).

Slow imports (asyncio, ssl, httpx2, websockets) happen at the first use: `import forkd_sdk` stays fast.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    import ssl

    import httpx2
    from websockets.asyncio.client import ClientConnection

    from forkd_sdk._address import Address

    HttpClient: TypeAlias = httpx2.AsyncClient
    Response: TypeAlias = httpx2.Response
    Socket: TypeAlias = ClientConnection

T = TypeVar("T")
Job = Callable[[], Awaitable[T]]


async def sleep(seconds: float) -> None:
    import asyncio

    await asyncio.sleep(seconds)


async def gather(jobs: Iterable[Callable[[], Awaitable[T]]]) -> list[T | BaseException]:
    """Runs the jobs at the same time and waits for all. A job that fails has its exception in the list."""
    import asyncio

    return await asyncio.gather(*(job() for job in jobs), return_exceptions=True)


def http_client(address: Address, headers: dict[str, str], tls: ssl.SSLContext | None) -> HttpClient:
    import httpx2

    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=32)
    transport = None
    if address.socket is not None:
        transport = httpx2.AsyncHTTPTransport(uds=address.socket, limits=limits)
    return httpx2.AsyncClient(
        base_url=address.base, headers=headers, verify=tls or True, transport=transport, trust_env=not address.loopback, limits=limits
    )


async def close(client: HttpClient) -> None:
    await client.aclose()


async def connect(address: Address, path: str, headers: dict[str, str], tls: ssl.SSLContext | None) -> Socket:
    from websockets.asyncio.client import connect, unix_connect

    options: dict[str, Any] = {"additional_headers": headers, "max_size": 16 << 20, "compression": None, "open_timeout": 30}
    if address.socket is not None:
        return await unix_connect(address.socket, "ws://forkd" + path, **options)
    if address.loopback:
        options["proxy"] = None
    if address.base.startswith("https"):
        import ssl

        options["ssl"] = tls or ssl.create_default_context()
    return await connect("ws" + address.base.removeprefix("http") + path, **options)


def lines(response: Response) -> AsyncIterator[str]:
    return response.aiter_lines()
