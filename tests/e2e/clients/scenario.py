"""Runs sdk/conformance/scenario.json with the Python client or the command line, against a daemon with real guests.

    scenario.py SCENARIO URL TAG sync|async
    scenario.py SCENARIO URL TAG cli FORKD

Prints a line per step. The last line counts them.
"""

import asyncio
import inspect
import json
import os
import pathlib
import subprocess
import sys
import tempfile

SCENARIO, URL, TAG, CLIENT = sys.argv[1:5]
RUN = f"{CLIENT}-{os.getpid()}"


class Refused(Exception):
    """The daemon refused with this code."""


class Raised(Exception):
    """Code in the guest raised this exception."""


async def value(result):
    """The result of either form of the client."""
    return await result if inspect.isawaitable(result) else result


class Sdk:
    """The Python client. One text for both forms."""

    def __init__(self):
        import forkd_sdk

        self.sdk = forkd_sdk
        prefix = "Async" if CLIENT == "async" else ""
        self.kind = getattr(forkd_sdk, f"{prefix}Sandbox")
        self.client = getattr(forkd_sdk, f"{prefix}Client")(URL, timeout=300)
        self.boxes = {}

    async def do(self, step):
        try:
            return await getattr(self, step["do"])(step, self.boxes.get(step.get("on")))
        except self.sdk.ApiError as error:
            raise Refused(error.code) from error
        except self.sdk.EvalError as error:
            raise Raised(str(error)) from error

    async def create(self, step, _):
        self.boxes[step["as"]] = await value(self.kind.create(step["tag"], ttl=600, client=self.client))

    async def fork(self, step, box):
        children = await value(box.fork(len(step["as"]), ttl=600))
        self.boxes.update(zip(step["as"], children))

    async def run(self, step, box):
        options = {name: step[name] for name in ("env", "cwd", "user") if name in step}
        return shown(await value(box.commands.run(step["args"], **options)))

    async def background(self, step, box):
        process = await value(box.commands.start(step["args"]))
        return shown(await value(process.wait()))

    async def pipe(self, step, box):
        session = await value(box.commands.open(step["args"]))
        await value(session.write(step["input"]))
        await value(session.close_stdin())
        return shown(await value(session.wait()))

    async def write(self, step, box):
        await value(box.files.write(step["path"], step["text"]))

    async def read(self, step, box):
        return await value(box.files.read(step["path"]))

    async def list(self, step, box):
        return [entry.name for entry in await value(box.files.list(step["path"]))]

    async def eval(self, step, box):
        return await value(box.eval(step["code"]))

    async def checkpoint(self, step, box):
        return (await value(box.checkpoint(step["name"]))).name

    async def rollback(self, step, box):
        return (await value(box.rollback(step["to"]))).to

    async def branch(self, step, box):
        return (await value(box.branch(step["tag"]))).tag

    async def kill(self, _, box):
        await value(box.kill())

    async def delete_snapshot(self, step, _):
        await value(self.client.snapshots.delete(step["tag"]))


def shown(result):
    return {"stdout": result.stdout, "stderr": result.stderr, "exit_code": result.exit_code}


class Cli:
    """The command line, with `--json`."""

    def __init__(self, program):
        self.program = program
        self.boxes = {}

    def ask(self, *args, text=None):
        command = [self.program, *args]
        environment = {**os.environ, "FORKD_URL": URL}
        done = subprocess.run(command, input=text or "", capture_output=True, text=True, env=environment, check=False)
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            raise AssertionError(f"{args}: {done.returncode} {done.stdout} {done.stderr}") from None
        # A command for several objects answers with a list.
        first = answer[0] if isinstance(answer, list) and answer else answer
        if isinstance(first, dict) and first.get("code"):
            raise Refused(first["code"])
        return answer

    async def do(self, step):
        return getattr(self, step["do"])(step, self.boxes.get(step.get("on")))

    def create(self, step, _):
        self.boxes[step["as"]] = self.ask("spawn", "--json", "--tag", step["tag"], "--timeout", "10m")[0]["id"]

    def run(self, step, box):
        options = [part for name, text in step.get("env", {}).items() for part in ("-e", f"{name}={text}")]
        options += [part for flag, name in (("-w", "cwd"), ("-u", "user")) if name in step for part in (flag, step[name])]
        answer = self.ask("exec", "--json", *options, box, "--", *step["args"])
        return {name: answer[name] for name in ("stdout", "stderr", "exit_code")}

    def write(self, step, box):
        with tempfile.TemporaryDirectory() as work:
            path = pathlib.Path(work, "file")
            path.write_text(step["text"])
            self.ask("cp", "--json", str(path), f"{box}:{step['path']}")

    def read(self, step, box):
        with tempfile.TemporaryDirectory() as work:
            path = pathlib.Path(work, "file")
            self.ask("cp", "--json", f"{box}:{step['path']}", str(path))
            return path.read_text()

    def eval(self, step, box):
        answer = self.ask("eval", "--json", box, "--", step["code"])
        if answer.get("error"):
            raise Raised(answer["error"])
        return json.loads(answer["result_json"]) if "result_json" in answer else answer["result"]

    def checkpoint(self, step, box):
        return self.ask("checkpoint", box, "--name", step["name"], "--json")["name"]

    def rollback(self, step, box):
        return self.ask("rollback", box, "--to", step["to"], "--json")["to"]

    def branch(self, step, box):
        return self.ask("branch", box, "--tag", step["tag"], "--json")["tag"]

    def kill(self, _, box):
        self.ask("kill", "--json", box)

    def delete_snapshot(self, step, _):
        self.ask("rmi", "--json", step["tag"])


async def check(client, step):
    """What is wrong with the step, or None."""
    try:
        got = await client.do(step)
    except Refused as error:
        return None if str(error) == step.get("error") else f"refused with {error}"
    except Raised as error:
        return None if str(error) == step.get("expect_exception") else f"raised {error}"
    if "error" in step or "expect_exception" in step:
        return f"not refused: {got!r}"
    if "expect" in step and got != step["expect"]:
        return f"got {got!r}"
    if "expect_exit" in step and got["exit_code"] != step["expect_exit"]:
        return f"got {got!r}"
    if "expect_size" in step and len(got["stdout"]) != step["expect_size"]:
        return f"got {len(got['stdout'])} characters"
    return None


async def main():
    text = pathlib.Path(SCENARIO).read_text().replace("$TAG", TAG).replace("$RUN", RUN)
    client = Cli(sys.argv[5]) if CLIENT == "cli" else Sdk()
    passed = failed = 0
    for number, step in enumerate(json.loads(text), 1):
        if CLIENT in step.get("without", []):
            continue
        try:
            wrong = await check(client, step)
        except Exception as error:
            wrong = repr(error)
        passed, failed = passed + (wrong is None), failed + (wrong is not None)
        print(f"{'ok  ' if wrong is None else 'FAIL'} {number} {step['do']}{': ' + wrong if wrong else ''}", flush=True)
    print(f"{passed} passed, {failed} failed")


asyncio.run(main())
