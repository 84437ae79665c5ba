"""Faults under the Python client: the sandbox, the daemon or the network path is lost while calls run.

    faults.py URL TAG sync|async LEVEL RUN START

Every call ends with a typed error and none hangs. LEVEL is `quick`, or `whole`, which also cuts the network path: that
takes the 45 s after which a client gives up. RUN is a command (split at spaces) that runs its arguments on the daemon's host,
START a shell command that starts the daemon again. The last line counts cases.
"""

import asyncio
import contextlib
import inspect
import socket
import subprocess
import sys
import threading
import time
import traceback
import urllib.parse

from forkd_sdk import AgentFailed, AsyncClient, AsyncSandbox, Client, ForkdError, Sandbox, SandboxGone, SandboxNotFound, StreamCut

URL, TAG, KIND, LEVEL, RUN, START = sys.argv[1:]
HOST, PORT = urllib.parse.urlsplit(URL).hostname, urllib.parse.urlsplit(URL).port
# The client gives up after 45 s of silence. An emulated machine is slow, so the calls get more before they count as hanging.
PATIENCE = 90
passed, failed = [], []
sync = KIND == "sync"


class Path:
    """A way to the daemon that can be cut: bytes are then neither passed on nor refused."""

    def __init__(self):
        self.cut = threading.Event()
        self.lose_answers = 0
        self.sockets = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = "http://127.0.0.1:%d" % self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection((HOST, PORT))
            self.sockets += [near, far]
            threading.Thread(target=self._pump, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, True), daemon=True).start()

    def _pump(self, source, target, answers):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.cut.is_set():
                    return
                if answers and self.lose_answers:
                    # The daemon has done the work, and the client does not learn of it.
                    self.lose_answers -= 1
                    break
                target.sendall(data)
            for one in (source, target):
                one.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.listener.close()
        for one in self.sockets:
            one.close()


async def call(function, *arguments, **options):
    """Awaits a call of either client. A blocking one runs in a thread."""
    if sync:
        return await asyncio.to_thread(function, *arguments, **options)
    result = function(*arguments, **options)
    return await result if inspect.isawaitable(result) else result


# The calls that a fault strikes. Each says when it runs, and returns only by an error.


async def run(box, ready):
    with contextlib.suppress(StopAsyncIteration):
        await call(box.commands.run, "echo up; exec sleep 4250", 600, on_stdout=lambda _: ready())


async def stream(box, ready):
    if sync:
        def follow():
            for frame in box.commands.stream("exec sleep 4251", 600):
                ready()
        return await asyncio.to_thread(follow)
    async for frame in box.commands.stream("exec sleep 4251", 600):
        ready()


async def pty(box, ready):
    session = await call(box.pty.create, "exec sleep 4252")
    ready()
    await call(session.wait)


async def watch(box, ready):
    if sync:
        def follow():
            with box.files.watch("/tmp") as changes:
                ready()
                for _ in changes:
                    pass
        return await asyncio.to_thread(follow)
    async with box.files.watch("/tmp") as changes:
        ready()
        async for _ in changes:
            pass


CALLS = (run, stream, pty, watch)


async def strike(name, url, fault, allowed=(ForkdError,)):
    """Starts every call, lets the fault happen, and wants a typed error of each."""
    client = Client(url) if sync else AsyncClient(url)
    box = await call((Sandbox if sync else AsyncSandbox).create, TAG, client=client, ttl=600)
    loop = asyncio.get_running_loop()
    started = [asyncio.Event() for _ in CALLS]
    tasks = [asyncio.create_task(one(box, lambda event=event: loop.call_soon_threadsafe(event.set))) for one, event in zip(CALLS, started)]
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in started)), PATIENCE)
    begin = time.monotonic()
    await asyncio.to_thread(fault, box)
    done, hanging = await asyncio.wait(tasks, timeout=PATIENCE)
    took = time.monotonic() - begin
    for one, task in zip(CALLS, tasks):
        label = f"{name}: {one.__name__}"
        error = task.exception() if task in done else None
        good = isinstance(error, allowed)
        (passed if good else failed).append(label)
        print(f"{'ok  ' if good else 'FAIL'} {label}: {'hangs' if task in hanging else type(error).__name__ + ': ' + str(error)[:100]}")
    print(f"     all ended {took:.1f} s after the fault")
    return box


def on_host(*command):
    subprocess.run([*RUN.split(" "), *command], stdin=subprocess.DEVNULL, check=False)


async def sandbox_killed():
    await strike("the sandbox is deleted", URL, lambda box: Client(URL).http.call("DELETE", f"/v1/sandboxes/{box.id}"),
                 (AgentFailed, SandboxGone, SandboxNotFound, StreamCut))


async def daemon_killed():
    box = await strike("the daemon is killed", URL, lambda _: on_host("pkill", "-KILL", "-x", "forkd-controlle"))
    subprocess.run(START, shell=True, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    # The next daemon has adopted the sandbox: one that is gone would be an error here.
    await asyncio.to_thread(Client(URL).http.call, "DELETE", f"/v1/sandboxes/{box.id}")


async def path_cut():
    path = Path()
    box = await strike("the network path is cut", path.url, lambda _: path.cut.set(), (StreamCut,))
    path.close()
    await asyncio.to_thread(Client(URL).http.call, "DELETE", f"/v1/sandboxes/{box.id}")


async def until_gone(box, marker):
    for _ in range(600):
        found = await call(box.commands.run, ["pgrep", "-fx", marker])
        if found.exit_code != 0:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{marker} still runs")


async def cancelled():
    client = Client(URL) if sync else AsyncClient(URL)
    box = await call((Sandbox if sync else AsyncSandbox).create, TAG, client=client, ttl=600)
    if sync:
        # A blocking call is cancelled by an exception, here in its callback.
        try:
            await call(box.commands.run, "echo up; exec sleep 4260", 600, on_stdout=lambda _: 1 // 0)
            raise AssertionError("the call came to an end")
        except ZeroDivisionError:
            pass
    else:
        up = asyncio.Event()
        task = asyncio.create_task(box.commands.run("echo up; exec sleep 4260", 600, on_stdout=lambda _: up.set()))
        await up.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled(), task
    await until_gone(box, "sleep 4260")
    await call(box.kill)


async def create_retried():
    path = Path()
    path.lose_answers = 1
    label = {"faults": f"{KIND}-{time.time_ns()}"}
    client = Client(path.url) if sync else AsyncClient(path.url)
    box = await call((Sandbox if sync else AsyncSandbox).create, TAG, client=client, labels=label, ttl=600)
    assert path.lose_answers == 0, "no answer was lost"
    found = await asyncio.to_thread(Client(URL).sandboxes, labels=label)
    assert [one.id for one in found] == [box.id], found
    await call(box.kill)
    path.close()


async def main():
    faults = [("cancel", cancelled), ("a create is retried", create_retried), ("", sandbox_killed), ("", daemon_killed)]
    if LEVEL == "whole":
        faults.insert(0, ("", path_cut))
    for name, fault in faults:
        try:
            await fault()
        except Exception:
            failed.append(name)
            print(f"FAIL {name or fault.__name__}")
            traceback.print_exc(file=sys.stdout)
        else:
            if name:
                passed.append(name)
                print(f"ok   {name}")
        sys.stdout.flush()
    print(f"{len(passed)} passed, {len(failed)} failed", flush=True)


asyncio.run(main())
