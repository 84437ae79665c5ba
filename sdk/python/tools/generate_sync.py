#!/usr/bin/env python3
"""Writes the blocking client (`_sync`) from the asynchronous one (`_async`).

    generate_sync.py [--check]

With `--check` nothing is written, and the exit code is 1 if a file is not up to date. Needs the package `unasync`.
"""

import pathlib
import re
import sys
import tempfile

import unasync

PACKAGE = pathlib.Path(__file__).parent.parent / "src" / "forkd_sdk"
NAMES = ["Http", "Session", "Ports", "Pty", "Commands", "Process", "Files", "Interpreter", "SandboxBase", "Attempt", "Client", "Snapshots", "Workspaces", "Opening"]
REPLACEMENTS = {
    **{f"Async{name}": name for name in NAMES},
    "_aio": "_sio",
    "_async": "_sync",
    "aclose": "close",
    "aclosing": "closing",
    "aread": "read",
    "aiter_bytes": "iter_bytes",
    "asynccontextmanager": "contextmanager",
}
# `Awaitable[R]` of a parameter is `R` when the call blocks.
AWAITABLE = re.compile(r"Awaitable\[([^\[\]]*)\]")
HEADER = "# Generated from `_async` by tools/generate_sync.py. Do not edit.\n"


def generated():
    with tempfile.TemporaryDirectory() as work:
        rule = unasync.Rule(f"{PACKAGE}/_async/", f"{work}/_sync/", additional_replacements=REPLACEMENTS)
        sources = sorted((PACKAGE / "_async").glob("*.py"))
        unasync.unasync_files([str(path) for path in sources], [rule])
        for path in sources:
            text = pathlib.Path(work, "_sync", path.name).read_text()
            text = AWAITABLE.sub(r"\1", text).replace("import Awaitable, Callable", "import Callable")
            text = text.replace('"""The asynchronous client. `_sync` is generated from this package by', '"""The blocking client, generated from `_async` by')
            yield PACKAGE / "_sync" / path.name, HEADER + text


def main():
    check = sys.argv[1:] == ["--check"]
    wanted = dict(generated())
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    stale += [path for path in (PACKAGE / "_sync").glob("*.py") if path not in wanted]
    if check:
        for path in stale:
            print(f"{path} is not up to date: run {__file__}")
        return 1 if stale else 0
    for path in stale:
        if path in wanted:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path])
        else:
            path.unlink()
    return 0


sys.exit(main())
