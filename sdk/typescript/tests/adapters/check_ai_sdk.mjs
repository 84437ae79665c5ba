// The session of the AI SDK against a daemon, and an agent without a model that works in it.
import assert from "node:assert/strict";
import { test } from "node:test";
import { generateText, isStepCount, tool } from "ai";
import { MockLanguageModelV4 } from "ai/test";
import { z } from "zod";
import { createForkdSession } from "forkd/ai-sdk";

const tag = process.env.FORKD_TEST_TAG;
const bytes = async (stream) => new Uint8Array(await new Response(stream).arrayBuffer());
const text = async (stream) => Buffer.from(await bytes(stream)).toString();

test("files", async () => {
  await using session = await createForkdSession({ tag });
  await session.writeTextFile({ path: "deep/a.txt", content: "one\ntwo\nthree\n" });
  assert.equal(await session.readTextFile({ path: "/root/deep/a.txt" }), "one\ntwo\nthree\n");
  assert.equal(await session.readTextFile({ path: "deep/a.txt", startLine: 2, endLine: 9 }), "two\nthree\n");
  await session.writeFile({ path: "b", content: new Blob([Uint8Array.of(0, 255)]).stream() });
  assert.deepEqual(await bytes(await session.readFile({ path: "b" })), Uint8Array.of(0, 255));
  for (const read of [session.readFile, session.readBinaryFile, session.readTextFile, session.stat, session.listDirectory]) assert.equal(await read({ path: "none/at/all" }), null);
  assert.equal(await session.stat({ path: "b/below" }), null);
  await session.run({ command: "ln -s deep link; ln -s nowhere broken" });
  assert.equal((await session.stat({ path: "link" })).type, "directory");
  assert.equal(await session.stat({ path: "broken" }), null);
  assert.deepEqual(await session.stat({ path: "b" }), { type: "file", size: 2 });
  const listed = await session.listDirectory({ path: "." });
  assert.equal(listed.find((entry) => entry.name === "link").type, "symlink");
  assert.equal(listed.find((entry) => entry.name === "deep").type, "directory");
  await assert.rejects(session.listDirectory({ path: "b" }));
  await assert.rejects(session.writeTextFile({ path: "deep", content: "x" }));
  await assert.rejects(session.deleteFile({ path: "deep" }));
  assert.equal(await session.deleteFile({ path: "link" }), true);
  assert.equal(await session.deleteFile({ path: "link" }), false);
  assert.equal((await session.stat({ path: "deep" })).type, "directory");
});

test("commands and processes", async () => {
  await using session = await createForkdSession({ tag });
  assert.deepEqual(await session.run({ command: "pwd; echo $A >&2; exit 3", workingDirectory: "/tmp", env: { A: "b" } }), { exitCode: 3, stdout: "/tmp\n", stderr: "b\n" });
  const process = await session.spawn({ command: "tr a-z A-Z; echo end >&2; exit 5", stdin: true });
  const writer = process.stdin.getWriter();
  await writer.write(new TextEncoder().encode("hello"));
  await writer.close();
  assert.deepEqual([await text(process.stdout), await text(process.stderr), await process.wait()], ["HELLO", "end\n", { exitCode: 5 }]);
  await process.kill();
  const stop = new AbortController();
  const slow = await session.spawn({ command: "exec sleep 4243", abortSignal: stop.signal });
  assert.equal("stdin" in slow, false);
  stop.abort();
  assert.equal((await slow.wait()).exitCode, -9);
  assert.notEqual((await session.run({ command: "pgrep -f '^sleep 4243'" })).exitCode, 0);
});

test("an agent works in a fork, and a roll-back undoes it", async () => {
  await using session = await createForkdSession({ tag });
  await session.checkpoint("before");
  const [fork] = await session.fork();
  const usage = { inputTokens: { total: 1 }, outputTokens: { total: 1 } };
  const steps = [
    { content: [{ type: "tool-call", toolCallId: "1", toolName: "shell", input: JSON.stringify({ command: "echo $((6 * 7)) > answer; cat answer" }) }], finishReason: { unified: "tool-calls" }, usage, warnings: [] },
    { content: [{ type: "text", text: "done" }], finishReason: { unified: "stop" }, usage, warnings: [] },
  ];
  const model = new MockLanguageModelV4({ doGenerate: async () => steps.shift() });
  const shell = tool({ inputSchema: z.object({ command: z.string() }), execute: async ({ command }, { experimental_sandbox, abortSignal }) => experimental_sandbox.run({ command, abortSignal }) });
  const done = await generateText({ model, tools: { shell }, experimental_sandbox: fork, stopWhen: isStepCount(3), prompt: "go" });
  assert.equal(done.text, "done");
  assert.equal(done.steps[0].toolResults[0].output.stdout, "42\n");
  assert.equal(await fork.readTextFile({ path: "answer" }), "42\n");
  assert.equal(await session.readTextFile({ path: "answer" }), null);
  await session.writeTextFile({ path: "answer", content: "43" });
  await session.rollback("before");
  assert.equal(await session.readTextFile({ path: "answer" }), null);
  await fork.close();
});
