"""What the asynchronous adapters share: one client per event loop, and commands that end in one way or another."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from forkd_sdk import AsyncClient, CommandTimeout

# For one answer, in seconds: frameworks write files of tens of MiB.
_TIMEOUT = 600.0
_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncClient] = WeakKeyDictionary()


def client() -> AsyncClient:
    """The client of the running event loop. Connections cannot be shared between loops."""
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        _clients[loop] = AsyncClient(timeout=_TIMEOUT)
    return _clients[loop]


@dataclass(frozen=True, slots=True)
class Ran:
    """The end of a command. A command that was killed after its timeout has the output until then."""

    stdout: str
    stderr: str
    exit_code: int
    timed_out: bool

    @staticmethod
    def late(error: CommandTimeout) -> Ran:
        """The result of a command that took too long."""
        result = error.result
        return Ran(result.stdout, result.stderr, 124, True)
