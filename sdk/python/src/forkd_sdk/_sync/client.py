# Generated from `_async` by tools/generate_sync.py. Do not edit.
"""The daemon: sandboxes, snapshots, workspaces, events."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, Self, TypeVar

from forkd_sdk._sync.http import Http
from forkd_sdk._sync.sandbox import LONG, SandboxBase, bind_all
from forkd_sdk._wire import Fields, is_keepalive, rows, without_none
from forkd_sdk.errors import StreamCut
from forkd_sdk.models import Event, Network, SandboxInfo, SandboxStats, SnapshotInfo, Workspace

S = TypeVar("S", bound=SandboxBase)


class Client:
    """One daemon.

    Without `url` the client finds the daemon as the command line does: `FORKD_URL`, a running machine, a local socket,
    `http://127.0.0.1:8889`. `timeout` is for one answer in seconds; calls that take longer by nature have their own.
    """

    def __init__(
        self, url: str | None = None, token: str | None = None, *, cacert: str | None = None, timeout: float = 60.0, retries: int = 3
    ) -> None:
        self.http = Http(url, token, cacert, timeout, retries)
        self.snapshots = Snapshots(self.http)
        self.workspaces = Workspaces(self.http)

    def version(self) -> str:
        """The version of the daemon."""
        return Fields(self.http.json("GET", "/version"), "version").text("version")

    def spawn(
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
        answer = self.http.json("POST", "/v1/sandboxes", json=body, key=key, timeout=LONG)
        return bind_all(kind, self, answer, None)

    def sandboxes(
        self, *, tag: str | None = None, state: str | None = None, labels: dict[str, str] | None = None, limit: int | None = None
    ) -> list[SandboxInfo]:
        """The live sandboxes, the oldest first."""
        label = ",".join(f"{name}={value}" for name, value in (labels or {}).items()) or None
        params = {name: str(value) for name, value in without_none(tag=tag, state=state, label=label, limit=limit).items()}
        return rows(self.http.json("GET", "/v1/sandboxes", params=params), "sandboxes", SandboxInfo.read)

    def stats(self) -> list[SandboxStats]:
        """The use of the host by every live sandbox."""
        return rows(self.http.json("GET", "/v1/stats"), "stats", SandboxStats.read)

    def events(self) -> Generator[Event]:
        """Changes from now on. The stream has no end: `StreamCut` is raised when the daemon stops."""
        with closing(self.http.lines("GET", "/v1/events")) as lines:
            for line in lines:
                if not is_keepalive(line):
                    yield Event.read(line)
        raise StreamCut("the events ended: the daemon stops")

    def close(self) -> None:
        """Closes the connections. A later call opens new ones."""
        self.http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Snapshots:
    """The snapshots of a daemon."""

    def __init__(self, http: Http) -> None:
        self._http = http

    def create(
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
        return SnapshotInfo.read(self._http.json("POST", "/v1/snapshots", json=body, timeout=LONG))

    def list(self) -> list[SnapshotInfo]:
        """Every snapshot."""
        return rows(self._http.json("GET", "/v1/snapshots"), "snapshots", SnapshotInfo.read)

    def info(self, tag: str) -> SnapshotInfo:
        """One snapshot; `raw` has all details."""
        return SnapshotInfo.read(self._http.json("GET", f"/v1/snapshots/{tag}/info"))

    def compact(self, tag: str, to: str) -> SnapshotInfo:
        """Copies a snapshot into one without ancestors."""
        return SnapshotInfo.read(self._http.json("POST", f"/v1/snapshots/{tag}/compact", json={"to": to}, timeout=LONG))

    def delete(self, tag: str, *, cascade: bool = False, force: bool = False) -> None:
        """Deletes a snapshot; with `cascade` also those that are based on it."""
        params = {name: "true" for name, given in (("cascade", cascade), ("force", force)) if given}
        self._http.call("DELETE", f"/v1/snapshots/{tag}", params=params)


class Workspaces:
    """The workspaces of a daemon."""

    def __init__(self, http: Http) -> None:
        self._http = http

    def create(self, name: str, tag: str, *, memory_limit_mib: int | None = None) -> Workspace:
        """Makes a workspace from a snapshot and starts it."""
        body: dict[str, Any] = without_none(name=name, snapshot_tag=tag, memory_limit_mib=memory_limit_mib)
        return Workspace.read(self._http.json("POST", "/v1/workspaces", json=body, timeout=LONG))

    def list(self) -> list[Workspace]:
        """Every workspace."""
        return rows(self._http.json("GET", "/v1/workspaces"), "workspaces", Workspace.read)

    def get(self, name: str) -> Workspace:
        """One workspace."""
        return Workspace.read(self._http.json("GET", f"/v1/workspaces/{name}"))

    def suspend(self, name: str) -> Workspace:
        """Writes the state to disk and frees the memory."""
        return Workspace.read(self._http.json("POST", f"/v1/workspaces/{name}/suspend", json={}, timeout=LONG))

    def resume(self, name: str) -> Workspace:
        """Starts a workspace from its state."""
        return Workspace.read(self._http.json("POST", f"/v1/workspaces/{name}/resume", timeout=LONG))

    def delete(self, name: str) -> None:
        """Ends a workspace and deletes its state."""
        self._http.call("DELETE", f"/v1/workspaces/{name}")
