"""OpenAI Agents SDK: a sandbox client whose sessions are machines of forkd.

    client = ForkdSandboxClient()
    run_config = RunConfig(sandbox=SandboxRunConfig(client=client, options=ForkdSandboxClientOptions(tag="py")))
    await Runner.run(SandboxAgent(name="coder", ...), "...", run_config=run_config)

A session that stops with a snapshot freezes the whole machine under a tag: memory, processes and files. A session that is
resumed from that snapshot starts as a copy-on-write child of it. `fork_session` copies a session that runs, for example
for a handoff; `checkpoint` and `rollback` undo the work of an agent.
"""

from __future__ import annotations

import io
import json
import shlex
import uuid
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from agents.sandbox.entries import Mount
from agents.sandbox.errors import (
    ExecTimeoutError,
    ExecTransportError,
    ExposedPortUnavailableError,
    WorkspaceArchiveReadError,
    WorkspaceArchiveWriteError,
    WorkspaceReadNotFoundError,
    WorkspaceWriteTypeError,
)
from agents.sandbox.manifest import Manifest
from agents.sandbox.session import SandboxSession, SandboxSessionState
from agents.sandbox.session.base_sandbox_session import BaseSandboxSession
from agents.sandbox.session.runtime_helpers import RESOLVE_WORKSPACE_PATH_HELPER, RuntimeHelperScript
from agents.sandbox.session.sandbox_client import BaseSandboxClient, BaseSandboxClientOptions
from agents.sandbox.snapshot import NoopSnapshot, SnapshotBase, SnapshotSpec, resolve_snapshot
from agents.sandbox.types import ExecResult, ExposedPortEndpoint, User
from agents.sandbox.util.tar_utils import UnsafeTarMemberError, validate_tar_bytes

from forkd_sdk import (
    AsyncSandbox,
    Checkpoint,
    CommandTimeout,
    FileMissing,
    ForkdError,
    Rollback,
    SandboxGone,
    SandboxNotFound,
)
from forkd_sdk.integrations._session import client as loop_client

_LONG = 24 * 3600
_FAST = 60
# A saved workspace that begins with this line is the name of a snapshot. Others are tar archives.
_MAGIC = b"forkd-snapshot-1\n"
# `BaseSandboxSession.exec` puts this before the command of another user.
_SUDO = ("sudo", "-u")


class ForkdSandboxClientOptions(BaseSandboxClientOptions):
    """How sandboxes are made."""

    type: Literal["forkd"] = "forkd"
    tag: str
    """Snapshot to start from."""
    ttl: int | None = 3600
    """Seconds after which the daemon deletes a sandbox."""
    env: dict[str, str] | None = None
    """Environment of every command; that of the manifest wins."""
    network: str | None = None
    """Network mode, such as `public`."""
    exposed_ports: tuple[int, ...] = ()
    """Ports that `resolve_exposed_port` may name."""
    persistence: Literal["snapshot", "tar"] = "snapshot"
    """Form of a saved workspace: the whole machine under a tag, or an archive of the workspace."""


class ForkdSandboxSessionState(SandboxSessionState):
    """The part of a session that outlives a process."""

    type: Literal["forkd"] = "forkd"
    sandbox_id: str
    options: ForkdSandboxClientOptions


async def _create(tag: str, options: ForkdSandboxClientOptions) -> AsyncSandbox:
    network: Any = options.network
    return await AsyncSandbox.create(tag, ttl=options.ttl, network=network, client=loop_client())


