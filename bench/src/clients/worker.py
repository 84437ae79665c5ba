"""Measures one client of the daemon. Prints one JSON object a line: client, measure, milliseconds.

    worker.py rest|python-sync|python-async|e2b URL TAG ROUNDS COMMANDS CALLS

A measure that the client does not have is left out.
"""

import asyncio
import http.client
import json
import os
import sys
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor

CLIENT, URL, TAG, *NUMBERS = sys.argv[1:]
ROUNDS, COMMANDS, CALLS = map(int, NUMBERS)
COPIES = 8
TOKEN = os.environ.get("FORKD_TOKEN")
LABELS = {"bench": "clients"}


def report(measure, seconds):
    print(json.dumps({"client": CLIENT, "measure": measure, "ms": [value * 1000 for value in seconds]}), flush=True)


class Raw:
    """Requests on one connection, without a library."""

    def __init__(self):
        parts = urllib.parse.urlsplit(URL)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self.connection = kind(parts.hostname, parts.port, timeout=600)
        self.headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {TOKEN}"} if TOKEN else {})}

    def ask(self, method, path, body=None, headers=None):
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body)
        self.connection.request(method, path, content, {**self.headers, **(headers or {})})
        answer = self.connection.getresponse()
        data = answer.read()
        if answer.status >= 300:
            sys.exit(f"{method} {path}: {answer.status} {data[:200]!r}")
        return data

    def json(self, *arguments):
        data = self.ask(*arguments)
        return json.loads(data) if data else None


def timed(function):
    begin = time.perf_counter()
    value = function()
    return time.perf_counter() - begin, value


def pairs(ours, raw):
    """Alternates two calls, so that both meet the same load."""
    mine, theirs = [], []
    for _ in range(CALLS):
        theirs.append(timed(raw)[0])
        mine.append(timed(ours)[0])
    report("call", mine)
    report("raw call", theirs)


def rest():
    raw = Raw()

    def create():
        return raw.json("POST", "/v1/sandboxes", {"snapshot_tag": TAG, "n": 1, "labels": LABELS})[0]["id"]

    def run(ask, box):
        answer = ask.json("POST", f"/v1/sandboxes/{box}/exec", {"args": ["true"]})
        assert answer["exit_code"] == 0, answer

    first = []
    for _ in range(ROUNDS):
        took, box = timed(lambda: (lambda box: (run(raw, box), box)[1])(create()))
        first.append(took)
        raw.ask("DELETE", f"/v1/sandboxes/{box}")
    report("create", first)
    box = create()
    forks = []
    for _ in range(ROUNDS):
        took, children = timed(lambda: raw.json("POST", f"/v1/sandboxes/{box}/fork", {"n": COPIES}))
        forks.append(took)
        for child in children:
            raw.ask("DELETE", f"/v1/sandboxes/{child['id']}")
    report("fork", forks)
    point = raw.json("POST", f"/v1/sandboxes/{box}/checkpoints", {})["name"]
    report("rollback", [timed(lambda: raw.json("POST", f"/v1/sandboxes/{box}/rollback", {"to": point}))[0] for _ in range(ROUNDS)])
    run(raw, box)
    with ThreadPoolExecutor(COMMANDS) as pool:
        report("commands", [timed(lambda: list(pool.map(lambda _: run(Raw(), box), range(COMMANDS))))[0]])
    run(raw, box)
    planes(raw, box, run)
    raw.ask("DELETE", f"/v1/sandboxes/{box}")


def planes(raw, box, run):
    """The same command through both planes, with nothing between this program and the daemon."""
    message = json.dumps({"process": {"cmd": "true", "args": [], "envs": {}}}).encode()
    body = b"\0" + len(message).to_bytes(4, "big") + message
    other = Raw()
    key = {"X-API-KEY": TOKEN or "e2b_" + "0" * 40}
    token = other.json("GET", f"/sandboxes/{box}", None, key).get("envdAccessToken")
    headers = {"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1", "E2b-Sandbox-Id": box,
               "E2b-Sandbox-Port": "49983", **({"X-Access-Token": token} if token else {})}

    def through_e2b():
        assert b"end" in other.ask("POST", "/process.Process/Start", body, headers)

    through_e2b()
    ours, theirs = [], []
    for _ in range(CALLS):
        ours.append(timed(lambda: run(raw, box))[0])
        theirs.append(timed(through_e2b)[0])
    report("command, REST", ours)
    report("command, E2B plane", theirs)


