# Generated from `_async` by tools/generate_sync.py. Do not edit.
"""A running sandbox: its rooms, and the operations that make other sandboxes from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from forkd_sdk import _sio as io
from forkd_sdk._sync.commands import Commands
from forkd_sdk._sync.files import Files
from forkd_sdk._sync.interpreter import Interpreter
from forkd_sdk._sync.ports import Ports
from forkd_sdk._sync.session import Pty
from forkd_sdk._tree import Node
from forkd_sdk._wire import rows, without_none
from forkd_sdk.errors import ApiError, ExploreError, ForkError, SandboxGone, SandboxNotFound, api_error
from forkd_sdk.models import (
    BranchMode,
    Checkpoint,
    CommandResult,
    Evaluation,
    Exploration,
    Network,
    Outcome,
    Ping,
    Rollback,
    SandboxInfo,
    SnapshotInfo,
)

if TYPE_CHECKING:
    from forkd_sdk._sync.client import Client

O = TypeVar("O")
R = TypeVar("R")
# Starting children takes as long as the slowest; a cut takes as long as its memory needs.
LONG = 600.0


class SandboxBase:
    """One sandbox. As a context manager it deletes the sandbox at the end."""

    id: str
    client: Client
    commands: Commands
    files: Files
    interpreter: Interpreter
    ports: Ports
    pty: Pty
    node: Node
    _info: SandboxInfo
    _owns_client: bool

    @classmethod
    def bind(cls, client: Client, info: SandboxInfo, parent: Node | None = None, *, owns_client: bool = False) -> Self:
        """A handle for a sandbox that exists."""
        self = object.__new__(cls)
        self._attach(client, info, parent, owns_client)
        return self

    def _attach(self, client: Client, info: SandboxInfo, parent: Node | None, owns_client: bool) -> None:
        self.id = info.id
        self.client = client
        self._info = info
        self._owns_client = owns_client
        self._base = f"/v1/sandboxes/{info.id}"
        self.commands = Commands(client.http, self._base)
        self.files = Files(client.http, self._base)
        self.interpreter = Interpreter(client.http, self._base)
        self.ports = Ports(client.http, self._base)
        self.pty = Pty(client.http, self._base)
        self.node = (parent or Node("snapshot", info.snapshot_tag)).add("sandbox", info.id)

    @property
    def tag(self) -> str:
        """The snapshot that the sandbox was started from."""
        return self._info.snapshot_tag

    @property
    def tree(self) -> Node:
        """Everything that this client made from the same snapshot."""
        return self.node.root

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self.tag}{', deleted' if self.node.gone else ''}>"

    def _repr_svg_(self) -> str:
        return self.tree._repr_svg_()

    def _repr_html_(self) -> str:
        return self.tree._repr_html_()

    # ---- the record

    def info(self) -> SandboxInfo:
        """The daemon's record."""
        self._info = SandboxInfo.read(self.client.http.json("GET", self._base))
        return self._info

    def set_ttl(self, seconds: int | None) -> SandboxInfo:
        """Deletes the sandbox after this time from now."""
        return self._patch({"timeout_secs": seconds})

    def set_labels(self, labels: dict[str, str]) -> SandboxInfo:
        """Replaces the labels."""
        return self._patch({"labels": labels})

    def set_network(self, network: Network) -> SandboxInfo:
        """Replaces the network policy. Connections that the new one does not allow are reset before this returns."""
        return self._patch({"network": network})

    def _patch(self, body: dict[str, Any]) -> SandboxInfo:
        self._info = SandboxInfo.read(self.client.http.json("PATCH", self._base, json=body))
        return self._info

    def logs(self, tail: int | None = None) -> str:
        """The console of the guest."""
        params = {} if tail is None else {"tail": str(tail)}
        return (self.client.http.call("GET", f"{self._base}/logs", params=params)).text

    def ping(self) -> Ping:
        """Asks the agent in the guest."""
        return Ping.read(self.client.http.json("POST", f"{self._base}/ping"))

    def pause(self) -> SandboxInfo:
        """Stops the vCPUs."""
        return SandboxInfo.read(self.client.http.json("POST", f"{self._base}/pause"))

    def resume(self) -> SandboxInfo:
        """Lets a paused sandbox go on."""
        return SandboxInfo.read(self.client.http.json("POST", f"{self._base}/resume"))

    def kill(self) -> None:
        """Deletes the sandbox. A sandbox that is gone already is no error."""
        try:
            self.client.http.call("DELETE", self._base)
        except (SandboxNotFound, SandboxGone):
            pass
        self.node.gone = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.kill()
        finally:
            if self._owns_client:
                self.client.close()

    # ---- short forms

    def exec(self, command: str | Sequence[str], timeout: float = 60, **options: Any) -> CommandResult:
        """Short for `commands.run`."""
        return self.commands.run(command, timeout, **options)

    def eval(self, code: str, timeout: float | None = None) -> Any:
        """Short for `interpreter.eval`."""
        return self.interpreter.eval(code, timeout)

    def run_code(self, code: str, timeout: float | None = None) -> Evaluation:
        """Short for `interpreter.run`."""
        return self.interpreter.run(code, timeout)

    # ---- other sandboxes from this one

    def fork(
        self,
        n: int = 1,
        *,
        ttl: int | None = None,
        labels: dict[str, str] | None = None,
        freeze: bool = False,
        network: Network | None = None,
        idempotency_key: str | None = None,
    ) -> list[Self]:
        """Starts `n` children with the state of this moment. This sandbox goes on.

        If some children fail, `ForkError` has those that run.
        """
        body = without_none(n=n, timeout_secs=ttl, labels=labels, freeze=freeze or None, network=network)
        key = idempotency_key or os.urandom(16).hex()
        answer = self.client.http.json("POST", f"{self._base}/fork", json=body, key=key, timeout=LONG)
        return bind_all(type(self), self.client, answer, self.node)

    def branch(
        self,
        tag: str | None = None,
        *,
        mode: BranchMode | None = None,
        wait: bool = True,
        freeze: bool = False,
        idempotency_key: str | None = None,
    ) -> SnapshotInfo:
        """Freezes this moment under a tag. This sandbox goes on."""
        body = without_none(tag=tag, mode=mode, wait=None if wait else False, freeze=freeze or None)
        key = idempotency_key or os.urandom(16).hex()
        answer = self.client.http.json("POST", f"{self._base}/branch", json=body, key=key, timeout=LONG)
        snapshot = SnapshotInfo.read(answer)
        self.node.add("snapshot", snapshot.tag)
        return snapshot

    def checkpoint(self, name: str | None = None) -> Checkpoint:
        """Keeps this moment inside the sandbox, to return to it."""
        answer = self.client.http.json("POST", f"{self._base}/checkpoints", json=without_none(name=name), timeout=LONG)
        checkpoint = Checkpoint.read(answer)
        self.node.add("checkpoint", checkpoint.name)
        return checkpoint

    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints, the oldest first."""
        return rows(self.client.http.json("GET", f"{self._base}/checkpoints"), "checkpoints", Checkpoint.read)

    def delete_checkpoint(self, name: str) -> None:
        """Deletes a checkpoint."""
        self.client.http.call("DELETE", f"{self._base}/checkpoints/{name}")
        for node in self.node.children:
            if node.kind == "checkpoint" and node.name == name:
                node.gone = True

    def rollback(self, to: str | Checkpoint | None = None) -> Rollback:
        """Returns to a checkpoint, the newest if none is named. The sandbox keeps its ID."""
        name = to.name if isinstance(to, Checkpoint) else to
        answer = self.client.http.json("POST", f"{self._base}/rollback", json=without_none(to=name), timeout=LONG)
        return Rollback.read(answer)

    def attempt(self) -> Attempt:
        """A block that is undone if it raises: memory, processes and files return to their state before the block."""
        return Attempt(self)

    def explore(
        self,
        options: Sequence[O],
        run: Callable[[Self, O], R],
        score: Callable[[R], float],
        *,
        adopt: bool = False,
    ) -> Exploration[Self, O, R]:
        """Forks one child per option, runs all at the same time, and keeps the child whose result scores highest.

        A run that raises has no score, and its child is deleted. With `adopt` this sandbox is deleted too: the kept child
        takes its place.
        """
        children = self.fork(len(options))
        done = io.gather([partial(run, child, option) for child, option in zip(children, options)])
        outcomes: list[Outcome[O, R]] = []
        for option, result in zip(options, done):
            if isinstance(result, BaseException):
                outcomes.append(Outcome(option, None, None, result))
            else:
                outcomes.append(Outcome(option, result, float(score(result)), None))
        scores = [outcome.score for outcome in outcomes if outcome.score is not None]
        best = next((index for index, outcome in enumerate(outcomes) if scores and outcome.score == max(scores)), None)
        losers = [child for index, child in enumerate(children) if index != best]
        io.gather([child.kill for child in losers])
        if best is None:
            raise ExploreError([outcome.error for outcome in outcomes if outcome.error is not None])
        if adopt:
            self.kill()
        winner: Any = outcomes[best]
        return Exploration(children[best], winner.option, winner.result, winner.score, tuple(outcomes))


class Attempt:
    """See `attempt`. `rollback` undoes the block now; `keep` makes an exception leave the changes in place."""

    def __init__(self, sandbox: SandboxBase) -> None:
        self._sandbox = sandbox
        self._checkpoint: Checkpoint | None = None
        self._keep = False

    def __enter__(self) -> Self:
        self._checkpoint = self._sandbox.checkpoint()
        return self

    def rollback(self) -> Rollback:
        """Returns to the state before the block. The block goes on from there."""
        return self._sandbox.rollback(self._checkpoint)

    def keep(self) -> None:
        """Keeps the changes even if the block raises."""
        self._keep = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        checkpoint = self._checkpoint
        if checkpoint is None:
            return
        if error is not None and not self._keep:
            self.rollback()
        # An unchanged checkpoint is another name of an earlier one, which stays.
        if not checkpoint.unchanged:
            self._sandbox.delete_checkpoint(checkpoint.name)


AnySandbox = TypeVar("AnySandbox", bound=SandboxBase)


def bind_all(kind: type[AnySandbox], client: Client, answer: object, parent: Node | None) -> list[AnySandbox]:
    """The children of an answer. If one failed, `ForkError` has the others."""
    children: list[AnySandbox] = []
    errors: list[ApiError] = []
    for info in rows(answer, "sandboxes", SandboxInfo.read):
        if info.error is not None or info.state == "failed":
            errors.append(info.error or api_error(500, {"error": f"{info.id} failed", "code": "launch_failed"}, "sandbox"))
            continue
        if parent is None:
            parent = Node("snapshot", info.snapshot_tag)
        children.append(kind.bind(client, info, parent))
    if errors:
        raise ForkError(children, errors)
    return children
