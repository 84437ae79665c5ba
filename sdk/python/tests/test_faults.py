"""The client against faults on the wire."""

import asyncio
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

from wire import SILENCE, Script, answer, sandbox, stream

import forkd_sdk
from forkd_sdk import AsyncClient, AsyncSandbox, Client, Sandbox, errors
from forkd_sdk.models import SandboxInfo

BUSY = {"error": "too many", "code": "rate_limited"}
STARTED, EXIT = {"type": "started", "pid": 7}, {"type": "exit", "exit_code": 0, "timed_out": False}


def out(text):
    return {"type": "stdout", "text": text}


def bound(server, retries=3):
    return Sandbox.bind(Client(server.url, retries=retries), SandboxInfo.read(sandbox()))


def rest_of(connection):
    """Waits for the end of a connection. A client that closes before it has read everything resets it."""
    try:
        return connection.recv(1)
    except ConnectionResetError:
        return b""


class Retries(unittest.TestCase):
    def test_a_refused_create_is_repeated_with_the_same_key(self):
        with Script(answer(429, BUSY, retry_after="0.01"), b"", answer(201, [sandbox()])) as server:
            self.assertEqual(Sandbox.create("py", client=Client(server.url)).id, "sb1")
        keys = {headers["idempotency-key"] for _, headers, _ in server.requests}
        self.assertEqual((len(server.requests), len(keys)), (3, 1))

    def test_two_creates_have_two_keys(self):
        with Script(answer(201, [sandbox()]), answer(201, [sandbox()])) as server:
            client = Client(server.url)
            Sandbox.create("py", client=client)
            Sandbox.create("py", client=client)
        self.assertEqual(len({headers["idempotency-key"] for _, headers, _ in server.requests}), 2)

    def test_a_fork_that_may_have_run_is_repeated_with_the_same_key(self):
        with Script(b"", answer(201, [sandbox("sb2")])) as server:
            self.assertEqual([child.id for child in bound(server).fork()], ["sb2"])
        self.assertEqual(len({headers["idempotency-key"] for _, headers, _ in server.requests}), 1)
        self.assertEqual(len(server.requests), 2)

    def test_a_command_that_may_have_run_is_not_repeated(self):
        with Script(b"", stream(STARTED, EXIT)) as server:
            with self.assertRaises(errors.StreamCut):
                bound(server).commands.run("true")
        self.assertEqual(len(server.requests), 1)

    def test_a_command_that_was_refused_before_it_ran_is_repeated(self):
        with Script(answer(429, BUSY, retry_after="0.01"), stream(STARTED, out("x"), EXIT)) as server:
            self.assertEqual(bound(server).commands.run("true").stdout, "x")
        self.assertEqual(len(server.requests), 2)

    def test_a_code_in_the_interpreter_is_not_repeated_after_a_503(self):
        with Script(answer(503, {"error": "full", "code": "busy"}), answer(200, {"result": "1", "error": None, "exit_code": 0})) as server:
            with self.assertRaises(errors.Busy):
                bound(server).eval("1")
        self.assertEqual(len(server.requests), 1)

    def test_retries_end(self):
        with Script(*[answer(429, BUSY, retry_after="0.01")] * 5) as server:
            with self.assertRaises(errors.Busy) as caught:
                Client(server.url, retries=2).sandboxes()
        self.assertEqual((len(server.requests), caught.exception.status), (3, 429))

    def test_a_final_refusal_is_not_repeated(self):
        body = {"error": "there is no sandbox sb1", "code": "sandbox_not_found", "hint": "ls", "request_id": "r1"}
        with Script(answer(404, body)) as server:
            with self.assertRaises(errors.SandboxNotFound) as caught:
                Sandbox.connect("sb1", client=Client(server.url))
        error = caught.exception
        self.assertEqual((error.code, error.hint, error.request_id, len(server.requests)), ("sandbox_not_found", "ls", "r1", 1))
        self.assertIsInstance(error, errors.ControllerError)

    def test_a_daemon_that_is_not_there(self):
        with Script() as server:
            pass
        with self.assertRaises(errors.ConnectionFailed):
            Client(server.url, retries=1).version()


