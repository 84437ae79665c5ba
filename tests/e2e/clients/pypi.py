"""The published Python client and MCP server, unchanged, against a running daemon with real guests.

    pypi.py URL KERNEL ROOTFS FORKD

KERNEL and ROOTFS are paths on the daemon's host, FORKD is the program on this one. Every public method of `forkd.Controller` and every tool of `forkd-mcp`
must have been called by the end: one that is never called fails the run. The last line counts cases.
"""

import asyncio
import inspect
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import time

import forkd
from cases import case, finish
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

URL, KERNEL, ROOTFS, FORKD = sys.argv[1:5]
TAG = "pypi-clients"


class Recorder:
    """A `Controller` that remembers which of its methods were called."""

    def __init__(self, inner):
        self.inner, self.called = inner, set()

    def __getattr__(self, name):
        self.called.add(name)
        return getattr(self.inner, name)


def refused(status, call, *args, **kwargs):
    try:
        answer = call(*args, **kwargs)
    except forkd.ControllerError as error:
        assert error.status == status, (error.status, error.body)
        assert isinstance(error.body, dict) and error.body["error"], error.body
        return error.body
    raise AssertionError(f"not refused: {answer!r}")


SANDBOX_KEYS = {
    "id", "snapshot_tag", "netns", "guest_addr", "created_at_unix", "pid",
    "memory_limit_mib", "has_branched", "last_branch_memory_path", "branch_count",
}


def controller_cases():
    c = Recorder(forkd.Controller(base_url=URL + "/", timeout=300))
    made = []
    with case("Controller.list_snapshots"):
        found = {one["tag"]: one for one in c.list_snapshots()}
        assert found[TAG]["status"] == "ready" and found[TAG]["bootable"] is True, found
    with case("Controller.spawn_sandboxes"):
        children = c.spawn_sandboxes(TAG, n=2, per_child_netns=True, memory_limit_mib=400, prewarm=True, live_fork=True)
        made += [one["id"] for one in children]
        assert len(children) == 2 and all(SANDBOX_KEYS <= set(one) for one in children), children
        assert all(":" in one["guest_addr"] for one in children)
    with case("Controller.spawn_sandboxes of nothing"):
        refused(404, c.spawn_sandboxes, "no-such-tag")
        refused(400, c.spawn_sandboxes, TAG, n=0)
    first, second = (made + [None, None])[:2]
    with case("Controller.list_sandboxes"):
        assert {first, second} <= {one["id"] for one in c.list_sandboxes()}
    with case("Controller.get_sandbox"):
        assert c.get_sandbox(first)["snapshot_tag"] == TAG
        refused(404, c.get_sandbox, "sb-0-0")
    with case("Controller.ping_sandbox"):
        pong = c.ping_sandbox(first)
        assert pong["pong"] is True and {"numpy_version", "pid", "agent_lang", "warmup_ready"} <= set(pong), pong
    with case("Controller.exec_command"):
        done = c.exec_command(first, ["sh", "-c", "echo out; echo err >&2; exit 3"])
        assert (done["stdout"], done["stderr"], done["exit_code"]) == ("out\n", "err\n", 3), done
        gone = c.exec_command(first, ["no-such-program"])
        assert gone["exit_code"] == 127 and "no-such-program" in gone["stderr"], gone
        slow = c.exec_command(first, ["sleep", "60"], timeout_secs=1)
        assert slow["exit_code"] != 0 and slow["timed_out"], slow
    with case("Controller.eval_code"):
        assert c.eval_code(first, "6 * 7") == {"result": "42", "error": None, "exit_code": 0, "result_json": "42"}
        bad = c.eval_code(first, "1 / 0")
        assert bad["result"] is None and "ZeroDivisionError" in bad["error"] and bad["exit_code"] == 1, bad
        c.eval_code(first, "kept = 'by the branch'")
        assert "NameError" in c.eval_code(second, "kept")["error"]
    with case("Controller.branch_sandbox"):
        cut = c.branch_sandbox(first, tag=TAG + "-cut", mode="live")
        assert cut["status"] == "ready" and cut["branched_from"] == first and cut["pause_ms"] >= 0, cut
        refused(409, c.branch_sandbox, first, tag=TAG + "-cut")
        later = c.branch_sandbox(first, mode="live", wait=False)
        assert later["tag"], later
        wait_ready(c, later["tag"])
        c.delete_snapshot(later["tag"])
        grand = c.spawn_sandboxes(TAG + "-cut")
        made.append(grand[0]["id"])
        assert c.eval_code(grand[0]["id"], "kept")["result"] == "'by the branch'"
        assert c.get_sandbox(first)["branch_count"] == 2
    with case("Controller.kill_sandbox"):
        for one in made:
            assert c.kill_sandbox(one) is None
        refused(404, c.kill_sandbox, made[0])
        assert not set(made) & {one["id"] for one in c.list_sandboxes()}
    with case("Controller.delete_snapshot"):
        assert c.delete_snapshot(TAG + "-cut") is None
        refused(404, c.delete_snapshot, TAG + "-cut")
    with case("every method of Controller was called"):
        public = {name for name, _ in inspect.getmembers(forkd.Controller, inspect.isfunction) if name[0] != "_"}
        assert public and public <= c.called, public - c.called


