// The sandbox of Mastra against a daemon, and an agent without a model that works in it.
import assert from "node:assert/strict";
import { test } from "node:test";
import { Agent } from "@mastra/core/agent";
import { MastraLanguageModelV2Mock } from "@mastra/core/test-utils/llm-mock";
import { Workspace } from "@mastra/core/workspace";
import { ForkdMastraSandbox } from "forkd/mastra";

const tag = process.env.FORKD_TEST_TAG;

test("commands, processes and files", async () => {
  const sandbox = new ForkdMastraSandbox({ tag, env: { COLOR: "red" } });
  try {
    const done = await sandbox.executeCommand("echo", ["$COLOR", "a b"], { cwd: "/tmp" });
    assert.deepEqual([done.stdout, done.exitCode, done.success], ["$COLOR a b\n", 0, true]);
    const shell = await sandbox.executeCommand("echo $COLOR; pwd; exit 3", [], { cwd: "/tmp" });
    assert.deepEqual([shell.stdout, shell.exitCode, shell.success], ["red\n/tmp\n", 3, false]);
    await sandbox.writeFiles([{ path: "/tmp/a.sh", content: "#!/bin/sh\necho ran\n", mode: 0o755 }]);
    assert.equal((await sandbox.executeCommand("/tmp/a.sh")).stdout, "ran\n");
    const handle = await sandbox.processes.spawn("tr a-z A-Z");
    await handle.sendStdin("hello");
    await handle.closeStdin();
    assert.equal((await handle.wait()).stdout, "HELLO");
    const slow = await sandbox.processes.spawn("exec sleep 4245");
    assert.equal((await sandbox.processes.list()).find((one) => one.pid === slow.pid).running, true);
    assert.equal(await sandbox.processes.kill(slow.pid), true);
    const late = await sandbox.executeCommand("sleep 4246", [], { timeout: 500 });
    assert.deepEqual([late.timedOut, late.success], [true, false]);
    assert.equal((await sandbox.getInfo()).metadata.tag, tag);
  } finally {
    await sandbox._destroy();
  }
});

test("an agent works in a fork, and a roll-back undoes it", async () => {
  const sandbox = new ForkdMastraSandbox({ tag });
  await sandbox.executeCommand("true");
  await sandbox.snapshot();
  const [fork] = await sandbox.fork();
  const usage = { inputTokens: 1, outputTokens: 1, totalTokens: 2 };
  const steps = [
    { content: [{ type: "tool-call", toolCallId: "1", toolName: "mastra_workspace_execute_command", input: JSON.stringify({ command: "echo $((6 * 7)) > answer; cat answer" }) }], finishReason: "tool-calls", usage, warnings: [] },
    { content: [{ type: "text", text: "done" }], finishReason: "stop", usage, warnings: [] },
  ];
  const model = new MastraLanguageModelV2Mock({ doGenerate: async () => steps.shift() });
  const agent = new Agent({ id: "coder", name: "coder", instructions: "work", model, workspace: new Workspace({ sandbox: fork }) });
  const done = await agent.generate("go");
  assert.equal(done.text, "done");
  assert.equal((await fork.executeCommand("cat answer")).stdout, "42\n");
  assert.notEqual((await sandbox.executeCommand("cat answer")).exitCode, 0);
  await sandbox.executeCommand("touch answer");
  await sandbox.rollback();
  assert.notEqual((await sandbox.executeCommand("cat answer")).exitCode, 0);
  await Promise.all([fork._destroy(), sandbox._destroy()]);
});
