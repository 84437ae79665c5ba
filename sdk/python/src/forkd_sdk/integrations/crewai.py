"""CrewAI: tools that run commands and Python, and read and write files, in a sandbox.

    with ForkdTools("py") as tools:
        Agent(role=..., tools=tools.all())

Each `ForkdTools` has one sandbox. `fork` gives the next agent a copy of it; `checkpoint` and `rollback` undo a task.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Literal, Self

from crewai.tools import BaseTool
from pydantic import BaseModel, ConfigDict, Field

from forkd_sdk import ApiError, Checkpoint, Client, CommandTimeout, Rollback, Sandbox

_MAX_OUTPUT = 20_000


def _shown(stdout: str, stderr: str, exit_code: int) -> str:
    text = stdout + (f"\n[stderr]\n{stderr}" if stderr else "")
    if len(text) > _MAX_OUTPUT:
        half = _MAX_OUTPUT // 2
        text = f"{text[:half]}\n[... {len(text) - _MAX_OUTPUT} characters left out ...]\n{text[-half:]}"
    return f"{text}\n[exit code {exit_code}]"


class _Command(BaseModel):
    command: str = Field(description="Shell command")
    timeout: int = Field(default=60, ge=1, le=86400, description="Seconds after which the command is killed")


class _Code(BaseModel):
    code: str = Field(description="Python code; variables stay for the next call, and the last expression is the result")


class _File(BaseModel):
    action: Literal["read", "write", "list"] = Field(description="What to do with the path")
    path: str = Field(description="Absolute path in the sandbox")
    content: str | None = Field(default=None, description="New content, for write")


class _Tool(BaseTool):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    sandbox: Sandbox = Field(exclude=True)


class ForkdExecTool(_Tool):
    """Runs shell commands."""

    name: str = "run_command"
    description: str = "Run a shell command in an isolated Linux machine and return its output and exit code."
    args_schema: type[BaseModel] = _Command

    def _run(self, command: str, timeout: int = 60) -> str:
        try:
            result = self.sandbox.commands.run(command, timeout)
        except CommandTimeout as error:
            return f"{_shown(error.result.stdout, error.result.stderr, 124)}\n{error}"
        except ApiError as error:
            return f"error: {error}"
        return _shown(result.stdout, result.stderr, result.exit_code)


class ForkdPythonTool(_Tool):
    """Runs Python in the warm interpreter."""

    name: str = "run_python"
    description: str = "Run Python code in the warm interpreter of an isolated Linux machine."
    args_schema: type[BaseModel] = _Code

    def _run(self, code: str) -> str:
        try:
            done = self.sandbox.run_code(code)
        except ApiError as error:
            return f"error: {error}"
        return "\n".join(str(part) for part in (done.stdout, done.stderr, done.text, done.traceback or done.error) if part)


class ForkdFileTool(_Tool):
    """Reads, writes and lists files."""

    name: str = "files"
    description: str = "Read, write or list files in an isolated Linux machine."
    args_schema: type[BaseModel] = _File

    def _run(self, action: str, path: str, content: str | None = None) -> str:
        try:
            if action == "read":
                return self.sandbox.files.read(path)
            if action == "write":
                self.sandbox.files.write(path, content or "")
                return f"{path} is written"
            return "\n".join(f"{entry.kind} {entry.size} {entry.name}" for entry in self.sandbox.files.list(path))
        except (ApiError, UnicodeDecodeError) as error:
            return f"error: {error}"


class ForkdTools:
    """The tools of one sandbox. As a context manager it deletes the sandbox at the end."""

    def __init__(self, tag: str | None = None, *, sandbox: Sandbox | None = None, client: Client | None = None, ttl: int | None = 3600) -> None:
        if (tag is None) == (sandbox is None):
            raise ValueError("exactly one of tag and sandbox is needed")
        self.sandbox = sandbox or Sandbox.create(str(tag), client=client, ttl=ttl)

    def all(self) -> list[BaseTool]:
        """The tools for commands, Python and files."""
        made: list[Any] = [kind(sandbox=self.sandbox) for kind in (ForkdExecTool, ForkdPythonTool, ForkdFileTool)]
        return made

    def fork(self, n: int = 1) -> list[Self]:
        """Tools of copies of the sandbox as it is now, one for each agent."""
        return [type(self)(sandbox=child) for child in self.sandbox.fork(n)]

    def checkpoint(self, name: str | None = None) -> Checkpoint:
        """Keeps this moment."""
        return self.sandbox.checkpoint(name)

    def rollback(self, to: str | Checkpoint | None = None) -> Rollback:
        """Returns to a checkpoint."""
        return self.sandbox.rollback(to)

    def close(self) -> None:
        """Deletes the sandbox."""
        self.sandbox.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
