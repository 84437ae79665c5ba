"""AutoGen: a code executor whose code runs in a sandbox.

    executor = ForkdCodeExecutor("py")
    agent = CodeExecutorAgent("coder", code_executor=executor)

`restart` returns the sandbox to its state after `start`, in place and within milliseconds.
"""

from __future__ import annotations

import asyncio
from typing import Any, Self

from autogen_core import CancellationToken, Component
from autogen_core.code_executor import CodeBlock, CodeExecutor, CodeResult
from pydantic import BaseModel

from forkd_sdk import AsyncSandbox, CommandTimeout
from forkd_sdk.integrations._session import Ran, client

_START = "autogen-start"
_PROGRAMS = {
    "python": ["python3"],
    "py": ["python3"],
    "sh": ["/bin/sh"],
    "shell": ["/bin/sh"],
    "bash": ["bash"],
    "javascript": ["node"],
    "js": ["node"],
}


class ForkdCodeExecutorConfig(BaseModel):
    """The settings of an executor, as AutoGen stores them."""

    tag: str
    timeout: int = 60
    directory: str = "/root"
    ttl: int = 3600


class ForkdCodeExecutor(CodeExecutor, Component[ForkdCodeExecutorConfig]):
    """Runs code blocks in one sandbox, one after the other."""

    component_config_schema = ForkdCodeExecutorConfig
    component_provider_override = "forkd_sdk.integrations.autogen.ForkdCodeExecutor"

    def __init__(self, tag: str, *, timeout: int = 60, directory: str = "/root", ttl: int = 3600) -> None:
        self._config = ForkdCodeExecutorConfig(tag=tag, timeout=timeout, directory=directory, ttl=ttl)
        self.sandbox: AsyncSandbox | None = None

    async def start(self) -> None:
        """Starts the sandbox. A second call does nothing."""
        if self.sandbox is None:
            self.sandbox = await AsyncSandbox.create(self._config.tag, ttl=self._config.ttl, client=client())
            await self.sandbox.checkpoint(_START)

    async def stop(self) -> None:
        """Deletes the sandbox."""
        if self.sandbox is not None:
            await self.sandbox.kill()
            self.sandbox = None

    async def restart(self) -> None:
        """Undoes everything since the start: files, memory and processes."""
        if self.sandbox is None:
            await self.start()
        else:
            await self.sandbox.rollback(_START)

    async def fork(self, n: int = 1) -> list[Self]:
        """Executors with copies of the sandbox as it is now."""
        await self.start()
        assert self.sandbox is not None
        executors: list[Self] = []
        for child in await self.sandbox.fork(n, ttl=self._config.ttl):
            executor = self._from_config(self._config)
            executor.sandbox = child
            await child.checkpoint(_START)
            executors.append(executor)
        return executors

    async def execute_code_blocks(self, code_blocks: list[CodeBlock], cancellation_token: CancellationToken) -> CodeResult:
        """Runs the blocks until one fails. Cancelling kills the block that runs."""
        await self.start()
        output: list[str] = []
        for block in code_blocks:
            task = asyncio.ensure_future(self._run(block))
            cancellation_token.link_future(task)
            ran = await task
            output.append(ran.stdout + ran.stderr)
            if ran.exit_code != 0:
                return CodeResult(exit_code=ran.exit_code, output="".join(output))
        return CodeResult(exit_code=0, output="".join(output))

    async def _run(self, block: CodeBlock) -> Ran:
        program = _PROGRAMS.get(block.language.lower())
        if program is None:
            return Ran("", f"unknown language {block.language}: {', '.join(_PROGRAMS)}\n", 1, False)
        assert self.sandbox is not None
        try:
            result = await self.sandbox.commands.run(
                [*program, "/dev/stdin"], self._config.timeout, cwd=self._config.directory, stdin=block.code
            )
        except CommandTimeout as error:
            late = Ran.late(error)
            return Ran(late.stdout, f"{late.stderr}\n{error}\n", late.exit_code, True)
        return Ran(result.stdout, result.stderr, result.exit_code, False)

    def _to_config(self) -> ForkdCodeExecutorConfig:
        return self._config

    @classmethod
    def _from_config(cls, config: ForkdCodeExecutorConfig) -> Self:
        return cls(**config.model_dump())

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.stop()
