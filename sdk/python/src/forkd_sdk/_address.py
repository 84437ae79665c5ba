"""Finding the daemon, in the order of the command line: argument, `FORKD_URL`, machine, local socket, default port."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from forkd_sdk.errors import InvalidAddress

DEFAULT_URL = "http://127.0.0.1:8889"
_SOCKET = "forkd/forkd.sock"


@dataclass(frozen=True, slots=True)
class Address:
    """`base` is the URL of requests; `socket` is the path of a Unix socket that carries them, if there is one."""

    base: str
    socket: str | None

    @property
    def loopback(self) -> bool:
        """Requests to the loopback address never use a proxy: the proxy would reach its own host."""
        host = self.base.split("://", 1)[1].rsplit(":", 1)[0]
        return self.socket is not None or host in ("localhost", "[::1]") or host.startswith("127.")


def parse(text: str) -> Address:
    """An address as the command line takes it."""
    if text.startswith("unix://"):
        path = text.removeprefix("unix://")
        if not path.startswith("/"):
            raise _invalid(text)
        return Address("http://forkd", path)
    scheme, found, rest = text.partition("://")
    host = rest.rstrip("/")
    if not found or scheme not in ("http", "https") or not host or any(c in host for c in "/?# @"):
        raise _invalid(text)
    return Address(f"{scheme}://{host}", None)


def _invalid(text: str) -> InvalidAddress:
    return InvalidAddress(f"{text!r} is not the address of a daemon: write http://HOST:PORT, https://HOST:PORT or unix:///PATH")


def variable(name: str) -> str | None:
    """A variable of the environment. An empty one counts as unset."""
    return os.environ.get(name) or None


def find(url: str | None) -> Address:
    """The daemon that `url` names, otherwise the one that the command line would use."""
    named = url or variable("FORKD_URL")
    if named:
        return parse(named)
    port = _machine_port()
    if port is not None:
        return parse(f"http://127.0.0.1:{port}")
    return _local_socket() or parse(DEFAULT_URL)


def _local_socket() -> Address | None:
    for folder in ("/run", variable("XDG_RUNTIME_DIR")):
        if folder is None:
            continue
        path = Path(folder, _SOCKET)
        try:
            path.stat()
        except PermissionError:
            pass  # The socket exists in a folder that this user may not read.
        except OSError:
            continue
        return Address("http://forkd", str(path))
    return None


def _machine_port() -> int | None:
    """The forwarded port of a running machine. Only a host with a machine has its folder."""
    state = variable("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    name = variable("FORKD_MACHINE") or "default"
    if not Path(state, "forkd", "machine", name).is_dir():
        return None
    import subprocess
    try:
        done = subprocess.run(
            ["forkd", "machine", "status", "--json"], capture_output=True, timeout=10, check=False, stdin=subprocess.DEVNULL
        )
        port = json.loads(done.stdout).get("port")
    except (OSError, ValueError, AttributeError, subprocess.SubprocessError):
        return None
    return port if isinstance(port, int) else None
