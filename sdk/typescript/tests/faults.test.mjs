// The client against faults on the wire: a server on loopback answers each request with the next scripted bytes.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import net from "node:net";
import { test } from "node:test";
import * as forkd from "../dist/esm/index.js";

const answer = (status, body, headers = {}) => {
  const data = body === undefined ? "" : JSON.stringify(body);
  const lines = [`HTTP/1.1 ${status} X`, `content-length: ${Buffer.byteLength(data)}`, "content-type: application/json", "connection: close"];
  for (const [name, value] of Object.entries(headers)) lines.push(`${name}: ${value}`);
  return `${lines.join("\r\n")}\r\n\r\n${data}`;
};
const stream = (frames, end = true) => {
  const chunks = frames.map((frame) => (typeof frame === "string" ? frame : `${JSON.stringify(frame)}\n`));
  const body = chunks.map((text) => `${Buffer.byteLength(text).toString(16)}\r\n${text}\r\n`).join("");
  return `HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n${body}${end ? "0\r\n\r\n" : ""}`;
};
const HOLD = Symbol("hold");
const MUTE = Symbol("mute");
const sandbox = (id = "sb1", fields = {}) => ({ id, snapshot_tag: "py", created_at_unix: 1, state: "running", ...fields });
const STARTED = { type: "started", pid: 7 };
const EXIT = { type: "exit", exit_code: 0, timed_out: false };
const BUSY = answer(429, { error: "too many", code: "rate_limited" }, { "retry-after": "0.01" });