class Streams(unittest.TestCase):
    def test_a_stream_without_its_last_frame_is_an_error_with_the_pid(self):
        for end in (True, False):
            with self.subTest(end=end), Script(stream(STARTED, out("part"), end=end)) as server:
                with self.assertRaises(errors.StreamCut) as caught:
                    bound(server).commands.run("true")
                self.assertEqual(caught.exception.pid, 7)

    def test_frames_of_a_newer_daemon_are_ignored(self):
        with Script(stream({"type": "keepalive"}, STARTED, {"type": "weather"}, out("a"), {"type": "stdout", "base64": "/w=="}, EXIT)) as server:
            self.assertEqual(bound(server).commands.run("true").stdout, "a\ufffd")

    def test_an_error_frame_is_the_error_of_its_code(self):
        with Script(stream(STARTED, {"type": "error", "error": "the VM ended", "code": "sandbox_gone"})) as server:
            with self.assertRaises(errors.SandboxGone):
                bound(server).commands.run("true")

    def test_a_malformed_line_is_an_error(self):
        for line in (b"{not json\n", b"[]\n", b'{"type":"exit"}\n', b'{"type":"stdout","base64":"!"}\n'):
            with self.subTest(line=line), Script(stream(line)) as server:
                with self.assertRaises(errors.ProtocolError):
                    bound(server).commands.run("true")

    def test_a_silent_stream_ends(self):
        with Script(SILENCE) as server:
            with self.assertRaises(errors.SandboxUnreachable):
                next(Client(server.url).http.lines("GET", "/v1/events", silence=0.2))

    def test_a_watch_that_ends_by_itself_is_an_error(self):
        with Script(stream({"change": "created", "path": "/a"})) as server:
            with self.assertRaises(errors.StreamCut), bound(server).files.watch("/") as changes:
                self.assertEqual(next(changes).path, "/a")
                next(changes)

    def test_events_that_end_by_themselves_are_an_error(self):
        with Script(stream({"type": "keepalive"})) as server:
            with self.assertRaises(errors.StreamCut):
                next(Client(server.url).events())

    def test_an_expired_timeout_has_the_output_until_then(self):
        with Script(stream(STARTED, out("part"), {"type": "exit", "exit_code": -15, "timed_out": True})) as server:
            with self.assertRaises(errors.CommandTimeout) as caught:
                bound(server).commands.run("sleep 9", timeout=1)
        self.assertEqual(caught.exception.result.stdout, "part")


