"""The sandbox client of the OpenAI Agents SDK, and an agent without a model that works in it."""

import asyncio
import io
import os
from pathlib import Path

from agents import RunConfig, Runner
from agents.sandbox import Manifest, SandboxAgent, SandboxRunConfig
from agents.sandbox.capabilities import Shell
from agents.sandbox.entries import Dir, File
from agents.sandbox.errors import ExecTimeoutError, WorkspaceReadNotFoundError
from agents.sandbox.snapshot import LocalSnapshotSpec
from agents.testing import ModelStep, ScriptedModel, function_call, assistant_message

from forkd_sdk import Client
from forkd_sdk.integrations.openai_agents import ForkdSandboxClient, ForkdSandboxClientOptions, inner

TAG = os.environ["FORKD_TEST_TAG"]
OPTIONS = ForkdSandboxClientOptions(tag=TAG, env={"COLOR": "red"})
MANIFEST = Manifest(entries={"src": Dir(children={"a.txt": File(content=b"one\n")})})


async def session_works():
    client = ForkdSandboxClient()
    async with await client.create(manifest=MANIFEST, options=OPTIONS) as session:
        root = session.state.manifest.root
        done = await session.exec("echo $COLOR; pwd; cat src/a.txt; exit 4")
        assert (done.stdout.decode(), done.exit_code) == (f"red\n{root}\none\n", 4), done
        assert (await session.exec("id", "-un", user="daemon", shell=False)).stdout == b"daemon\n"
        assert (await session.exec("kill -9 $$")).exit_code == 137
        await session.write(Path("deep/b.bin"), io.BytesIO(b"\0\xff"))
        assert (await session.read(Path("deep/b.bin"))).read() == b"\0\xff"
        try:
            await session.read(Path("none"))
            raise AssertionError("no error")
        except WorkspaceReadNotFoundError:
            pass
        try:
            await session.exec("sleep 600", timeout=1)
            raise AssertionError("no error")
        except ExecTimeoutError:
            pass
        assert await session.running()
    assert not await session.running()


async def state_is_saved(folder, persistence):
    client = ForkdSandboxClient()
    options = OPTIONS.model_copy(update={"persistence": persistence})
    session = await client.create(manifest=MANIFEST, options=options, snapshot=LocalSnapshotSpec(base_path=folder))
    async with session:
        await session.exec("echo saved > kept; setsid sleep 4247 >/dev/null 2>&1 &")
        # The same sandbox is found while it runs.
        state = client.deserialize_session_state(client.serialize_session_state(session.state))
        assert inner(await client.resume(state)).sandbox.id == inner(session).sandbox.id
    stored = client.serialize_session_state(session.state)
    async with await client.resume(client.deserialize_session_state(stored)) as again:
        assert inner(again).sandbox.id != inner(session).sandbox.id
        assert (await again.read(Path("kept"))).read() == b"saved\n"
        alive = (await again.exec("pgrep -fc '^sleep 4247'")).stdout.strip()
        # A frozen machine has its processes, an archive has files only.
        assert alive == (b"1" if persistence == "snapshot" else b"0"), alive


async def agent_works_in_a_fork():
    client = ForkdSandboxClient()
    async with await client.create(manifest=MANIFEST, options=OPTIONS) as session:
        (fork,) = await client.fork_session(session)
        async with fork:
            await inner(session).checkpoint("before")
            command = {"cmd": "echo $((6 * 7)) > answer; cat answer"}
            model = ScriptedModel([
                ModelStep(output=[function_call("exec_command", command, call_id="1")]),
                ModelStep(output=[assistant_message("done")]),
            ])
            agent = SandboxAgent(name="coder", model=model, capabilities=[Shell()])
            config = RunConfig(sandbox=SandboxRunConfig(session=fork), tracing_disabled=True)
            result = await Runner.run(agent, "go", run_config=config)
            assert result.final_output == "done", result
            assert (await fork.read(Path("answer"))).read() == b"42\n"
        await session.exec("touch other")
        await inner(session).rollback("before")
        assert (await session.exec("ls answer other")).exit_code != 0


def test_a_session_has_commands_and_files():
    asyncio.run(session_works())


def test_a_machine_is_saved_with_its_processes(tmp_path):
    asyncio.run(state_is_saved(tmp_path, "snapshot"))
    with Client() as client:
        for snapshot in client.snapshots.list():
            if snapshot.tag.startswith("agents-") and snapshot.parent_tag == TAG:
                client.snapshots.delete(snapshot.tag, cascade=True)


def test_a_workspace_is_saved_as_an_archive(tmp_path):
    asyncio.run(state_is_saved(tmp_path, "tar"))


def test_an_agent_works_in_a_fork():
    asyncio.run(agent_works_in_a_fork())
