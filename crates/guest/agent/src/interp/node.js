// Keeps one Node.js interpreter warm and runs what the agent sends. See the agent's README for the protocol.
'use strict';
const net = require('net');
const util = require('util');
const { createRequire } = require('module');
const { compile } = require('./dialect.js');
const { reseed } = require('./reseed.js');

const MAX_MESSAGE = 32 * 1024 * 1024;
const MAX_TEXT = 4 * 1024 * 1024;

const channel = new net.Socket({ fd: 0, readable: true, writable: true });
globalThis.require = createRequire(process.cwd() + '/');
let count = 0;
let interrupt = null;
const interrupted = new Set();
let waiting = Buffer.alloc(0);
let queue = Promise.resolve();

process.on('SIGINT', () => { if (interrupt) interrupt(new Error('interrupted')); });
process.on('uncaughtException', (error) => { process.stderr.write(util.inspect(error) + '\n'); });
process.on('unhandledRejection', (error) => { process.stderr.write(util.inspect(error) + '\n'); });

function send(message) {
  const body = Buffer.from(JSON.stringify(message));
  const header = Buffer.alloc(4);
  header.writeUInt32LE(body.length);
  channel.write(Buffer.concat([header, body]));
}

function cut(text) {
  return text.length <= MAX_TEXT ? text : text.slice(0, MAX_TEXT) + '…';
}

function describeError(error) {
  const isError = error instanceof Error || (error && typeof error.stack === 'string');
  return {
    name: isError ? String(error.name) : typeof error,
    message: cut(isError ? String(error.message) : String(error)),
    traceback: cut(isError ? String(error.stack) : util.inspect(error)),
  };
}

function describe(value) {
  const result = {};
  if (value === undefined) return result;
  globalThis._ = value;
  result.repr = cut(util.inspect(value));
  try {
    const text = JSON.stringify(value);
    if (text !== undefined && text.length <= MAX_TEXT) result.json = JSON.parse(text);
  } catch (_) { /* it has no such form */ }
  return result;
}

async function run(mode, code, call) {
  count += 1;
  if (interrupted.delete(call)) return { error: describeError(new Error('interrupted')) };
  const source = mode === 'eval' ? `(${code}\n)` : code;
  const stopped = new Promise((_, reject) => { interrupt = reject; });
  stopped.catch(() => {});
  try {
    let value = compile(source, `<cell ${count}>`)();
    if (value && typeof value.then === 'function') value = await Promise.race([value, stopped]);
    return mode === 'exec' ? {} : describe(value);
  } catch (error) {
    return { error: describeError(error) };
  } finally {
    interrupt = null;
  }
}

async function warmUp(imports, code, call) {
  const lines = imports.map((item) => {
    const [, module, name] = item.match(/^(\S+)(?:\s+as\s+(\S+))?$/) || [null, item, null];
    const plain = name || module.replace(/^node:/, '').replace(/[^A-Za-z0-9_$]/g, '_');
    return `globalThis[${JSON.stringify(plain)}] = require(${JSON.stringify(module)});`;
  });
  const result = await run('exec', lines.concat([code]).join('\n'), call);
  count = 0;
  return result;
}

// Pipes are written to asynchronously; the answer must not overtake what was printed before it.
function flushed(stream) {
  return new Promise((resolve) => stream.write('', () => resolve()));
}

async function handle(message) {
  const imports = message.imports || [];
  const result = message.op === 'warmup'
    ? await warmUp(imports, message.code || '', message.id)
    : await run(message.mode || 'auto', message.code, message.id);
  interrupted.delete(message.id);
  await Promise.all([flushed(process.stdout), flushed(process.stderr)]);
  send({ ...result, id: message.id, count });
}

function take(message) {
  if (message.op === 'run' || message.op === 'warmup') {
    queue = queue.then(() => handle(message));
  } else if (message.op === 'reseed') {
    const answer = { id: message.id };
    try {
      reseed(Buffer.from(message.entropy, 'hex'));
    } catch (error) {
      answer.error = describeError(error);
    }
    send(answer);
  } else if (message.op === 'interrupt') {
    // Code that never yields is stopped by the signal that comes with this.
    if (interrupt) interrupt(new Error('interrupted'));
    else interrupted.add(message.call);
  } else if (message.op === 'collect') {
    if (globalThis.gc) globalThis.gc();
    send({ id: message.id });
  } else {
    send({ id: message.id, error: { name: 'Unsupported', message: String(message.op) } });
  }
}

channel.on('data', (data) => {
  waiting = Buffer.concat([waiting, data]);
  while (waiting.length >= 4) {
    const length = waiting.readUInt32LE(0);
    if (length > MAX_MESSAGE) process.exit(1);
    if (waiting.length < 4 + length) return;
    const message = JSON.parse(waiting.subarray(4, 4 + length).toString());
    waiting = waiting.subarray(4 + length);
    take(message);
  }
});
channel.on('end', () => process.exit(0));
send({ op: 'hello', language: 'node', version: process.version });
