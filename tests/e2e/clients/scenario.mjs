// Runs sdk/conformance/scenario.json with the TypeScript client, against a daemon with real guests.
//
//     scenario.mjs CLIENT SCENARIO URL TAG
//
// CLIENT is the compiled index.js of the client. Prints a line per step. The last line counts them.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";
import { isDeepStrictEqual } from "node:util";

const [library, scenario, url, tag] = process.argv.slice(2);
const { ApiError, Client, EvalError, Sandbox } = await import(pathToFileURL(library).href);
const client = new Client({ url, timeoutMs: 300_000 });
const boxes = new Map();
const shown = (result) => ({ stdout: result.stdout, stderr: result.stderr, exit_code: result.exitCode });

const operations = {
  create: async (step) => void boxes.set(step.as, await Sandbox.create({ tag: step.tag, ttl: 600, client })),
  fork: async (step, box) => {
    const children = await box.fork(step.as.length, { ttl: 600 });
    step.as.forEach((name, index) => boxes.set(name, children[index]));
  },
  run: async ({ args, env, cwd, user }, box) => shown(await box.commands.run(args, { env, cwd, user })),
  background: async (step, box) => shown(await (await box.commands.start(step.args)).wait()),
  pipe: async (step, box) => {
    const session = await box.commands.open(step.args);
    session.write(step.input);
    session.closeStdin();
    return shown(await session.wait());
  },
  write: (step, box) => box.files.write(step.path, step.text),
  read: (step, box) => box.files.read(step.path),
  list: async (step, box) => (await box.files.list(step.path)).map((entry) => entry.name),
  eval: (step, box) => box.eval(step.code),
  checkpoint: async (step, box) => (await box.checkpoint(step.name)).name,
  rollback: async (step, box) => (await box.rollback(step.to)).to,
  branch: async (step, box) => (await box.branch({ tag: step.tag })).tag,
  kill: (_, box) => box.kill(),
  delete_snapshot: (step) => client.snapshots.delete(step.tag),
};

/** What is wrong with the step, or undefined. */
async function check(step) {
  let got;
  try {
    got = await operations[step.do](step, boxes.get(step.on));
  } catch (error) {
    if (error instanceof ApiError) return error.code === step.error ? undefined : `refused with ${error.code}: ${error.message}`;
    if (error instanceof EvalError) return error.message === step.expect_exception ? undefined : `raised ${error.message}`;
    throw error;
  }
  if ("error" in step || "expect_exception" in step) return `not refused: ${JSON.stringify(got)}`;
  if ("expect" in step && !isDeepStrictEqual(got, step.expect)) return `got ${JSON.stringify(got)}`;
  if ("expect_exit" in step && got.exit_code !== step.expect_exit) return `got ${JSON.stringify(got)}`;
  if ("expect_size" in step && got.stdout.length !== step.expect_size) return `got ${got.stdout.length} characters`;
  return undefined;
}

const text = readFileSync(scenario, "utf8").replaceAll("$TAG", tag).replaceAll("$RUN", `ts-${process.pid}`);
let passed = 0;
let failed = 0;
for (const [index, step] of JSON.parse(text).entries()) {
  if (step.without?.includes("typescript")) continue;
  const wrong = await check(step).catch((error) => `${error.stack}`);
  wrong === undefined ? passed++ : failed++;
  console.log(`${wrong === undefined ? "ok  " : "FAIL"} ${index + 1} ${step.do}${wrong === undefined ? "" : `: ${wrong}`}`);
}
console.log(`${passed} passed, ${failed} failed`);
process.exit(0);