def python_sync():
    from forkd_sdk import Client, Sandbox

    client = Client(URL)

    def create():
        box = Sandbox.create(TAG, client=client, labels=LABELS)
        box.commands.run(["true"], check=True)
        return box

    first = []
    for _ in range(ROUNDS):
        took, box = timed(create)
        first.append(took)
        box.kill()
    report("create", first)
    box = create()
    forks = []
    for _ in range(ROUNDS):
        took, children = timed(lambda: box.fork(COPIES))
        forks.append(took)
        for child in children:
            child.kill()
    report("fork", forks)
    point = box.checkpoint()
    report("rollback", [timed(lambda: box.rollback(point))[0] for _ in range(ROUNDS)])
    box.commands.run(["true"], check=True)
    with ThreadPoolExecutor(COMMANDS) as pool:
        each = lambda _: box.commands.run(["true"], 600, check=True)  # noqa: E731
        report("commands", [timed(lambda: list(pool.map(each, range(COMMANDS))))[0]])
    raw = Raw()
    pairs(box.info, lambda: raw.json("GET", f"/v1/sandboxes/{box.id}"))
    box.kill()


async def python_async():
    from forkd_sdk import AsyncClient, AsyncSandbox

    client = AsyncClient(URL)

    async def timed(function):
        begin = time.perf_counter()
        value = await function()
        return time.perf_counter() - begin, value

    async def create():
        box = await AsyncSandbox.create(TAG, client=client, labels=LABELS)
        await box.commands.run(["true"], check=True)
        return box

    first = []
    for _ in range(ROUNDS):
        took, box = await timed(create)
        first.append(took)
        await box.kill()
    report("create", first)
    box = await create()
    forks = []
    for _ in range(ROUNDS):
        took, children = await timed(lambda: box.fork(COPIES))
        forks.append(took)
        await asyncio.gather(*(child.kill() for child in children))
    report("fork", forks)
    point = await box.checkpoint()
    report("rollback", [(await timed(lambda: box.rollback(point)))[0] for _ in range(ROUNDS)])
    await box.commands.run(["true"], check=True)

    async def all_at_once():
        await asyncio.gather(*(box.commands.run(["true"], 600, check=True) for _ in range(COMMANDS)))

    report("commands", [(await timed(all_at_once))[0]])
    raw = Raw()
    mine, theirs = [], []
    for _ in range(CALLS):
        begin = time.perf_counter()
        raw.json("GET", f"/v1/sandboxes/{box.id}")
        theirs.append(time.perf_counter() - begin)
        mine.append((await timed(box.info))[0])
    report("call", mine)
    report("raw call", theirs)
    await box.kill()


def e2b():
    os.environ.update(E2B_API_KEY=TOKEN or "e2b_" + "0" * 40, E2B_API_URL=URL, E2B_SANDBOX_URL=URL)
    from e2b import Sandbox

    def create():
        box = Sandbox.create(TAG, timeout=600, metadata=LABELS)
        box.commands.run("true")
        return box

    first = []
    for _ in range(ROUNDS):
        took, box = timed(create)
        first.append(took)
        box.kill()
    report("create", first)
    box = create()
    if hasattr(box, "fork"):
        forks = []
        for _ in range(ROUNDS):
            took, children = timed(lambda: box.fork(count=COPIES))
            forks.append(took)
            for child in children:
                child.kill()
        report("fork", forks)
    with ThreadPoolExecutor(COMMANDS) as pool:
        each = lambda _: box.commands.run("true", timeout=600, request_timeout=600)  # noqa: E731
        report("commands", [timed(lambda: list(pool.map(each, range(COMMANDS))))[0]])
    raw = Raw()
    key = {"X-API-KEY": os.environ["E2B_API_KEY"]}
    pairs(box.get_info, lambda: raw.json("GET", f"/sandboxes/{box.sandbox_id}", None, key))
    box.kill()


if CLIENT == "python-async":
    asyncio.run(python_async())
else:
    {"rest": rest, "python-sync": python_sync, "e2b": e2b}[CLIENT]()
