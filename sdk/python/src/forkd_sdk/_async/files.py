"""The room `files` of a sandbox. Paths in the guest are absolute."""

from __future__ import annotations

import os
import posixpath
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from forkd_sdk import _aio as io
from forkd_sdk._async.http import SILENCE
from forkd_sdk._wire import is_keepalive, parse_line, rows
from forkd_sdk.errors import FileMissing, InvalidRequest, StreamCut
from forkd_sdk.models import FileChange, FileEntry, Transfer

if TYPE_CHECKING:
    from forkd_sdk._async.http import AsyncHttp

# Files that are copied at the same time.
_AT_ONCE = 8


class AsyncFiles:
    """Reads and writes files of the guest."""

    def __init__(self, http: AsyncHttp, base: str) -> None:
        self._http = http
        self._base = f"{base}/files"

    async def read(self, path: str) -> str:
        """The content as text. Bytes that are not UTF-8 raise `UnicodeDecodeError`."""
        return (await self.read_bytes(path)).decode("utf-8")

    async def read_bytes(self, path: str) -> bytes:
        """The content."""
        return (await self._http.call("GET", self._base, params={"path": path})).content

    async def read_stream(self, path: str) -> AsyncGenerator[bytes]:
        """The content in pieces, for files that do not fit into memory."""
        async with self._http.open("GET", self._base, params={"path": path}, silence=self._http.timeout) as response:
            async for piece in response.aiter_bytes():
                yield piece

    async def write(self, path: str, data: str | bytes, *, mode: int | None = None) -> None:
        """Writes a file, whole or not at all. Missing directories are made."""
        params = {"path": path}
        if mode is not None:
            params["mode"] = f"{mode:o}"
        content = data.encode() if isinstance(data, str) else bytes(data)
        await self._http.call("PUT", self._base, params=params, content=content)

    async def write_many(self, files: dict[str, str | bytes]) -> None:
        """Writes several files. The first failure is raised after the others are done."""
        await _each([partial(self.write, path, data) for path, data in files.items()])

    async def list(self, path: str, depth: int = 1) -> list[FileEntry]:
        """The entries of a directory; with a larger depth also those of its directories. Links are not followed."""
        answer = await self._http.json("GET", f"{self._base}/list", params={"path": path})
        entries = rows(answer, "files", lambda value: FileEntry.read(value, path))
        if depth <= 1:
            return entries
        found: list[FileEntry] = []
        for entry in entries:
            found.append(entry)
            if entry.kind == "dir":
                found.extend(await self.list(entry.path, depth - 1))
        return found

    async def stat(self, path: str) -> FileEntry:
        """One path. A symbolic link is described itself, not its target. A missing path raises `FileMissing`."""
        return FileEntry.read(await self._http.json("GET", f"{self._base}/stat", params={"path": path}), None)

    async def exists(self, path: str) -> bool:
        """Whether there is a file or directory."""
        if not path.startswith("/"):
            raise ValueError(f"{path!r} is not an absolute path")
        try:
            await self.stat(path)
        except (FileMissing, InvalidRequest):
            # The daemon refuses a path below a file.
            return False
        return True

    async def rename(self, old: str, new: str, *, replace: bool = False) -> None:
        """Gives a file or directory another path."""
        await self._http.json("POST", f"{self._base}/rename", json={"from": old, "to": new, "replace": replace})

    async def mkdir(self, path: str) -> None:
        """Makes a directory and its parents."""
        await self._http.json("POST", f"{self._base}/mkdir", json={"path": path})

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Removes a file or directory."""
        params = {"path": path}
        if recursive:
            params["recursive"] = "true"
        await self._http.call("DELETE", self._base, params=params)

    @asynccontextmanager
    async def watch(self, path: str, *, recursive: bool = False) -> AsyncGenerator[AsyncIterator[FileChange]]:
        """Changes of a file or directory. The watch is in place when the block begins.

        The changes have no end: `StreamCut` is raised when the sandbox is deleted.
        """
        params = {"path": path}
        if recursive:
            params["recursive"] = "true"
        async with self._http.open("GET", f"{self._base}/watch", params=params, silence=SILENCE) as response:
            yield _changes(response)

    async def upload_dir(self, local: str | os.PathLike[str], remote: str) -> Transfer:
        """Copies a directory of this host into the guest. Symbolic links and special files are skipped."""
        files: list[tuple[Path, str]] = []
        skipped: list[str] = []
        await self.mkdir(remote)
        for folder, folders, names in os.walk(local):
            inside = posixpath.join(remote, *Path(folder).relative_to(local).parts)
            for name in folders + names:
                source = Path(folder, name)
                if source.is_symlink() or not (source.is_dir() or source.is_file()):
                    skipped.append(str(source))
                elif source.is_dir():
                    await self.mkdir(posixpath.join(inside, name))
                else:
                    files.append((source, posixpath.join(inside, name)))
        sizes = await _each([partial(self._send, source, target) for source, target in files])
        return Transfer(len(files), sum(sizes), tuple(skipped))

    async def _send(self, source: Path, target: str) -> int:
        data = source.read_bytes()
        await self.write(target, data, mode=source.stat().st_mode & 0o777)
        return len(data)

    async def download_dir(self, remote: str, local: str | os.PathLike[str]) -> Transfer:
        """Copies a directory of the guest to this host. Symbolic links and special files are skipped."""
        found: list[tuple[FileEntry, Path]] = []
        skipped: list[str] = []
        await _walk(self, remote, Path(local), found, skipped)
        sizes = await _each([partial(self._fetch, entry, target) for entry, target in found])
        return Transfer(len(found), sum(sizes), tuple(skipped))

    async def _fetch(self, entry: FileEntry, target: Path) -> int:
        data = await self.read_bytes(entry.path)
        if target.is_symlink():
            target.unlink()
        target.write_bytes(data)
        target.chmod(entry.mode & 0o777)
        return len(data)


async def _walk(files: AsyncFiles, remote: str, local: Path, found: list[tuple[FileEntry, Path]], skipped: list[str]) -> None:
    local.mkdir(parents=True, exist_ok=True)
    for entry in await files.list(remote):
        # The guest chooses the names: one with a slash or dots would leave the directory.
        if entry.name in ("", ".", "..") or "/" in entry.name or "\0" in entry.name or entry.kind not in ("file", "dir"):
            skipped.append(entry.path)
        elif entry.kind == "dir":
            await _walk(files, entry.path, local / entry.name, found, skipped)
        else:
            found.append((entry, local / entry.name))


async def _each(jobs: Sequence[io.Job[io.T]]) -> list[io.T]:
    """Runs the jobs, a few at a time. The first failure is raised when its group is done."""
    done: list[io.T] = []
    for start in range(0, len(jobs), _AT_ONCE):
        for result in await io.gather(jobs[start : start + _AT_ONCE]):
            if isinstance(result, BaseException):
                raise result
            done.append(result)
    return done


async def _changes(response: io.Response) -> AsyncIterator[FileChange]:
    async for line in io.lines(response):
        if line:
            value = parse_line(line, "watch")
            if not is_keepalive(value):
                yield FileChange.read(value)
    raise StreamCut("the watch ended: the sandbox or the daemon is gone")
