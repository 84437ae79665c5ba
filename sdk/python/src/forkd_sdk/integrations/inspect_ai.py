"""Inspect: the sandbox `forkd` for evaluations.

    Task(dataset=..., solver=..., sandbox=("forkd", "py"))

The configuration is the tag of a snapshot, or a `ForkdConfig`. `task_init` starts one parent and runs the set-up command
in it; each sample gets a live fork of the parent, so samples begin in the same warm state within milliseconds.
"""

from __future__ import annotations

import os
import posixpath
import shlex
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Literal, Union, overload

from inspect_ai.util import ExecResult, OutputLimitExceededError, SandboxEnvironment, SandboxEnvironmentLimits, sandboxenv
from pydantic import BaseModel
from typing_extensions import override

from forkd_sdk import ApiError, AsyncSandbox, CommandResult, CommandTimeout, FileEntry, FileMissing, InvalidRequest
from forkd_sdk.integrations._session import client

_LONG = 24 * 3600
# Input up to this size goes with the request; more is written to a file of the guest first.
_SHORT = 256 << 10


class ForkdConfig(BaseModel, frozen=True):
    """How the sandboxes of a task are made."""

    tag: str
    """Snapshot to start from."""
    setup: str | None = None
    """Shell command that the parent runs once, before samples are forked from it."""
    setup_user: str | None = None
    """User of that command; the agent's own by default."""
    user: str | None = None
    """User of commands that name none; the agent's own by default."""
    ttl: int = 6 * 3600
    """Seconds after which a sandbox is deleted."""


def _config(value: object) -> ForkdConfig:
    if isinstance(value, ForkdConfig):
        return value
    if isinstance(value, str):
        return ForkdConfig(tag=value)
    raise ValueError("the configuration of the forkd sandbox is the tag of a snapshot, or a ForkdConfig")