class ForkdSandboxSession(BaseSandboxSession):
    """One sandbox as a session."""

    state: ForkdSandboxSessionState

    def __init__(self, state: ForkdSandboxSessionState, sandbox: AsyncSandbox) -> None:
        self.state = state
        self.sandbox = sandbox
        self._root_ready = state.workspace_root_ready

    # ---- start and end

    def _runtime_helpers(self) -> tuple[RuntimeHelperScript, ...]:
        return (RESOLVE_WORKSPACE_PATH_HELPER,)

    def _current_runtime_helper_cache_key(self) -> object | None:
        return self.state.sandbox_id

    async def _validate_path_access(self, path: Path | str, *, for_write: bool = False) -> Path:
        return await self._validate_remote_path_access(path, for_write=for_write)

    async def _prepare_backend_workspace(self) -> None:
        await self.sandbox.commands.run(["mkdir", "-p", "--", self._root()], _FAST, check=True)
        self._root_ready = True

    async def _after_start(self) -> None:
        # A restored machine is another sandbox than the one that the helpers were installed in.
        if self._runtime_helper_cache_key != self._current_runtime_helper_cache_key():
            await self._ensure_runtime_helpers()

    async def _shutdown_backend(self) -> None:
        await self.sandbox.kill()

    async def running(self) -> bool:
        """Whether the agent in the guest answers."""
        if not self._root_ready:
            return False
        try:
            return (await self.sandbox.ping()).pong
        except ForkdError:
            return False

    def _root(self) -> str:
        return self._workspace_root_path().as_posix()

    # ---- commands

    async def _environment(self) -> dict[str, str]:
        return {**(self.state.options.env or {}), **await self.state.manifest.environment.resolve()}

    async def _exec_internal(self, *command: str | Path, timeout: float | None = None) -> ExecResult:
        args = [str(part) for part in command]
        user = None
        if len(args) > 4 and tuple(args[:2]) == _SUDO and args[3] == "--":
            # The agent starts commands as any user, so the guest needs no sudo.
            user, args = args[2], args[4:]
        cwd = self._root() if self._root_ready else None
        try:
            ran = await self.sandbox.commands.run(
                args, timeout if timeout and timeout > 0 else _LONG, cwd=cwd, env=await self._environment(), user=user
            )
        except CommandTimeout as error:
            raise ExecTimeoutError(command=command, timeout_s=timeout, cause=error) from error
        except ForkdError as error:
            raise ExecTransportError(command=command, context={"backend": "forkd"}, cause=error) from error
        # A signal as a shell reports it.
        code = ran.exit_code if ran.exit_code >= 0 else 128 - ran.exit_code
        return ExecResult(stdout=ran.stdout.encode(), stderr=ran.stderr.encode(), exit_code=code)

    async def _resolve_exposed_port(self, port: int) -> ExposedPortEndpoint:
        try:
            url = urlsplit((await self.sandbox.ports.set(port, access="public")).url or "")
        except ForkdError as error:
            raise ExposedPortUnavailableError(
                port=port, exposed_ports=self.state.exposed_ports, reason="backend_unavailable", cause=error
            ) from error
        tls = url.scheme == "https"
        return ExposedPortEndpoint(host=url.hostname or "", port=url.port or (443 if tls else 80), tls=tls)

    # ---- files

    async def read(self, path: Path, *, user: str | User | None = None) -> io.IOBase:
        """The content of a file of the workspace."""
        if user is not None:
            await self._check_read_with_exec(path, user=user)
        inside = await self._validate_path_access(path)
        try:
            return io.BytesIO(await self.sandbox.files.read_bytes(inside.as_posix()))
        except FileMissing as error:
            raise WorkspaceReadNotFoundError(path=path, cause=error) from error
        except ForkdError as error:
            raise WorkspaceArchiveReadError(path=path, cause=error) from error

    async def write(self, path: Path, data: io.IOBase, *, user: str | User | None = None) -> None:
        """Writes a file of the workspace; missing directories are made."""
        if user is not None:
            await self._check_write_with_exec(path, user=user)
        content = _bytes(data, path)
        inside = await self._validate_path_access(path, for_write=True)
        try:
            await self.sandbox.files.write(inside.as_posix(), content)
        except ForkdError as error:
            raise WorkspaceArchiveWriteError(path=inside, cause=error) from error

    # ---- the workspace, saved and restored

    def _machine_can_be_frozen(self) -> bool:
        """A frozen machine has every path, so paths that must not be saved need an archive."""
        return self.state.options.persistence == "snapshot" and not self._persist_workspace_skip_relpaths() and not self._mounts()

    def _mounts(self) -> list[tuple[Mount, Path]]:
        return list(self.state.manifest.mount_targets())

    async def persist_workspace(self) -> io.IOBase:
        """The saved workspace: the name of a snapshot of the machine, or an archive."""
        try:
            if self._machine_can_be_frozen():
                snapshot = await self.sandbox.branch(f"agents-{uuid.uuid4().hex}")
                return io.BytesIO(_MAGIC + json.dumps({"tag": snapshot.tag}).encode())
            return io.BytesIO(await self._archive())
        except ForkdError as error:
            raise WorkspaceArchiveReadError(path=self._workspace_root_path(), cause=error) from error

    async def _archive(self) -> bytes:
        path = f"/tmp/forkd-agents-{uuid.uuid4().hex}.tar"
        skipped = [f"--exclude=./{entry.as_posix()}" for entry in sorted(self._persist_workspace_skip_relpaths())]
        try:
            await self.sandbox.commands.run(["tar", "-C", self._root(), *skipped, "-cf", path, "."], _LONG, check=True)
            return await self.sandbox.files.read_bytes(path)
        finally:
            await self.sandbox.commands.run(["rm", "-f", path], _FAST)

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        """Restores a saved workspace. A snapshot replaces the sandbox by a child of it."""
        root = self._workspace_root_path()
        content = _bytes(data, root)
        try:
            if content.startswith(_MAGIC):
                await self._replace(str(json.loads(content[len(_MAGIC) :])["tag"]))
                return
            validate_tar_bytes(content, allow_external_symlink_targets=False)
            await self._unpack(content)
        except (ForkdError, UnsafeTarMemberError, ValueError, KeyError) as error:
            raise WorkspaceArchiveWriteError(path=root, cause=error) from error

    async def _replace(self, tag: str) -> None:
        before = self.sandbox
        self.sandbox = await _create(tag, self.state.options)
        self.state.sandbox_id = self.sandbox.id
        await before.kill()

    async def _unpack(self, content: bytes) -> None:
        path = f"/tmp/forkd-agents-{uuid.uuid4().hex}.tar"
        root = shlex.quote(self._root())
        try:
            await self.sandbox.files.write(path, content)
            await self.sandbox.commands.run(f"mkdir -p {root} && tar -C {root} -xf {path}", _LONG, check=True)
        finally:
            await self.sandbox.commands.run(["rm", "-f", path], _FAST)
        self._root_ready = True

    # ---- beyond the interface of the framework

    async def checkpoint(self, name: str | None = None) -> Checkpoint:
        """Keeps this moment of the machine."""
        return await self.sandbox.checkpoint(name)

    async def rollback(self, to: str | Checkpoint | None = None) -> Rollback:
        """Returns to a checkpoint: files, memory and processes."""
        return await self.sandbox.rollback(to)


