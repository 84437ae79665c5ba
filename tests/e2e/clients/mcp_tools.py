"""The official MCP client against `forkd mcp` on stdio, and against /mcp of a daemon if its address is given.

    mcp_tools.py FORKD URL TAG [MCP_URL]

FORKD is the program, URL the daemon, TAG a snapshot with Python. Every tool must have been called by the end. The last
line counts cases.
"""

import asyncio
import json
import os
import sys
import urllib.request

import mcp
from cases import case, finish
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

FORKD, URL, TAG = sys.argv[1:4]
HTTP = sys.argv[4] if len(sys.argv) > 4 else None
COMPAT = {
    "list_snapshots", "spawn_sandboxes", "branch_sandbox", "create_snapshot", "wait_for_text", "list_sandboxes",
    "get_sandbox", "kill_sandbox", "exec_command", "eval_code", "ping_sandbox",
}
# It boots a machine: the tests of the published package do that through the same route.
NOT_CALLED = {"create_snapshot"}


class Tools:
    """A session whose calls return the structured result, or raise the refusal."""

    def __init__(self, session):
        self.session, self.called = session, set()

    async def __call__(self, tool, /, progress=None, **arguments):
        self.called.add(tool)
        # The client checks the result against the schema of the tool.
        result = await self.session.call_tool(tool, arguments, progress_callback=progress)
        if result.is_error:
            raise Refused(result.structured_content)
        assert json.loads(result.content[0].text) == result.structured_content, result
        return result.structured_content


class Refused(Exception):
    def __init__(self, body):
        super().__init__(body["error"])
        self.code = body["code"]


async def refused(code, tools, tool, /, **arguments):
    try:
        answer = await tools(tool, **arguments)
    except Refused as error:
        assert error.code == code, (error.code, str(error))
        return str(error)
    raise AssertionError(f"not refused: {answer!r}")


def sandboxes():
    with urllib.request.urlopen(URL + "/v1/sandboxes", timeout=60) as answer:
        return {one["id"]: one for one in json.load(answer)}


async def commands(tools, box):
    with case("run a command"):
        ran = await tools("exec_command", sandbox_id=box, args=["sh", "-c", "echo out; echo err >&2; cat; exit 3"], stdin="in")
        assert (ran["stdout"], ran["stderr"], ran["exit_code"]) == ("out\nin", "err\n", 3), ran
    with case("long output is clipped"):
        ran = await tools("exec_command", sandbox_id=box, args=["seq", "100000"])
        assert ran["truncated"] and ran["stdout"].startswith("1\n2\n") and ran["stdout"].endswith("100000\n"), ran["hint"]
        assert len(ran["stdout"]) < 40_000, len(ran["stdout"])
    with case("a command that takes too long is killed"):
        ran = await tools("exec_command", sandbox_id=box, args=["sleep", "600"], timeout_secs=1)
        assert ran["timed_out"], ran
    with case("progress"):
        notes = []

        async def progress(at, _total, message):
            notes.append((at, message))

        await tools("exec_command", progress=progress, sandbox_id=box, args=["sh", "-c", "echo step 1; sleep 3"])
        assert notes and notes[-1][1] == "step 1" and notes[-1][0] > 0, notes
    with case("evaluate code"):
        assert (await tools("eval_code", sandbox_id=box, code="6 * 7"))["result"] == "42"
        await tools("eval_code", sandbox_id=box, code="kept = 'by the fork'")
        assert "ZeroDivisionError" in (await tools("eval_code", sandbox_id=box, code="1 / 0"))["error"]


async def cancel(tools, box):
    with case("a cancelled call kills its command"):
        call = asyncio.create_task(tools("exec_command", sandbox_id=box, args=["sleep", "4242"], timeout_secs=600))
        await running(tools, box, True)
        call.cancel()
        try:
            await call
        except asyncio.CancelledError:
            pass
        await running(tools, box, False)


async def running(tools, box, wanted):
    """Waits until the command of the cancelled call runs, or runs no more."""
    for _ in range(120):
        shown = await tools("exec_command", sandbox_id=box, args=["sh", "-c", "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; echo; done 2>/dev/null"])
        if ("sleep 4242 \n" in shown["stdout"]) == wanted:
            return
        await asyncio.sleep(0.25)
    raise AssertionError(f"running is not {wanted}: {shown}")


async def files(tools, box):
    with case("files"):
        await tools("write_file", sandbox_id=box, path="/tmp/a/b.txt", text="one two two\n", mode="640")
        assert (await tools("read_file", sandbox_id=box, path="/tmp/a/b.txt"))["text"] == "one two two\n"
        entry = (await tools("list_files", sandbox_id=box, path="/tmp/a"))["entries"][0]
        assert (entry["name"], entry["kind"], entry["mode"]) == ("b.txt", "file", "640"), entry
        await tools("write_file", sandbox_id=box, path="/tmp/bin", base64="/wA=")
        assert (await tools("read_file", sandbox_id=box, path="/tmp/bin"))["base64"] == "/wA="
        part = await tools("read_file", sandbox_id=box, path="/tmp/a/b.txt", offset=4, limit=3)
        assert (part["text"], part["truncated"], part["next_offset"]) == ("two", True, 7), part
    with case("edit a file"):
        edited = await tools("edit_file", sandbox_id=box, path="/tmp/a/b.txt", old="one", new="three")
        assert edited["replacements"] == 1, edited
        await refused("invalid_request", tools, "edit_file", sandbox_id=box, path="/tmp/a/b.txt", old="two", new="x")
        await refused("invalid_request", tools, "edit_file", sandbox_id=box, path="/tmp/a/b.txt", old="none", new="x")
        entry = (await tools("list_files", sandbox_id=box, path="/tmp/a"))["entries"][0]
        assert (entry["mode"], entry["size"]) == ("640", 14), entry


