// Measures the TypeScript client. Prints one JSON object a line: client, measure, milliseconds.
//
//     worker.mjs INDEX-JS URL TAG ROUNDS COMMANDS CALLS
import http from "node:http";
import https from "node:https";
import { pathToFileURL } from "node:url";

const [library, url, tag, ...numbers] = process.argv.slice(2);
const [rounds, commands, calls] = numbers.map(Number);
const COPIES = 8;
const { Client, Sandbox } = await import(pathToFileURL(library).href);
const report = (measure, ms) => console.log(JSON.stringify({ client: "typescript", measure, ms }));

async function timed(body) {
  const begin = performance.now();
  const value = await body();
  return [performance.now() - begin, value];
}

async function repeat(count, body) {
  const times = [];
  for (let round = 0; round < count; round++) times.push(await body());
  return times;
}

const client = new Client({ url });
const create = async () => {
  const box = await Sandbox.create({ tag, client, labels: { bench: "clients" } });
  await box.commands.run(["true"], { check: true });
  return box;
};

report("create", await repeat(rounds, async () => {
  const [ms, box] = await timed(create);
  await box.kill();
  return ms;
}));
const box = await create();
report("fork", await repeat(rounds, async () => {
  const [ms, children] = await timed(() => box.fork(COPIES));
  await Promise.all(children.map((child) => child.kill()));
  return ms;
}));
const point = await box.checkpoint();
report("rollback", await repeat(rounds, async () => (await timed(() => box.rollback(point.name)))[0]));
await box.commands.run(["true"], { check: true });
const each = () => box.commands.run(["true"], { check: true, timeout: 600 });
report("commands", [(await timed(() => Promise.all(Array.from({ length: commands }, each))))[0]]);

const wire = url.startsWith("https:") ? https : http;
const agent = new wire.Agent({ keepAlive: true, maxSockets: 1 });
const token = process.env.FORKD_TOKEN;
const headers = token ? { authorization: `Bearer ${token}` } : {};
const raw = () => new Promise((resolve, reject) => {
  const request = wire.get(`${url}/v1/sandboxes/${box.id}`, { agent, headers }, (answer) => {
    const parts = [];
    answer.on("data", (part) => parts.push(part));
    answer.on("end", () => resolve(JSON.parse(Buffer.concat(parts))));
  });
  request.on("error", reject);
});
const [mine, theirs] = [[], []];
for (let round = 0; round < calls; round++) {
  theirs.push((await timed(raw))[0]);
  mine.push((await timed(() => box.info()))[0]);
}
report("call", mine);
report("raw call", theirs);
await box.kill();
agent.destroy();