/** Runs `body` with a server that has these answers. An empty answer closes the connection. */
async function served(answers, body) {
  const requests = [];
  const held = [];
  const server = net.createServer((socket) => {
    let text = "";
    socket.on("error", () => {});
    socket.on("data", (data) => {
      text += data;
      const [head, rest] = text.split("\r\n\r\n");
      const length = Number(/content-length: (\d+)/i.exec(head)?.[1] ?? 0);
      if (rest === undefined || Buffer.byteLength(rest) < length) return;
      requests.push(head);
      const reply = answers.shift() ?? "";
      if (reply === HOLD) {
        held.push(new Promise((resolve) => socket.on("close", resolve)));
        socket.write(stream([STARTED], false));
      } else if (reply === MUTE) held.push(socket);
      else if (reply === "") socket.destroy();
      else socket.end(reply);
      text = "";
    });
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  const client = new forkd.Client({ url: `http://127.0.0.1:${server.address().port}`, retries: 2 });
  try {
    return await body(new forkd.Sandbox(client, "sb1", "py"), { client, requests, held });
  } finally {
    server.close();
  }
}
const keys = (requests) => new Set(requests.map((head) => /idempotency-key: (\S+)/i.exec(head)?.[1]));

test("a refused create is repeated with the same key", () =>
  served([BUSY, "", answer(201, [sandbox()])], async (_, { client, requests }) => {
    assert.equal((await forkd.Sandbox.create({ tag: "py", client })).id, "sb1");
    assert.deepEqual([requests.length, keys(requests).size], [3, 1]);
  }));

test("a command that may have run is not repeated", () =>
  served(["", stream([STARTED, EXIT])], async (box, { requests }) => {
    await assert.rejects(box.commands.run("true"), forkd.ConnectionFailed);
    assert.equal(requests.length, 1);
  }));

test("a fork that may have run is repeated with the same key", () =>
  served(["", answer(201, [sandbox()])], async (box, { requests }) => {
    assert.equal((await box.fork(1)).length, 1);
    assert.deepEqual([requests.length, keys(requests).size], [2, 1]);
  }));

test("a command that was refused before it ran is repeated", () =>
  served([BUSY, stream([STARTED, { type: "stdout", text: "x" }, EXIT])], async (box) => {
    assert.equal((await box.commands.run("true")).stdout, "x");
  }));

for (const end of [true, false]) {
  test(`a stream without its last frame has the process ID (end ${end})`, () =>
    served([stream([STARTED, { type: "stdout", text: "part" }], end)], async (box) => {
      await assert.rejects(box.commands.run("true"), (error) => error instanceof forkd.StreamCut && error.pid === 7);
    }));
}

test("malformed lines are errors, and unknown frames are ignored", async () => {
  for (const line of ["{not json\n", "[]\n", '{"type":"exit"}\n', '{"type":"stdout","base64":"!"}\n']) {
    await served([stream([line])], (box) => assert.rejects(box.commands.run("true"), forkd.ProtocolError));
  }
  await served([stream([{ type: "keepalive" }, { type: "weather" }, { type: "stdout", base64: "/w==" }, EXIT])], async (box) => {
    assert.equal((await box.commands.run("true")).stdout, "\ufffd");
  });
});

test("an error frame is the error of its code", () =>
  served([stream([STARTED, { type: "error", error: "the VM ended", code: "sandbox_gone" }])], (box) => assert.rejects(box.commands.run("true"), forkd.SandboxGone)));

test("an aborted command closes its connection", () =>
  served([HOLD], async (box, { held }) => {
    const stop = new AbortController();
    const call = box.commands.run("sleep 9", { signal: stop.signal });
    while (held.length === 0) await new Promise((resolve) => setTimeout(resolve, 5));
    stop.abort();
    await assert.rejects(call, { name: "AbortError" });
    // The end of the connection is what makes the daemon kill the command.
    await held[0];
  }));

test("a silent stream ends", () =>
  served([HOLD], async (box, { client }) => {
    const lines = await client.http.open("GET", "/v1/events", { silenceMs: 200 });
    await lines.next();
    await assert.rejects(lines.next(), forkd.SandboxUnreachable);
  }));

test("a request for a stream that is not answered ends", () =>
  served([MUTE], async (_, { client, held }) => {
    await assert.rejects(client.http.open("POST", "/v1/sandboxes/sb1/exec/stream", { json: {}, silenceMs: 200 }), forkd.SandboxUnreachable);
    held[0].destroy();
  }));

test("a silent terminal ends, and closes its connection", async () => {
  let closed = false;
  const session = new forkd.Session({ send() {}, close: () => (closed = true) }, 50);
  await assert.rejects(session.wait(), forkd.SandboxUnreachable);
  assert.equal(closed, true);
});

test("a watch that ends by itself is an error", () =>
  served([stream([{ change: "created", path: "/a" }])], async (box) => {
    const seen = [];
    const follow = async () => {
      for await (const change of await box.files.watch("/")) seen.push(change.path);
    };
    await assert.rejects(follow(), forkd.StreamCut);
    assert.deepEqual(seen, ["/a"]);
  }));

test("children that run are not lost when others fail", () =>
  served([answer(201, [sandbox("sb2"), sandbox("sb3", { state: "failed", error: { error: "no memory", code: "launch_failed" } })])], async (box) => {
    await assert.rejects(box.fork(2), (error) => error.children[0].id === "sb2" && error.errors[0] instanceof forkd.LaunchFailed);
  }));

test("explore keeps the best child and deletes the others", () =>
  served([answer(201, [sandbox("a"), sandbox("b")]), answer(204)], async (box, { requests }) => {
    const best = await box.explore([1, 2], async (_, option) => option, (result) => result);
    assert.deepEqual([best.sandbox.id, best.score], ["b", 2]);
    assert.match(requests[1], /^DELETE \/v1\/sandboxes\/a /);
  }));

test("every code of the document has a class", () => {
  const document = JSON.parse(readFileSync(new URL("../../../openapi/v1.json", import.meta.url), "utf8"));
  const plain = document.components.schemas.ErrorCode.enum.filter((code) => forkd.apiError(500, { code }, "").constructor === forkd.ApiError);
  assert.deepEqual(plain, ["internal"]);
});

test("a malformed address is refused", () => {
  for (const url of ["127.0.0.1:8889", "ftp://x", "http://a/b", "http://"]) assert.throws(() => new forkd.Client({ url }), forkd.InvalidAddress);
});

test("CommonJS gets the same names", () => {
  const old = createRequire(import.meta.url)("../dist/cjs/index.js");
  assert.deepEqual(Object.keys(old).sort(), Object.keys(forkd).sort());
});