class ForkdSandboxClient(BaseSandboxClient[ForkdSandboxClientOptions]):
    """Makes, finds and copies sessions."""

    backend_id = "forkd"

    async def create(
        self,
        *,
        snapshot: SnapshotSpec | SnapshotBase | None = None,
        manifest: Manifest | None = None,
        options: ForkdSandboxClientOptions,
    ) -> SandboxSession:
        """Starts a sandbox from the snapshot that the options name."""
        manifest = self._validate_manifest_for_create(manifest or Manifest())
        sandbox = await _create(options.tag, options)
        number = uuid.uuid4()
        state = ForkdSandboxSessionState(
            session_id=number,
            manifest=manifest,
            snapshot=resolve_snapshot(snapshot, str(number)),
            exposed_ports=options.exposed_ports,
            sandbox_id=sandbox.id,
            options=options,
        )
        return self._wrap_session(ForkdSandboxSession(state, sandbox))

    async def delete(self, session: SandboxSession) -> SandboxSession:
        """Deletes the sandbox of a session."""
        await inner(session).sandbox.kill()
        return session

    async def resume(self, state: SandboxSessionState) -> SandboxSession:
        """Finds the sandbox of a session again, or starts another one, to be filled from the saved workspace."""
        if not isinstance(state, ForkdSandboxSessionState):
            raise TypeError(f"the state is of {state.type}, not of forkd")
        state.assert_path_grants_rebound()
        found = True
        try:
            sandbox = await AsyncSandbox.connect(state.sandbox_id, client=loop_client())
        except (SandboxNotFound, SandboxGone):
            found = False
            sandbox = await _create(state.options.tag, state.options)
            state.sandbox_id = sandbox.id
            state.workspace_root_ready = False
        session = ForkdSandboxSession(state, sandbox)
        session._set_start_state_preserved(found, system=found)
        return self._wrap_session(session)

    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        """Reads the state that another process stored."""
        return self._deserialize_session_state_payload(payload, ForkdSandboxSessionState)

    async def fork_session(self, session: SandboxSession, n: int = 1) -> list[SandboxSession]:
        """Copies of a session that runs: same files, same processes, same memory. Each needs `start` as every session."""
        source = inner(session)
        sandboxes = await source.sandbox.fork(n, ttl=source.state.options.ttl)
        copies: list[SandboxSession] = []
        for sandbox in sandboxes:
            number = uuid.uuid4()
            state = source.state.model_copy(
                update={"session_id": number, "sandbox_id": sandbox.id, "snapshot": NoopSnapshot(id=str(number))}
            )
            copy = ForkdSandboxSession(state, sandbox)
            copy._set_start_state_preserved(True, system=True)
            copies.append(self._wrap_session(copy))
        return copies


def inner(session: SandboxSession) -> ForkdSandboxSession:
    """The session of forkd inside the one that the framework hands out, with `sandbox`, `checkpoint` and `rollback`."""
    found = session._inner
    if not isinstance(found, ForkdSandboxSession):
        raise TypeError("the session is not one of forkd")
    return found


def _bytes(data: io.IOBase, path: Path) -> bytes:
    content = data.read()
    if isinstance(content, str):
        content = content.encode()
    if not isinstance(content, bytes | bytearray):
        raise WorkspaceWriteTypeError(path=path, actual_type=type(content).__name__)
    return bytes(content)
