// The backend of deepagents against a daemon, and an agent without a model that works in it.
import assert from "node:assert/strict";
import { test } from "node:test";
import { BaseChatModel } from "@langchain/core/language_models/chat_models";
import { AIMessage } from "@langchain/core/messages";
import { createDeepAgent } from "deepagents";
import { ForkdSandbox } from "forkd/deepagents";

const tag = process.env.FORKD_TEST_TAG;
const encode = (text) => new TextEncoder().encode(text);

test("the backend", async () => {
  await using backend = await ForkdSandbox.create({ tag, timeout: 20 });
  assert.deepEqual(await backend.execute("echo out; echo err >&2; exit 3"), { output: "out\nerr\n", exitCode: 3, truncated: false });
  assert.equal((await backend.execute("seq 1 100000")).truncated, true);
  assert.deepEqual(await backend.uploadFiles([["/tmp/d/a", encode("one\n")], ["relative", encode("")], ["/tmp", encode("")]]), [
    { path: "/tmp/d/a", error: null },
    { path: "relative", error: "invalid_path" },
    { path: "/tmp", error: "is_directory" },
  ]);
  const [found, missing, folder] = await backend.downloadFiles(["/tmp/d/a", "/none", "/tmp/d"]);
  assert.deepEqual([Buffer.from(found.content).toString(), missing.error, folder.error], ["one\n", "file_not_found", "is_directory"]);
  // These are derived by the framework.
  assert.match((await backend.read("/tmp/d/a")).content, /one/);
  assert.equal((await backend.edit("/tmp/d/a", "one", "two")).error, undefined);
  assert.equal((await backend.grep("two", "/tmp/d")).matches.length, 1);
  assert.deepEqual((await backend.ls("/tmp/d")).files.map((file) => file.path), ["/tmp/d/a"]);
});

class Scripted extends BaseChatModel {
  constructor(answers) {
    super({});
    this.answers = answers;
  }
  _llmType() {
    return "scripted";
  }
  bindTools() {
    return this;
  }
  async _generate() {
    const message = this.answers.shift();
    return { generations: [{ text: "", message }] };
  }
}

test("an agent works in a fork, and a roll-back undoes it", async () => {
  await using backend = await ForkdSandbox.create({ tag });
  await backend.checkpoint("before");
  const [fork] = await backend.fork();
  const call = { name: "execute", args: { command: "echo $((6 * 7)) > /tmp/answer; cat /tmp/answer" }, id: "1", type: "tool_call" };
  const model = new Scripted([new AIMessage({ content: "", tool_calls: [call] }), new AIMessage("done")]);
  const agent = createDeepAgent({ model, backend: fork });
  const done = await agent.invoke({ messages: [{ role: "user", content: "go" }] });
  assert.match(String(done.messages.find((message) => message.getType() === "tool").content), /42/);
  assert.equal((await fork.execute("cat /tmp/answer")).output, "42\n");
  assert.notEqual((await backend.execute("cat /tmp/answer")).exitCode, 0);
  await backend.execute("touch /tmp/answer");
  await backend.rollback("before");
  assert.notEqual((await backend.execute("cat /tmp/answer")).exitCode, 0);
  await fork.close();
});