class Answers(unittest.TestCase):
    def test_every_code_of_the_document_has_a_class(self):
        document = pathlib.Path(__file__).parents[3] / "openapi" / "v1.json"
        codes = json.loads(document.read_text())["components"]["schemas"]["ErrorCode"]["enum"]
        plain = [code for code in codes if type(errors.api_error(500, {"code": code}, "")) is errors.ApiError]
        self.assertEqual(plain, ["internal"])

    def test_children_that_run_are_not_lost_when_others_fail(self):
        failed = sandbox("sb3", state="failed", error={"error": "no memory", "code": "launch_failed"})
        with Script(answer(201, [sandbox("sb2"), failed])) as server:
            with self.assertRaises(errors.ForkError) as caught:
                bound(server).fork(2)
        self.assertEqual([child.id for child in caught.exception.children], ["sb2"])
        self.assertIsInstance(caught.exception.errors[0], errors.LaunchFailed)

    def test_a_malformed_record_is_an_error(self):
        with Script(answer(200, [{"id": 5}])) as server:
            with self.assertRaises(errors.ProtocolError):
                Client(server.url).sandboxes()

    def test_names_of_the_guest_do_not_leave_the_directory(self):
        entry = {"kind": "file", "size": 1, "mode": 0o644, "modified_unix": 1}
        names = ["../evil", "..", "good"]
        with Script(answer(200, [{"name": name, **entry} for name in names]), answer(200, "x")) as server:
            with tempfile.TemporaryDirectory() as work:
                done = bound(server).files.download_dir("/d", pathlib.Path(work, "in"))
                self.assertEqual(sorted(path.name for path in pathlib.Path(work).rglob("*")), ["good", "in"])
        self.assertEqual((done.files, len(done.skipped)), (1, 2))

    def test_explore_deletes_losers_and_raises_if_every_run_fails(self):
        deleted = answer(204)
        with Script(answer(201, [sandbox("a"), sandbox("b")]), deleted) as server:
            best = bound(server).explore([1, 2], lambda _, option: option, float)
            self.assertEqual((best.sandbox.id, best.score), ("b", 2.0))
            self.assertTrue(server.requests[1][0].startswith("DELETE /v1/sandboxes/a "))
        with Script(answer(201, [sandbox("a"), sandbox("b")]), deleted, deleted) as server:
            with self.assertRaises(errors.ExploreError) as caught:
                bound(server).explore([1, 2], lambda _, option: option // 0, float)
            self.assertEqual((len(caught.exception.errors), len(server.requests)), (2, 3))

    def test_the_tree_escapes_names(self):
        box = Sandbox.bind(Client("http://127.0.0.1:1"), SandboxInfo.read(sandbox(snapshot_tag="<script>")))
        self.assertNotIn("<script>", box._repr_html_())


class Addresses(unittest.TestCase):
    def test_a_unix_socket_and_a_token(self):
        with tempfile.TemporaryDirectory() as work, Script(answer(200, {"version": "1"}), path=f"{work}/s") as server:
            self.assertEqual(Client(server.url, "secret").version(), "1")
        self.assertEqual(server.requests[0][1]["authorization"], "Bearer secret")

    def test_a_malformed_address_is_refused(self):
        for text in ("127.0.0.1:8889", "ftp://x", "unix://relative", "http://a/b", "http://"):
            with self.subTest(text=text), self.assertRaises(errors.InvalidAddress):
                Client(text)

    def test_the_import_loads_no_http_library(self):
        code = "import sys, forkd_sdk; print([m for m in ('httpx2', 'websockets', 'asyncio.tasks') if m in sys.modules][:2])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        self.assertNotIn("httpx2", done.stdout)
        self.assertNotIn("websockets", done.stdout)


class Asynchronous(unittest.IsolatedAsyncioTestCase):
    async def test_the_same_faults(self):
        with Script(answer(429, BUSY, retry_after="0.01"), answer(201, [sandbox()]), stream(STARTED, end=False)) as server:
            async with AsyncClient(server.url) as client:
                box = await AsyncSandbox.create("py", client=client)
                with self.assertRaises(errors.StreamCut) as caught:
                    await box.commands.run("true")
        self.assertEqual(caught.exception.pid, 7)

    async def test_a_cancelled_command_closes_its_connection(self):
        with Script(answer(201, [sandbox()]), SILENCE) as server:
            async with AsyncClient(server.url) as client:
                box = await AsyncSandbox.create("py", client=client)
                task = asyncio.create_task(box.commands.run("sleep 9"))
                while not server.held:
                    await asyncio.sleep(0.01)
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task
                # The end of the connection is what makes the daemon kill the command.
                self.assertEqual(await asyncio.to_thread(rest_of, server.held[0]), b"")

    def test_both_clients_have_the_same_methods(self):
        for name in ("Client", "Sandbox", "Process", "Session"):
            blocking, twin = getattr(forkd_sdk, name), getattr(forkd_sdk, f"Async{name}")
            names = [{n.replace("aclose", "close") for n in dir(kind) if not n.startswith("_")} for kind in (blocking, twin)]
            self.assertEqual(*names)


if __name__ == "__main__":
    unittest.main()