async def processes(tools, box):
    with case("background processes"):
        script = "echo ready >/tmp/log; echo hello; sleep 1000"
        pid = (await tools("start_process", sandbox_id=box, args=["sh", "-c", script]))["pid"]
        waited = await tools("wait_for_text", sandbox_id=box, path="/tmp/log", marker="ready", timeout_secs=60)
        assert waited["found"] and waited["last_excerpt"] == "ready\n", waited
        read = await tools("read_process", sandbox_id=box, pid=pid, wait_secs=20)
        assert (read["stdout"], read["running"], read["next_since"]) == ("hello\n", True, 6), read
        again = await tools("read_process", sandbox_id=box, pid=pid, since=6, wait_secs=0)
        assert (again["stdout"], again["next_since"]) == ("", 6), again
        await tools("stop_process", sandbox_id=box, pid=pid)
        ended = await tools("read_process", sandbox_id=box, pid=pid, since=6, wait_secs=20)
        assert (ended["running"], ended["exit_code"]) == (False, -9), ended
        never = await tools("wait_for_text", sandbox_id=box, path="/tmp/none; id", marker="x", timeout_secs=0)
        assert not never["found"], never


async def forks(tools, box):
    with case("fork"):
        (child,) = (await tools("fork_sandbox", sandbox_id=box))["result"]
        assert (await tools("eval_code", sandbox_id=child["id"], code="kept"))["result"] == "'by the fork'"
        assert child["labels"] == {"mcp": "true"} and child["expires_at_unix"], child
        await tools("kill_sandbox", sandbox_id=child["id"])
    with case("checkpoint and roll back"):
        kept = await tools("checkpoint", sandbox_id=box, name="clean")
        assert kept["name"] == "clean", kept
        await tools("exec_command", sandbox_id=box, args=["rm", "-rf", "/tmp/a"])
        await refused("file_not_found", tools, "read_file", sandbox_id=box, path="/tmp/a/b.txt")
        assert (await tools("rollback", sandbox_id=box))["to"] == "clean"
        assert (await tools("read_file", sandbox_id=box, path="/tmp/a/b.txt"))["text"] == "three two two\n"
    with case("branch"):
        cut = await tools("branch_sandbox", sandbox_id=box, tag="mcp-cut")
        assert (cut["status"], cut["branched_from"]) == ("ready", box), cut
        assert (await tools("snapshot_info", tag="mcp-cut"))["tag"] == "mcp-cut"
        assert "mcp-cut" in {one["tag"] for one in (await tools("list_snapshots"))["result"]}
        assert (await tools("delete_snapshot", tag="mcp-cut"))["deleted"]
    with case("explore"):
        ways = (await tools("explore", sandbox_id=box, commands=[["false"], ["cat", "/tmp/a/b.txt"]]))["result"]
        assert [way["ran"]["exit_code"] for way in ways] == [1, 0], ways
        assert [way["kept"] for way in ways] == [False, True] and "three" in ways[1]["ran"]["stdout"], ways
        await tools("kill_sandbox", sandbox_id=ways[1]["sandbox_id"])


async def refusals(tools, box):
    with case("bad input"):
        await refused("sandbox_not_found", tools, "get_sandbox", sandbox_id="sb-0-0")
        await refused("sandbox_not_found", tools, "exec_command", sandbox_id="../v1", args=["id"])
        await refused("snapshot_not_found", tools, "spawn_sandboxes", snapshot_tag="no-such-tag")
        for name, bad in [
            ("exec_command", {"sandbox_id": box, "args": "ls"}),
            ("exec_command", {"sandbox_id": box, "args": []}),
            ("exec_command", {"sandbox_id": box, "args": ["id"], "timeout_secs": 0}),
            ("exec_command", {"sandbox_id": box, "args": ["id"], "shell": True}),
            ("exec_command", {}),
            ("spawn_sandboxes", {"snapshot_tag": TAG, "n": 0}),
            ("spawn_sandboxes", {"snapshot_tag": TAG, "n": 100000}),
            ("write_file", {"sandbox_id": box, "path": "/x"}),
            ("write_file", {"sandbox_id": box, "path": "/x", "base64": "!"}),
            ("read_process", {"sandbox_id": box, "pid": 1, "wait_secs": 9999}),
        ]:
            await refused("invalid_request", tools, name, **bad)
        await refused("process_not_found", tools, "stop_process", sandbox_id=box, pid=1)
        await refused("limit_reached", tools, "spawn_sandboxes", snapshot_tag=TAG, n=100)
    with case("an unknown tool"):
        try:
            await tools.session.call_tool("no_such_tool", {})
            raise AssertionError("not refused")
        except mcp.MCPError as error:
            assert "no_such_tool" in str(error), error


