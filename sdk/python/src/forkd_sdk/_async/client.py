"""The daemon: sandboxes, snapshots, workspaces, events."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, TypeVar

from forkd_sdk._async.http import AsyncHttp
from forkd_sdk._async.sandbox import LONG, AsyncSandboxBase, bind_all
from forkd_sdk._wire import Fields, is_keepalive, rows, without_none
from forkd_sdk.errors import StreamCut
from forkd_sdk.models import Event, Network, SandboxInfo, SandboxStats, SnapshotInfo, Workspace

S = TypeVar("S", bound=AsyncSandboxBase)


class AsyncClient:
    """One daemon.

    Without `url` the client finds the daemon as the command line does: `FORKD_URL`, a running machine, a local socket,
    `http://127.0.0.1:8889`. `timeout` is for one answer in seconds; calls that take longer by nature have their own.
    """

    def __init__(
        self, url: str | None = None, token: str | None = None, *, cacert: str | None = None, timeout: float = 60.0, retries: int = 3
    ) -> None:
        self.http = AsyncHttp(url, token, cacert, timeout, retries)
        self.snapshots = AsyncSnapshots(self.http)
        self.workspaces = AsyncWorkspaces(self.http)

    async def version(self) -> str:
        """The version of the daemon."""
        return Fields(await self.http.json("GET", "/version"), "version").text("version")

    async def spawn(
        self,
        kind: type[S],
        tag: str,
        n: int = 1,
        *,
        ttl: int | None = None,
        labels: dict[str, str] | None = None,
        memory_limit_mib: int | None = None,
        network: Network | None = None,
        idempotency_key: str | None = None,
    ) -> list[S]:
        """Starts children of a snapshot. If some fail, `ForkError` has those that run."""
        body = without_none(
            snapshot_tag=tag, n=n, timeout_secs=ttl, labels=labels, memory_limit_mib=memory_limit_mib, network=network
        )
        key = idempotency_key or os.urandom(16).hex()
        answer = await self.http.json("POST", "/v1/sandboxes", json=body, key=key, timeout=LONG)
        return bind_all(kind, self, answer, None)

    async def sandboxes(
        self, *, tag: str | None = None, state: str | None = None, labels: dict[str, str] | None = None, limit: int | None = None
    ) -> list[SandboxInfo]:
        """The live sandboxes, the oldest first."""
        label = ",".join(f"{name}={value}" for name, value in (labels or {}).items()) or None
        params = {name: str(value) for name, value in without_none(tag=tag, state=state, label=label, limit=limit).items()}
        return rows(await self.http.json("GET", "/v1/sandboxes", params=params), "sandboxes", SandboxInfo.read)

    async def stats(self) -> list[SandboxStats]:
        """The use of the host by every live sandbox."""
        return rows(await self.http.json("GET", "/v1/stats"), "stats", SandboxStats.read)

    async def events(self) -> AsyncGenerator[Event]:
        """Changes from now on. The stream has no end: `StreamCut` is raised when the daemon stops."""
        async with aclosing(self.http.lines("GET", "/v1/events")) as lines:
            async for line in lines:
                if not is_keepalive(line):
                    yield Event.read(line)
        raise StreamCut("the events ended: the daemon stops")

    async def aclose(self) -> None:
        """Closes the connections. A later call opens new ones."""
        await self.http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()


class AsyncSnapshots:
    """The snapshots of a daemon."""

    def __init__(self, http: AsyncHttp) -> None:
        self._http = http

    async def create(
        self,
        tag: str,
        image: str | None = None,
        *,
        warmup: Sequence[str] | None = None,
        warmup_code: str | None = None,
        mem_size_mib: int | None = None,
        vcpus: int | None = None,
        labels: dict[str, str] | None = None,
        wait: bool = True,
    ) -> SnapshotInfo:
        """Boots an image, warms it up, and freezes it under a tag."""
        body = without_none(
            tag=tag,
            image=image,
            warmup=None if warmup is None else list(warmup),
            warmup_code=warmup_code,
            mem_size_mib=mem_size_mib,
            vcpus=vcpus,
            labels=labels,
            wait=None if wait else False,
        )
        return SnapshotInfo.read(await self._http.json("POST", "/v1/snapshots", json=body, timeout=LONG))

    async def list(self) -> list[SnapshotInfo]:
        """Every snapshot."""
        return rows(await self._http.json("GET", "/v1/snapshots"), "snapshots", SnapshotInfo.read)

    async def info(self, tag: str) -> SnapshotInfo:
        """One snapshot; `raw` has all details."""
        return SnapshotInfo.read(await self._http.json("GET", f"/v1/snapshots/{tag}/info"))

    async def compact(self, tag: str, to: str) -> SnapshotInfo:
        """Copies a snapshot into one without ancestors."""
        return SnapshotInfo.read(await self._http.json("POST", f"/v1/snapshots/{tag}/compact", json={"to": to}, timeout=LONG))

    async def delete(self, tag: str, *, cascade: bool = False, force: bool = False) -> None:
        """Deletes a snapshot; with `cascade` also those that are based on it."""
        params = {name: "true" for name, given in (("cascade", cascade), ("force", force)) if given}
        await self._http.call("DELETE", f"/v1/snapshots/{tag}", params=params)


class AsyncWorkspaces:
    """The workspaces of a daemon."""

    def __init__(self, http: AsyncHttp) -> None:
        self._http = http

    async def create(self, name: str, tag: str, *, memory_limit_mib: int | None = None) -> Workspace:
        """Makes a workspace from a snapshot and starts it."""
        body: dict[str, Any] = without_none(name=name, snapshot_tag=tag, memory_limit_mib=memory_limit_mib)
        return Workspace.read(await self._http.json("POST", "/v1/workspaces", json=body, timeout=LONG))

    async def list(self) -> list[Workspace]:
        """Every workspace."""
        return rows(await self._http.json("GET", "/v1/workspaces"), "workspaces", Workspace.read)

    async def get(self, name: str) -> Workspace:
        """One workspace."""
        return Workspace.read(await self._http.json("GET", f"/v1/workspaces/{name}"))

    async def suspend(self, name: str) -> Workspace:
        """Writes the state to disk and frees the memory."""
        return Workspace.read(await self._http.json("POST", f"/v1/workspaces/{name}/suspend", json={}, timeout=LONG))

    async def resume(self, name: str) -> Workspace:
        """Starts a workspace from its state."""
        return Workspace.read(await self._http.json("POST", f"/v1/workspaces/{name}/resume", timeout=LONG))

    async def delete(self, name: str) -> None:
        """Ends a workspace and deletes its state."""
        await self._http.call("DELETE", f"/v1/workspaces/{name}")
