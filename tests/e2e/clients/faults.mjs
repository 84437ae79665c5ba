// Faults under the TypeScript client: the sandbox, the daemon or the network path is lost while calls run.
//
//     faults.mjs CLIENT URL TAG LEVEL RUN START
//
// The same cases as in faults.py. CLIENT is the compiled index.js of the client. The last line counts cases.
import { execFileSync, execSync } from "node:child_process";
import net from "node:net";
import { pathToFileURL } from "node:url";

const [library, url, tag, level, onHost, start] = process.argv.slice(2);
const { AgentFailed, Client, ForkdError, Sandbox, SandboxGone, SandboxNotFound, StreamCut } = await import(pathToFileURL(library).href);
const PATIENCE = 90_000;
const passed = [];
const failed = [];
const daemon = new URL(url);
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** A way to the daemon that can be cut: bytes are then neither passed on nor refused. */
async function openPath() {
  const path = { cut: false, loseAnswers: 0, sockets: [] };
  const server = net.createServer((near) => {
    const far = net.connect(Number(daemon.port), daemon.hostname);
    path.sockets.push(near, far);
    const end = () => path.cut || (near.destroy(), far.destroy());
    for (const socket of [near, far]) socket.on("error", end).on("close", end);
    near.on("data", (data) => path.cut || far.write(data));
    far.on("data", (data) => {
      if (path.cut) return;
      // The daemon has done the work, and the client does not learn of it.
      if (path.loseAnswers > 0) return path.loseAnswers--, end();
      near.write(data);
    });
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  path.url = `http://127.0.0.1:${server.address().port}`;
  path.close = () => (server.close(), path.sockets.forEach((socket) => socket.destroy()));
  return path;
}

// The calls that a fault strikes. Each says when it runs, and ends only by an error.
const calls = {
  run: (box, ready) => box.commands.run("echo up; exec sleep 4250", { timeout: 600, onStdout: ready }),
  stream: async (box, ready) => {
    for await (const _ of box.commands.stream("exec sleep 4251", { timeout: 600 })) ready();
  },
  pty: async (box, ready) => {
    const session = await box.pty.create("exec sleep 4252");
    ready();
    await session.wait();
  },
  watch: async (box, ready) => {
    const changes = await box.files.watch("/tmp");
    ready();
    for await (const _ of changes);
  },
};

async function strike(name, address, fault, allowed = [ForkdError]) {
  const box = await Sandbox.create({ tag, ttl: 600, client: { url: address } });
  const results = [];
  const ends = [];
  await Promise.all(
    Object.entries(calls).map(
      ([call, begin]) =>
        new Promise((ready) => {
          const end = begin(box, ready).then(() => new Error("the call came to an end"), (error) => error);
          ends.push(end.then((error) => results.push([call, error])));
        }),
    ),
  );
  const begin = performance.now();
  await fault(box);
  await Promise.race([Promise.all(ends), sleep(PATIENCE)]);
  for (const call of Object.keys(calls)) {
    const error = results.find((one) => one[0] === call)?.[1];
    const good = allowed.some((kind) => error instanceof kind);
    (good ? passed : failed).push(call);
    console.log(`${good ? "ok  " : "FAIL"} ${name}: ${call}: ${error ? `${error.name}: ${error.message}`.slice(0, 120) : "hangs"}`);
  }
  console.log(`     all ended ${((performance.now() - begin) / 1000).toFixed(1)} s after the fault`);
  return box;
}

async function once(name, body) {
  try {
    await body();
    passed.push(name);
    console.log(`ok   ${name}`);
  } catch (error) {
    failed.push(name);
    console.log(`FAIL ${name}: ${error.stack}`);
  }
}

const client = new Client({ url });
const remove = (box) => client.http.call("DELETE", `/v1/sandboxes/${box.id}`);

if (level === "whole") {
  const path = await openPath();
  const box = await strike("the network path is cut", path.url, () => (path.cut = true), [StreamCut]);
  path.close();
  await remove(box);
}
await once("cancel", async () => {
  const box = await Sandbox.create({ tag, ttl: 600, client });
  const stop = new AbortController();
  const call = box.commands.run("echo up; exec sleep 4260", { timeout: 600, signal: stop.signal, onStdout: () => stop.abort() });
  const error = await call.then(() => undefined, (one) => one);
  if (error?.name !== "AbortError") throw new Error(`the call ended with ${error}`);
  for (let left = 600; (await box.commands.run(["pgrep", "-fx", "sleep 4260"])).exitCode === 0; left--) {
    if (left === 0) throw new Error("the command still runs");
    await sleep(100);
  }
  await box.kill();
});
await once("a create is retried", async () => {
  const path = await openPath();
  path.loseAnswers = 1;
  const labels = { faults: `ts-${Date.now()}` };
  const box = await Sandbox.create({ tag, ttl: 600, labels, client: { url: path.url } });
  if (path.loseAnswers !== 0) throw new Error("no answer was lost");
  const found = (await client.sandboxes()).filter((one) => one.labels.faults === labels.faults);
  if (found.length !== 1 || found[0].id !== box.id) throw new Error(`${found.length} sandboxes`);
  await remove(box);
  path.close();
});
await strike("the sandbox is deleted", url, remove, [AgentFailed, SandboxGone, SandboxNotFound, StreamCut]);
const adopted = await strike("the daemon is killed", url, () => {
  try {
    execFileSync(onHost.split(" ")[0], [...onHost.split(" ").slice(1), "pkill", "-KILL", "-x", "forkd-controlle"], { stdio: "ignore" });
  } catch {
    // The connection to the host may end with the daemon.
  }
});
execSync(start, { stdio: "ignore" });
// The next daemon has adopted the sandbox: one that is gone would be an error here.
await once("the sandbox outlives the daemon", () => remove(adopted));
console.log(`${passed.length} passed, ${failed.length} failed`);
process.exit(0);
