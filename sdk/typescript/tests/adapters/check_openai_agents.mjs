// The sandbox client of the OpenAI Agents SDK against a daemon, and an agent without a model that works in it.
import assert from "node:assert/strict";
import { test } from "node:test";
import { Runner, setTracingDisabled } from "@openai/agents-core";
import { Manifest, SandboxAgent, shell } from "@openai/agents-core/sandbox";
import { ScriptedModel, assistantMessage, functionCall, modelResponse } from "@openai/agents-core/testing";
import { ForkdSandboxClient } from "forkd/openai-agents";

const tag = process.env.FORKD_TEST_TAG;
const text = (bytes) => Buffer.from(bytes).toString();
setTracingDisabled(true);

const client = new ForkdSandboxClient({ tag });
const manifest = new Manifest({ entries: { "src/a.txt": { type: "file", content: "one\n" }, empty: { type: "dir" } }, environment: { COLOR: "red" } });

test("a session has files, commands and patches", async () => {
  const session = await client.create({ manifest });
  try {
    assert.equal(text(await session.readFile({ path: "src/a.txt" })), "one\n");
    assert.equal(await session.directoryExists("empty"), true);
    assert.equal(await session.pathExists("nothing"), false);
    const done = await session.exec({ cmd: "echo $COLOR; pwd; exit 4" });
    assert.deepEqual([done.stdout, done.exitCode], [`red\n${manifest.root}\n`, 4]);
    const editor = session.createEditor();
    await editor.createFile({ type: "create_file", path: "new.txt", diff: "+fresh" });
    await editor.updateFile({ type: "update_file", path: "src/a.txt", diff: "@@\n-one\n+two\n" });
    assert.equal((await session.exec({ cmd: "cat new.txt src/a.txt" })).stdout.replace(/\n+/g, "\n"), "fresh\ntwo\n".replace(/\n+/g, "\n"));
    await editor.deleteFile({ type: "delete_file", path: "new.txt" });
    assert.deepEqual((await session.listDir({ path: "src" })).map(({ name, type }) => [name, type]), [["a.txt", "file"]]);
    assert.equal(await session.running(), true);
  } finally {
    await session.close();
  }
  assert.equal(await session.running(), false);
});

test("a workspace is saved with its processes, and restored", async () => {
  const session = await client.create({ manifest });
  await session.exec({ cmd: "setsid sleep 4244 >/dev/null 2>&1 & echo saved > kept" });
  const saved = await session.persistWorkspace();
  const stored = JSON.parse(JSON.stringify(await client.serializeSessionState(session.state)));
  await session.close();
  const again = await client.resume(await client.deserializeSessionState(stored));
  assert.equal(await again.pathExists("kept"), false);
  await again.hydrateWorkspace(saved);
  assert.equal(text(await again.readFile({ path: "kept" })), "saved\n");
  assert.equal((await again.exec({ cmd: "pgrep -fc '^sleep 4244'" })).stdout, "1\n");
  const found = await client.resume(await client.deserializeSessionState(await client.serializeSessionState(again.state)));
  assert.equal(found.sandbox.id, again.sandbox.id);
  await client.delete(found.state);
  await again.sandbox.client.snapshots.delete(JSON.parse(text(saved).split("\n")[1]).tag);
});

test("an agent works in a fork, and a roll-back undoes it", async () => {
  const session = await client.create({ manifest });
  const [fork] = await session.fork();
  await session.checkpoint("before");
  const model = new ScriptedModel([
    modelResponse({ output: [functionCall("exec_command", { cmd: "echo $((6 * 7)) > answer; cat answer" }, { callId: "1" })] }),
    modelResponse({ output: [assistantMessage("done")] }),
  ]);
  const agent = new SandboxAgent({ name: "coder", model, capabilities: [shell()] });
  const done = await new Runner({ sandbox: { client, session: fork } }).run(agent, "go");
  assert.equal(done.finalOutput, "done");
  assert.equal(text(await fork.readFile({ path: "answer" })), "42\n");
  assert.equal(await session.pathExists("answer"), false);
  await session.exec({ cmd: "touch answer" });
  await session.rollback("before");
  assert.equal(await session.pathExists("answer"), false);
  await Promise.all([fork.close(), session.close()]);
});