async def resources(tools, box):
    with case("resources"):
        listed = await tools.session.list_resources()
        assert {str(one.uri) for one in listed.resources} == {"forkd://snapshots", "forkd://sandboxes"}, listed
        templates = await tools.session.list_resource_templates()
        assert len(templates.resource_templates) == 3, templates
        read = await tools.session.read_resource("forkd://sandboxes")
        assert box in {one["id"] for one in json.loads(read.contents[0].text)}
        read = await tools.session.read_resource(f"forkd://sandboxes/{box}/files/etc/hostname")
        assert read.contents[0].text, read
        for uri in ("forkd://sandboxes/sb-0-0", "forkd://other"):
            try:
                await tools.session.read_resource(uri)
                raise AssertionError(uri)
            except mcp.MCPError:
                pass


async def rest(tools, box):
    with case("lifetime, port, workspace"):
        before = sandboxes()[box]["expires_at_unix"]
        await tools("set_timeout", sandbox_id=box, ttl_secs=7200)
        assert sandboxes()[box]["expires_at_unix"] > before
        assert (await tools("port_url", sandbox_id=box, port=80))["path"].endswith(f"/{box}/proxy/80/")
        made = await tools("create_workspace", name="mcp-space", snapshot_tag=TAG)
        assert made["status"] == "running" and made["sandbox_id"], made
        assert "mcp-space" in {one["name"] for one in (await tools("list_workspaces"))["result"]}
        assert (await tools("suspend_workspace", name="mcp-space"))["status"] == "suspended"
        assert (await tools("resume_workspace", name="mcp-space"))["status"] == "running"
        assert (await tools("delete_workspace", name="mcp-space"))["deleted"]


async def whole(session):
    """Every tool, on one transport."""
    tools, box = Tools(session), None
    try:
        with case("list tools"):
            listed = {tool.name: tool for tool in (await session.list_tools()).tools}
            assert COMPAT <= set(listed) and "explore" in listed, sorted(listed)
            assert all(tool.output_schema and tool.annotations and tool.description for tool in listed.values())
            assert listed["list_sandboxes"].annotations.read_only_hint and listed["kill_sandbox"].annotations.destructive_hint
        with case("start a sandbox"):
            (made,) = (await tools("spawn_sandboxes", snapshot_tag=TAG, env={"FROM": "mcp"}))["result"]
            box = made["id"]
            assert made["state"] == "running" and made["memory_mib"] > 0, made
            assert (await tools("ping_sandbox", sandbox_id=box))["pong"]
            assert (await tools("get_sandbox", sandbox_id=box))["id"] == box
            assert box in {one["id"] for one in (await tools("list_sandboxes"))["result"]}
        for part in (commands, cancel, files, processes, forks, refusals, resources, rest):
            await part(tools, box)
        with case("every tool was called"):
            missing = set(listed) - tools.called - NOT_CALLED
            assert not missing, missing
    finally:
        if box:
            await tools("kill_sandbox", sandbox_id=box)


async def over_stdio(arguments, body):
    server = StdioServerParameters(command=FORKD, args=["mcp", *arguments], env={**os.environ, "FORKD_URL": URL})
    async with stdio_client(server) as (reader, writer), ClientSession(reader, writer) as session:
        started = await session.initialize()
        assert started.server_info.name == "forkd" and started.instructions, started
        await body(session)


async def sets(session):
    names = [tool.name for tool in (await session.list_tools()).tools]
    assert names and not {"exec_command", "kill_sandbox", "write_file"} & set(names), names
    try:
        await session.call_tool("kill_sandbox", {"sandbox_id": "x"})
        raise AssertionError("not refused")
    except mcp.MCPError:
        pass


async def over_http():
    async with streamable_http_client(HTTP) as streams, ClientSession(streams[0], streams[1]) as session:
        await session.initialize()
        tools = Tools(session)
        with case("HTTP: tools"):
            assert COMPAT <= {tool.name for tool in (await session.list_tools()).tools}
            (made,) = (await tools("spawn_sandboxes", snapshot_tag=TAG))["result"]
            ran = await tools("exec_command", sandbox_id=made["id"], args=["echo", "hello"])
            assert ran["stdout"] == "hello\n", ran
        with case("HTTP: refusals"):
            await refused("sandbox_not_found", tools, "get_sandbox", sandbox_id="sb-0-0")
            await tools("kill_sandbox", sandbox_id=made["id"])


async def main():
    before = set(sandboxes())
    await over_stdio(["--tools", "all"], whole)
    with case("read only"):
        await over_stdio(["--read-only"], sets)
    if HTTP:
        await over_http()
    with case("nothing is left"):
        assert set(sandboxes()) <= before, set(sandboxes()) - before


asyncio.run(main())
finish()