# A process of its own for each Sandbox: the class has one address for all of them.
SANDBOX = """
import sys, forkd
with forkd.Sandbox(tag=sys.argv[1]) as box:
    assert box.ping()["pong"] is True
    mark = sys.argv[2]
    assert box.commands.run(f"echo {mark} > /tmp/mark").exit_code == 0
    print("made", flush=True)
    sys.stdin.readline()
    done = box.commands.run(["cat", "/tmp/mark"])
    assert (done.stdout, done.stderr, done.exit_code) == (mark + "\\n", "", 0), done
    assert box.commands.run("exit 3").exit_code == 3
    assert box.eval("6 * 7") == "42"
    try:
        box.eval("1 / 0")
        raise AssertionError("no exception")
    except RuntimeError as error:
        assert "ZeroDivisionError" in str(error), error
print("ended", flush=True)
"""


def without_target():
    env = {**os.environ, "FORKD_URL": URL, "PATH": os.path.dirname(FORKD) + ":" + os.environ["PATH"]}
    env.pop("FORKD_TARGET", None)
    return env


def has_default_address():
    shown = subprocess.run(["ip", "-4", "address", "show", "lo"], stdout=subprocess.PIPE, text=True, check=True)
    return "10.42.0.2" in shown.stdout


def sandbox_class(mark, target):
    env = without_target()
    if target:
        env["FORKD_TARGET"] = target
    return subprocess.Popen(
        [sys.executable, "-c", SANDBOX, TAG, mark], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def sandbox_cases():
    c = forkd.Controller(base_url=URL, timeout=300)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        target = "127.0.0.1:%d" % free.getsockname()[1]

    def together(marks, target, left=0):
        boxes = [sandbox_class(mark, target) for mark in marks]
        try:
            assert [box.stdout.readline() for box in boxes] == ["made\n"] * len(boxes)
            for box in boxes:
                box.stdin.write("go\n")
                box.stdin.flush()
            assert [box.stdout.readline() for box in boxes] == ["ended\n"] * len(boxes)
            assert [box.wait(60) for box in boxes] == [0] * len(boxes)
        finally:
            for box in boxes:
                box.kill()
                box.wait()
        for _ in range(600):
            if len([one for one in c.list_sandboxes() if one["snapshot_tag"] == TAG]) == left:
                return
            time.sleep(0.1)
        raise AssertionError("a sandbox outlives its object")

    with case("Sandbox, three of three processes at once"):
        together(["one", "two", "three"], target)
    if os.geteuid() == 0:
        with case("Sandbox at its default address"):
            # The class connects as soon as it has started its `forkd fork`. Without the address on this host, its first
            # attempt would leave the host. Another `forkd fork` adds the address before.
            first = subprocess.Popen([FORKD, "fork", "--tag", TAG, "-n", "1", "--settle-secs", "600"], env=without_target())
            try:
                for _ in range(600):
                    if has_default_address():
                        break
                    time.sleep(0.1)
                assert has_default_address()
                together(["four"], None, left=1)
                assert has_default_address()
            finally:
                first.terminate()
                first.wait(60)
            assert not has_default_address()


def wait_ready(c, tag):
    for _ in range(600):
        if any(one["tag"] == tag and one["status"] == "ready" for one in c.list_snapshots()):
            return
        time.sleep(0.1)
    raise AssertionError(f"{tag} is not ready after a minute")


def content(result):
    """The result of a tool as a Python value."""
    assert not result.isError, result.content
    if result.structuredContent is not None:
        value = result.structuredContent
        return value["result"] if set(value) == {"result"} else value
    values = [json.loads(part.text) for part in result.content]
    return values[0] if len(values) == 1 else values


async def mcp_cases(create):
    server = StdioServerParameters(
        command=os.path.join(os.path.dirname(sys.executable), "forkd-mcp"),
        env={**os.environ, "FORKD_URL": URL, "FORKD_HTTP_TIMEOUT": "300"},
    )
    async with stdio_client(server) as (read, write), ClientSession(read, write) as session:
        await session.initialize()
        tools = {tool.name for tool in (await session.list_tools()).tools}
        called = set()

        async def call(name, **arguments):
            called.add(name)
            return content(await session.call_tool(name, arguments))

        if create:
            with case("mcp create_snapshot"):
                made = await call("create_snapshot", tag=TAG, kernel=KERNEL, rootfs=ROOTFS, rw=True, boot_wait_secs=1)
                assert made["tag"] == TAG and made["status"] == "ready", made
            return
        called.add("create_snapshot")
        with case("mcp list_snapshots"):
            assert TAG in {one["tag"] for one in await call("list_snapshots")}
        sandbox = None
        with case("mcp spawn_sandboxes"):
            children = await call("spawn_sandboxes", snapshot_tag=TAG)
            sandbox = children[0]["id"]
            limit = children[0]["memory_limit_mib"]
            assert limit in (None, 256), limit
        with case("mcp list_sandboxes, get_sandbox"):
            assert sandbox in {one["id"] for one in await call("list_sandboxes")}
            assert (await call("get_sandbox", sandbox_id=sandbox))["id"] == sandbox
        with case("mcp ping_sandbox"):
            assert (await call("ping_sandbox", sandbox_id=sandbox))["pong"] is True
        with case("mcp exec_command"):
            done = await call("exec_command", sandbox_id=sandbox, args=["sh", "-c", "echo it is done > /tmp/marker"])
            assert done["exit_code"] == 0, done
        with case("mcp wait_for_text"):
            seen = await call("wait_for_text", sandbox_id=sandbox, path="/tmp/marker", marker="done", timeout_secs=30)
            assert seen["found"] is True, seen
        with case("mcp eval_code"):
            assert (await call("eval_code", sandbox_id=sandbox, code="[1, 2] * 2"))["result"] == "[1, 2, 1, 2]"
        with case("mcp branch_sandbox"):
            cut = await call("branch_sandbox", sandbox_id=sandbox, tag=TAG + "-mcp", diff=True)
            assert cut["tag"] == TAG + "-mcp" and cut["status"] == "ready", cut
        with case("mcp kill_sandbox"):
            assert (await call("kill_sandbox", sandbox_id=sandbox))["killed"] is True
        with case("every tool of forkd-mcp was called"):
            assert tools and tools <= called, tools - called


def clean():
    c = forkd.Controller(base_url=URL, timeout=60)
    for one in c.list_sandboxes():
        if one["snapshot_tag"].startswith(TAG):
            c.kill_sandbox(one["id"])
    for tag in (TAG + "-cut", TAG + "-mcp", TAG):
        # A run that was cut off may have left branches with names of the daemon's choice.
        request = urllib.request.Request(f"{URL}/v1/snapshots/{tag}?cascade=true", method="DELETE")
        try:
            urllib.request.urlopen(request, timeout=60).close()
        except urllib.error.HTTPError as error:
            assert error.code == 404, error.read()


clean()
asyncio.run(mcp_cases(create=True))
controller_cases()
asyncio.run(mcp_cases(create=False))
sandbox_cases()
with case("nothing is left behind"):
    clean()
    left = [one for one in forkd.Controller(base_url=URL).list_snapshots() if one["tag"].startswith(TAG)]
    assert not left, left
finish()
