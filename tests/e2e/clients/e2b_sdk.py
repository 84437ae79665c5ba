#!/usr/bin/env python3
"""The official SDK of E2B against the daemon.

    e2b_sdk.py URL TAG

The daemon serves the E2B protocol. TAG is a snapshot with Python. The last line counts cases.
"""

import contextlib
import os
import sys
import traceback
import urllib.request

URL, TAG = sys.argv[1:]
os.environ.update(E2B_API_KEY="e2b_" + "0" * 40, E2B_API_URL=URL, E2B_SANDBOX_URL=URL, E2B_DOMAIN="localhost")

from e2b import CommandExitException, NotFoundException, Sandbox  # noqa: E402

passed, failed = [], []


@contextlib.contextmanager
def case(name):
    try:
        yield
    except Exception:
        failed.append(name)
        print(f"FAIL {name}")
        traceback.print_exc(file=sys.stdout)
    else:
        passed.append(name)
        print(f"ok   {name}")


def commands(box):
    with case("commands"):
        ran = box.commands.run("echo out; echo err >&2")
        assert (ran.stdout, ran.stderr, ran.exit_code) == ("out\n", "err\n", 0), ran
        assert box.commands.run("echo $NAME", envs={"NAME": "value"}).stdout == "value\n"
        assert box.commands.run("pwd", cwd="/tmp").stdout == "/tmp\n"
    with case("a command that fails"):
        try:
            box.commands.run("exit 3")
            raise AssertionError("no exception")
        except CommandExitException as error:
            assert error.exit_code == 3, error
    with case("a background command is listed and killed"):
        handle = box.commands.run("sleep 4242", background=True)
        assert handle.pid in [process.pid for process in box.commands.list()]
        assert handle.kill()
        assert handle.pid not in [process.pid for process in box.commands.list()]
    with case("output arrives while the command runs"):
        seen = []
        box.commands.run("for i in 1 2 3; do echo $i; done", on_stdout=seen.append)
        assert "".join(str(part) for part in seen) == "1\n2\n3\n", seen


def files(box):
    with case("files"):
        box.files.write("/tmp/e2b/a.txt", "hello")
        assert box.files.read("/tmp/e2b/a.txt") == "hello"
        box.files.write("/tmp/e2b/b.bin", bytes(range(256)))
        assert bytes(box.files.read("/tmp/e2b/b.bin", format="bytes")) == bytes(range(256))
        assert sorted(entry.name for entry in box.files.list("/tmp/e2b")) == ["a.txt", "b.bin"]
        assert box.files.get_info("/tmp/e2b/a.txt").size == 5
        box.files.rename("/tmp/e2b/a.txt", "/tmp/e2b/c.txt")
        assert box.files.exists("/tmp/e2b/c.txt") and not box.files.exists("/tmp/e2b/a.txt")
        assert box.files.make_dir("/tmp/e2b/dir")
        box.files.remove("/tmp/e2b/c.txt")
        assert not box.files.exists("/tmp/e2b/c.txt")
    with case("a file that is not there"):
        try:
            box.files.read("/tmp/none")
            raise AssertionError("no exception")
        except NotFoundException:
            pass


def ports(box):
    with case("get_host leads to a server on 127.0.0.1"):
        box.commands.run("python3 -m http.server --bind 127.0.0.1 3000", cwd="/tmp", background=True)
        box.commands.run("until python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 3000))'; do sleep 0.2; done")
        box.files.write("/tmp/page", "served")
        host = box.get_host(3000)
        assert host == f"3000-{box.sandbox_id}.localhost", host
        # The name leads to this host; the daemon has another port here.
        request = urllib.request.Request(URL + "/page", headers={"Host": host})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.read() == b"served"


def life(box):
    with case("the sandbox is described"):
        info = box.get_info()
        assert info.sandbox_id == box.sandbox_id and info.metadata == {"of": "e2b"}, info
        assert box.is_running()
        listed = Sandbox.list().next_items()
        assert box.sandbox_id in [one.sandbox_id for one in listed], listed
        box.set_timeout(600)
    with case("pause and resume keep memory and files"):
        box.files.write("/tmp/kept", "kept")
        box.pause()
        again = Sandbox.connect(box.sandbox_id)
        assert again.files.read("/tmp/kept") == "kept"
        assert again.commands.run("echo back").stdout == "back\n"
    with case("the sandbox ends"):
        assert box.kill()
        assert not box.is_running()


def main():
    with case("create"):
        box = Sandbox.create(template=TAG, timeout=600, metadata={"of": "e2b"})
    if passed:
        commands(box)
        files(box)
        ports(box)
        life(box)


main()
print(f"{len(passed)} passed, {len(failed)} failed")
sys.exit(bool(failed))