@sandboxenv(name="forkd")
class ForkdSandboxEnvironment(SandboxEnvironment):
    """One sandbox of a sample."""

    _parents: dict[tuple[str, ForkdConfig], AsyncSandbox] = {}

    def __init__(self, sandbox: AsyncSandbox, config: ForkdConfig, home: str) -> None:
        super().__init__()
        self.sandbox = sandbox
        self._settings = config
        self._home = home

    @classmethod
    @override
    async def task_init(cls, task_name: str, config: Any) -> None:
        if config is not None:
            await cls._parent(task_name, _config(config))

    @classmethod
    async def _parent(cls, task_name: str, config: ForkdConfig) -> AsyncSandbox:
        """The parent of a task, started once."""
        key = (task_name, config)
        if key not in cls._parents:
            parent = await AsyncSandbox.create(config.tag, ttl=config.ttl, client=client())
            if config.setup:
                await parent.commands.run(config.setup, _LONG, user=config.setup_user, check=True)
            cls._parents[key] = parent
        return cls._parents[key]

    @classmethod
    @override
    async def sample_init(cls, task_name: str, config: Any, metadata: dict[str, str]) -> dict[str, SandboxEnvironment]:
        wanted = _config(config)
        parent = await cls._parent(task_name, wanted)
        (child,) = await parent.fork(ttl=wanted.ttl)
        home = (await child.commands.run("mktemp -d", user=wanted.user, check=True)).stdout.strip()
        return {"default": cls(child, wanted, home)}

    @classmethod
    @override
    async def sample_cleanup(
        cls, task_name: str, config: Any, environments: dict[str, SandboxEnvironment], interrupted: bool
    ) -> None:
        for environment in environments.values():
            await environment.as_type(cls).sandbox.kill()

    @classmethod
    @override
    async def task_cleanup(cls, task_name: str, config: Any, cleanup: bool) -> None:
        for key in [key for key in cls._parents if key[0] == task_name]:
            parent = cls._parents.pop(key)
            if cleanup:
                await parent.kill()

    @classmethod
    @override
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return ForkdConfig(**config)

    def _path(self, file: str) -> str:
        return posixpath.join(self._home, file)

    @override
    async def exec(
        self,
        cmd: list[str],
        input: Union[str, bytes, None] = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        try:
            result = await self._exec(cmd, input, self._path(cwd or ""), env or {}, user or self._settings.user, timeout or _LONG)
        except CommandTimeout as error:
            raise TimeoutError(str(error)) from error
        except ApiError as error:
            if f'no user "{user}"' in str(error):
                return ExecResult(False, 126, "", str(error))
            raise _as_exec_error(error) from error
        for text in (result.stdout, result.stderr):
            if len(text.encode()) > SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE:
                raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, text[: 1 << 20])
        if result.exit_code == 126 and "permission denied" in result.stderr.lower():
            raise PermissionError(result.stderr)
        # A signal as a shell reports it.
        code = result.exit_code if result.exit_code >= 0 else 128 - result.exit_code
        return ExecResult(code == 0, code, result.stdout, result.stderr)

    async def _exec(
        self, cmd: list[str], input: str | bytes | None, cwd: str, env: dict[str, str], user: str | None, timeout: int
    ) -> CommandResult:
        run = self.sandbox.commands.run
        if input is None or (isinstance(input, str) and len(input) <= _SHORT):
            return await run(cmd, timeout, cwd=cwd, env=env, user=user, stdin=input)
        async with self._staged(input.encode() if isinstance(input, str) else input) as path:
            script = f'exec "$@" < {shlex.quote(path)}'
            return await run(["/bin/sh", "-c", script, "sh", *cmd], timeout, cwd=cwd, env=env, user=user)

    @asynccontextmanager
    async def _staged(self, data: bytes) -> AsyncGenerator[str]:
        """A file of the guest that every user can read, for the time of the block."""
        path = f"/tmp/.forkd-{os.urandom(8).hex()}"
        await self.sandbox.files.write(path, data, mode=0o644)
        try:
            yield path
        finally:
            await self.sandbox.files.remove(path)

    @override
    async def write_file(self, file: str, contents: str | bytes) -> None:
        path = self._path(file)
        user = self._settings.user
        if user is None:
            try:
                await self.sandbox.files.write(path, contents)
            except ApiError as error:
                raise _as_file_error(error, path) from error
            return
        # As the user of the commands, so that its permissions hold.
        data = contents.encode() if isinstance(contents, str) else contents
        async with self._staged(data) as staged:
            folder, target = shlex.quote(posixpath.dirname(path)), shlex.quote(path)
            result = await self.sandbox.commands.run(f"mkdir -p -- {folder} && cat {staged} > {target}", 600, user=user)
        if result.exit_code != 0:
            raise _as_text_error(result.stderr, path)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    @override
    async def read_file(self, file: str, text: bool = True) -> Union[str, bytes]:
        path = self._path(file)
        user = self._settings.user
        if user is not None:
            check = await self.sandbox.commands.run(["test", "-r", path], user=user)
            entry = await self._stat(path)
            if entry is not None and check.exit_code != 0:
                raise PermissionError(f"{path}: permission denied")
        entry = await self._stat(path)
        if entry is not None and entry.kind == "dir":
            raise IsADirectoryError(f"{path} is a directory")
        if entry is not None and entry.size > SandboxEnvironmentLimits.MAX_READ_FILE_SIZE:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        try:
            data = await self.sandbox.files.read_bytes(path)
        except ApiError as error:
            raise _as_file_error(error, path) from error
        return data.decode("utf-8") if text else data

    async def _stat(self, path: str) -> FileEntry | None:
        try:
            return await self.sandbox.files.stat(path)
        except (FileMissing, InvalidRequest):
            return None


def _as_text_error(text: str, path: str) -> OSError:
    lower = text.lower()
    if "permission denied" in lower:
        return PermissionError(f"{path}: {text}")
    if "is a directory" in lower:
        return IsADirectoryError(f"{path}: {text}")
    return FileNotFoundError(f"{path}: {text}") if "no such" in lower else OSError(f"{path}: {text}")


def _as_file_error(error: ApiError, path: str) -> Exception:
    if isinstance(error, FileMissing):
        return FileNotFoundError(f"{path}: {error}")
    found = _as_text_error(str(error), path)
    return error if type(found) is OSError else found


def _as_exec_error(error: ApiError) -> Exception:
    text = str(error).lower()
    if "permission denied" in text:
        return PermissionError(str(error))
    if isinstance(error, FileMissing) and "user" not in text:
        return FileNotFoundError(str(error))
    return error
