"""The classes `Sandbox` and `AsyncSandbox`.

`Sandbox(tag=…)` starts a child in its constructor, as the `forkd` 0.5.3 client does. The asynchronous class has no such
form: a constructor cannot wait.
"""

from __future__ import annotations

import os

from forkd_sdk._async.opening import AsyncOpening
from forkd_sdk._sync.client import Client
from forkd_sdk._sync.opening import Opening


class AsyncSandbox(AsyncOpening):
    """A running sandbox, for `asyncio`. Made by `await AsyncSandbox.create(tag)` or `connect(id)`."""


class Sandbox(Opening):
    """A running sandbox. Made by `Sandbox.create(tag)` or `Sandbox.connect(id)`.

    `Sandbox(tag)` is the form of the `forkd` 0.5.3 client: it starts a child of the tag (`FORKD_TAG`, otherwise
    `pyagent`). `target` is refused, because guests are reached through the daemon. `timeout` is for each answer of the
    daemon. With `spawn=False` it takes the newest running child of the tag.
    """

    def __init__(self, tag: str | None = None, target: str | None = None, timeout: float = 30, *, spawn: bool = True) -> None:
        if target is not None:
            raise ValueError("target is not supported: guests are reached through the daemon; use Sandbox.connect(id)")
        used = tag or os.environ.get("FORKD_TAG") or "pyagent"
        client = Client(timeout=timeout)
        if spawn:
            made = type(self).create(used, client=client)
            info = made._info
        else:
            running = client.sandboxes(tag=used, state="running")
            if not running:
                raise RuntimeError(f"no sandbox of {used} runs; leave out spawn=False to start one")
            info = running[-1]
        self._attach(client, info, None, True)
