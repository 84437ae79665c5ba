# Generated from `_async` by tools/generate_sync.py. Do not edit.
"""The room `ports` of a sandbox. The daemon leads to ports of a guest, so the guest needs no network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkd_sdk._wire import rows, without_none
from forkd_sdk.models import PortAccess, PortInfo

if TYPE_CHECKING:
    from forkd_sdk._sync.http import Http


class Ports:
    """Ports on which programs of the guest listen."""

    def __init__(self, http: Http, base: str) -> None:
        self._http = http
        self._base = f"{base}/ports"

    def list(self) -> list[PortInfo]:
        """The ports on which programs listen, and those with settings."""
        return rows(self._http.json("GET", self._base), "ports", PortInfo.read)

    def get(self, port: int) -> PortInfo:
        """One port, whether a program listens on it or not."""
        return PortInfo.read(self._http.json("GET", f"{self._base}/{port}"))

    def set(self, port: int, *, access: PortAccess = "owner", host: str | None = None) -> PortInfo:
        """Sets who may use a port. `host` also publishes it on the daemon's host, such as `127.0.0.1:0`."""
        return PortInfo.read(self._http.json("PUT", f"{self._base}/{port}", json=without_none(access=access, host=host)))

    def url(self, port: int) -> str:
        """The address of a port on the daemon, for the owner."""
        return self._http.address.base + (self.get(port)).path
