#!/usr/bin/env python3
"""The official SDK of E2B against the daemon.

    e2b_sdk.py URL TAG

The daemon serves the E2B protocol. TAG is a snapshot with Python. The last line counts cases.
"""

import os
import sys
import urllib.error
import urllib.request

from cases import case, finish, passed

URL, TAG = sys.argv[1:]
os.environ.update(E2B_API_KEY="e2b_" + "0" * 40, E2B_API_URL=URL, E2B_SANDBOX_URL=URL, E2B_DOMAIN="localhost")

from e2b import CommandExitException, NotFoundException, PtySize, Sandbox  # noqa: E402
from e2b_code_interpreter import Sandbox as Interpreter  # noqa: E402


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
    with case("metadata stays with a file"):
        box.files.write("/tmp/e2b/noted", "x", metadata={"author": "me"})
        box.files.rename("/tmp/e2b/noted", "/tmp/e2b/moved")
        assert box.files.get_info("/tmp/e2b/moved").metadata == {"author": "me"}
        box.files.write("/tmp/e2b/moved", "y")
        assert box.files.get_info("/tmp/e2b/moved").metadata is None
    with case("changes in a directory are reported"):
        watch = box.files.watch_dir("/tmp/e2b")
        box.files.write("/tmp/e2b/new.txt", "new")
        seen = [event.name for event in watch.get_new_events()]
        assert "new.txt" in seen, seen
        watch.stop()
    with case("signed URLs read and write"):
        url = box.download_url("/tmp/e2b/b.bin", use_signature_expiration=600)
        assert fetch(url) == bytes(range(256))
        for bad in (url.replace("b.bin", "new.txt"), url + "0"):
            try:
                fetch(bad)
                raise AssertionError("no exception")
            except urllib.error.HTTPError as error:
                # The signature alone names the sandbox, so a wrong one finds none.
                assert error.code in (401, 502), error
        target = urllib.request.Request(box.upload_url("/tmp/e2b/put.bin"), data=b"put", method="POST")
        target.add_header("Content-Type", "application/octet-stream")
        urllib.request.urlopen(target, timeout=60).close()
        assert box.files.read("/tmp/e2b/put.bin") == "put"


def fetch(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read()


def terminal(box):
    with case("a terminal takes input and has a size"):
        seen = bytearray()
        handle = box.pty.create(PtySize(rows=30, cols=90))
        box.pty.send_stdin(handle.pid, b"stty size; echo $((6 * 7)); exit 0\n")
        ended = handle.wait(on_pty=seen.extend)
        assert ended.exit_code == 0 and b"30 90" in seen and b"42" in seen, bytes(seen)
    with case("a terminal is killed"):
        handle = box.pty.create(PtySize(rows=24, cols=80))
        assert box.pty.kill(handle.pid)


def interpreter(box):
    box = Interpreter.connect(box.sandbox_id)
    with case("the interpreter keeps its state"):
        box.run_code("x = 41", timeout=120, request_timeout=120)
        ran = box.run_code("print('out')\nx + 1")
        assert (ran.text, "".join(ran.logs.stdout), ran.error) == ("42", "out\n", None), ran
        assert box.run_code("import os; os.environ['V']", envs={"V": "of this run"}).text == "of this run"
    with case("an exception has its name"):
        error = box.run_code("1 / 0").error
        assert error and error.name == "ZeroDivisionError", error
    with case("contexts are apart"):
        context = box.create_code_context(cwd="/tmp", request_timeout=120)
        assert box.run_code("import os; os.getcwd()", context=context).text == "/tmp"
        assert box.run_code("x", context=context).error.name == "NameError"
        assert context.id in [one.id for one in box.list_code_contexts()]
        box.remove_code_context(context)
        assert context.id not in [one.id for one in box.list_code_contexts()]


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
        terminal(box)
        interpreter(box)
        life(box)


main()
finish()
