/** A running sandbox: its rooms, and the operations that make other sandboxes from it. */

import { Client } from "./client.js";
import { Commands, Pty, type RunOptions, type Command } from "./commands.js";
import { ApiError, EvalError, ExploreError, FileMissing, ForkError, InvalidRequest, SandboxGone, SandboxNotFound, StreamCut, apiError } from "./errors.js";
import { LONG_MS, type CallOptions, type ClientOptions, type Http } from "./http.js";
import * as read from "./models.js";
import type { BranchMode, Checkpoint, CommandResult, Evaluation, FileChange, FileEntry, Json, Network, PortAccess, PortInfo, Rollback, SandboxInfo, SnapshotInfo } from "./models.js";

export interface CreateOptions extends CallOptions {
  tag: string;
  /** Seconds after which the daemon deletes the sandbox; null is never. The default is an hour. */
  ttl?: number | null;
  labels?: Record<string, string>;
  memoryLimitMib?: number;
  /** What programs in the sandbox reach; the default of the daemon if missing. */
  network?: Network;
  idempotencyKey?: string;
  client?: Client | ClientOptions;
}
export interface Outcome<O, R> {
  option: O;
  result?: R;
  score?: number;
  error?: unknown;
}
export interface Exploration<O, R> {
  /** The child with the highest score; the other children are deleted. */
  sandbox: Sandbox;
  option: O;
  result: R;
  score: number;
  outcomes: Outcome<O, R>[];
}

const client = (given: Client | ClientOptions | undefined): Client => (given instanceof Client ? given : new Client(given));
const newKey = (): string => globalThis.crypto.randomUUID();

export class Files {
  readonly #base: string;
  constructor(readonly http: Http, base: string) {
    this.#base = `${base}/files`;
  }
  async read(path: string, options: CallOptions = {}): Promise<string> {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(await this.readBytes(path, options));
  }
  readBytes(path: string, options: CallOptions = {}): Promise<Uint8Array> {
    return this.http.call("GET", this.#base, { query: { path }, ...options });
  }
  /** Writes a file, whole or not at all. Missing directories are made. */
  async write(path: string, data: string | Uint8Array, options: CallOptions & { mode?: number } = {}): Promise<void> {
    const content = typeof data === "string" ? new TextEncoder().encode(data) : data;
    await this.http.call("PUT", this.#base, { content, query: { path, mode: options.mode?.toString(8) }, signal: options.signal });
  }
  async list(path: string, options: CallOptions = {}): Promise<FileEntry[]> {
    return read.rows(await this.http.json("GET", `${this.#base}/list`, { query: { path }, ...options }), (item) => read.fileEntry(item, path));
  }
  /** One path. A symbolic link is described itself, not its target. */
  async stat(path: string, options: CallOptions = {}): Promise<FileEntry> {
    return read.fileEntry(await this.http.json("GET", `${this.#base}/stat`, { query: { path }, ...options }));
  }
  async exists(path: string, options: CallOptions = {}): Promise<boolean> {
    try {
      await this.stat(path, options);
      return true;
    } catch (error) {
      // The daemon refuses a path below a file.
      if (error instanceof FileMissing || (error instanceof InvalidRequest && path.startsWith("/"))) return false;
      throw error;
    }
  }
  async rename(from: string, to: string, options: CallOptions = {}): Promise<void> {
    await this.http.call("POST", `${this.#base}/rename`, { json: { from, to }, ...options });
  }
  async mkdir(path: string, options: CallOptions = {}): Promise<void> {
    await this.http.call("POST", `${this.#base}/mkdir`, { json: { path }, ...options });
  }
  async remove(path: string, options: CallOptions & { recursive?: boolean } = {}): Promise<void> {
    await this.http.call("DELETE", this.#base, { query: { path, recursive: options.recursive ? "true" : undefined }, signal: options.signal });
  }
  /**
   * Changes of a file or directory. The watch is in place when the promise is fulfilled. The changes have no end:
   * `StreamCut` is thrown when the sandbox is deleted.
   */
  async watch(path: string, options: CallOptions & { recursive?: boolean } = {}): Promise<AsyncGenerator<FileChange>> {
    const query = { path, recursive: options.recursive ? "true" : undefined };
    return changes(await this.http.open("GET", `${this.#base}/watch`, { query, signal: options.signal }));
  }
}

async function* changes(lines: AsyncGenerator<unknown>): AsyncGenerator<FileChange> {
  for await (const line of lines) if (!read.isKeepalive(line)) yield read.fileChange(line);
  throw new StreamCut("the watch ended: the sandbox or the daemon is gone");
}

export class Interpreter {
  constructor(readonly http: Http, readonly base: string) {}
  /** Runs code in the warm interpreter. An exception in the guest is part of the result. */
  async run(code: string, options: CallOptions & { timeout?: number } = {}): Promise<Evaluation> {
    const timeoutMs = Math.max(this.http.timeoutMs, (options.timeout ?? 0) * 1000 + 30_000);
    return read.evaluation(await this.http.json("POST", `${this.base}/eval`, { json: { code, timeout_secs: options.timeout }, timeoutMs, signal: options.signal }));
  }
  /** The value of an expression. An exception in the guest is thrown as `EvalError`. */
  async eval(code: string, options: CallOptions & { timeout?: number } = {}): Promise<Json> {
    const result = await this.run(code, options);
    if (result.error !== undefined) throw new EvalError(result);
    return result.value;
  }
}

/** The ports of a guest. The daemon leads to them, so the guest needs no network. */
export class Ports {
  readonly #base: string;
  constructor(readonly http: Http, base: string) {
    this.#base = `${base}/ports`;
  }
  /** The ports on which programs listen, and those with settings. */
  async list(options: CallOptions = {}): Promise<PortInfo[]> {
    return read.rows(await this.http.json("GET", this.#base, options), read.portInfo);
  }
  async get(port: number, options: CallOptions = {}): Promise<PortInfo> {
    return read.portInfo(await this.http.json("GET", `${this.#base}/${port}`, options));
  }
  /** Sets who may use a port. `host` also publishes it, such as `127.0.0.1:0`. */
  async set(port: number, settings: CallOptions & { access?: PortAccess; host?: string } = {}): Promise<PortInfo> {
    const { signal, ...json } = settings;
    return read.portInfo(await this.http.json("PUT", `${this.#base}/${port}`, { json, signal }));
  }
  /** The address of a port on the daemon, for the owner. */
  async url(port: number, options: CallOptions = {}): Promise<string> {
    return this.http.base + (await this.get(port, options)).path;
  }
}

export class Sandbox {
  readonly ports: Ports;
  readonly commands: Commands;
  readonly files: Files;
  readonly interpreter: Interpreter;
  readonly pty: Pty;
  readonly #base: string;

  constructor(readonly client: Client, readonly id: string, readonly tag: string) {
    this.#base = `/v1/sandboxes/${encodeURIComponent(id)}`;
    this.commands = new Commands(client.http, this.#base);
    this.files = new Files(client.http, this.#base);
    this.interpreter = new Interpreter(client.http, this.#base);
    this.pty = new Pty(client.http, this.#base);
    this.ports = new Ports(client.http, this.#base);
  }

  /** Starts a child of a snapshot. */
  static async create(options: CreateOptions): Promise<Sandbox> {
    return (await Sandbox.createMany({ ...options, n: 1 }))[0]!;
  }
  /** Starts `n` children of a snapshot. If some fail, `ForkError` has those that run. */
  static async createMany(options: CreateOptions & { n: number }): Promise<Sandbox[]> {
    const used = client(options.client);
    const json = {
      snapshot_tag: options.tag,
      n: options.n,
      timeout_secs: options.ttl === undefined ? 3600 : (options.ttl ?? undefined),
      labels: options.labels,
      memory_limit_mib: options.memoryLimitMib,
      network: options.network,
    };
    const key = options.idempotencyKey ?? newKey();
    return bindAll(used, await used.http.json("POST", "/v1/sandboxes", { json, key, timeoutMs: LONG_MS, signal: options.signal }));
  }
  /** A handle for a sandbox that runs. */
  static async connect(id: string, options: CallOptions & { client?: Client | ClientOptions } = {}): Promise<Sandbox> {
    const used = client(options.client);
    const info = read.sandboxInfo(await used.http.json("GET", `/v1/sandboxes/${encodeURIComponent(id)}`, { signal: options.signal }));
    return new Sandbox(used, info.id, info.snapshotTag);
  }
  /** Runs `body` with a new sandbox, and deletes it at the end. */
  static async with<T>(options: CreateOptions, body: (sandbox: Sandbox) => Promise<T>): Promise<T> {
    const sandbox = await Sandbox.create(options);
    try {
      return await body(sandbox);
    } finally {
      await sandbox.kill();
    }
  }

  exec(command: Command, options: RunOptions = {}): Promise<CommandResult> {
    return this.commands.run(command, options);
  }
  eval(code: string, options: CallOptions & { timeout?: number } = {}): Promise<Json> {
    return this.interpreter.eval(code, options);
  }
  async info(options: CallOptions = {}): Promise<SandboxInfo> {
    return read.sandboxInfo(await this.client.http.json("GET", this.#base, options));
  }
  /** Deletes the sandbox after this many seconds from now. */
  async setTtl(seconds: number, options: CallOptions = {}): Promise<SandboxInfo> {
    return read.sandboxInfo(await this.client.http.json("PATCH", this.#base, { json: { timeout_secs: seconds }, ...options }));
  }
  /** Replaces the network policy. Connections that the new one does not allow are reset before this returns. */
  async setNetwork(network: Network, options: CallOptions = {}): Promise<SandboxInfo> {
    return read.sandboxInfo(await this.client.http.json("PATCH", this.#base, { json: { network }, ...options }));
  }
  async ping(options: CallOptions = {}): Promise<Record<string, unknown>> {
    return read.fields(await this.client.http.json("POST", `${this.#base}/ping`, options), "ping");
  }
  async pause(options: CallOptions = {}): Promise<SandboxInfo> {
    return read.sandboxInfo(await this.client.http.json("POST", `${this.#base}/pause`, options));
  }
  async resume(options: CallOptions = {}): Promise<SandboxInfo> {
    return read.sandboxInfo(await this.client.http.json("POST", `${this.#base}/resume`, options));
  }
  async logs(options: CallOptions & { tail?: number } = {}): Promise<string> {
    const query = { tail: options.tail?.toString() };
    return new TextDecoder().decode(await this.client.http.call("GET", `${this.#base}/logs`, { query, signal: options.signal }));
  }
  /** Deletes the sandbox. A sandbox that is gone already is no error. */
  async kill(options: CallOptions = {}): Promise<void> {
    try {
      await this.client.http.call("DELETE", this.#base, options);
    } catch (error) {
      if (!(error instanceof SandboxNotFound || error instanceof SandboxGone)) throw error;
    }
  }
  [Symbol.asyncDispose](): Promise<void> {
    return this.kill();
  }

  /** Starts `n` children with the state of this moment. This sandbox goes on. */
  async fork(n = 1, options: CallOptions & { ttl?: number; labels?: Record<string, string>; freeze?: boolean; network?: Network; idempotencyKey?: string } = {}): Promise<Sandbox[]> {
    const json = { n, timeout_secs: options.ttl, labels: options.labels, freeze: options.freeze, network: options.network };
    const key = options.idempotencyKey ?? newKey();
    return bindAll(this.client, await this.client.http.json("POST", `${this.#base}/fork`, { json, key, timeoutMs: LONG_MS, signal: options.signal }));
  }
  /** Freezes this moment under a tag. This sandbox goes on. */
  async branch(options: CallOptions & { tag?: string; mode?: BranchMode; wait?: boolean; freeze?: boolean; idempotencyKey?: string } = {}): Promise<SnapshotInfo> {
    const json = { tag: options.tag, mode: options.mode, wait: options.wait, freeze: options.freeze };
    const key = options.idempotencyKey ?? newKey();
    return read.snapshotInfo(await this.client.http.json("POST", `${this.#base}/branch`, { json, key, timeoutMs: LONG_MS, signal: options.signal }));
  }
  async checkpoint(name?: string, options: CallOptions = {}): Promise<Checkpoint> {
    return read.checkpoint(await this.client.http.json("POST", `${this.#base}/checkpoints`, { json: { name }, timeoutMs: LONG_MS, ...options }));
  }
  async checkpoints(options: CallOptions = {}): Promise<Checkpoint[]> {
    return read.rows(await this.client.http.json("GET", `${this.#base}/checkpoints`, options), read.checkpoint);
  }
  async deleteCheckpoint(name: string, options: CallOptions = {}): Promise<void> {
    await this.client.http.call("DELETE", `${this.#base}/checkpoints/${encodeURIComponent(name)}`, options);
  }
  /** Returns to a checkpoint, the newest if none is named. The sandbox keeps its ID. */
  async rollback(to?: string, options: CallOptions = {}): Promise<Rollback> {
    return read.rollback(await this.client.http.json("POST", `${this.#base}/rollback`, { json: { to }, timeoutMs: LONG_MS, ...options }));
  }
  /** Runs `body`. If it throws, memory, processes and files return to their state before it. */
  async attempt<T>(body: (sandbox: this) => Promise<T>): Promise<T> {
    const before = await this.checkpoint();
    try {
      return await body(this);
    } catch (error) {
      await this.rollback(before.name);
      throw error;
    } finally {
      // An unchanged checkpoint is another name of an earlier one, which stays.
      if (!before.unchanged) await this.deleteCheckpoint(before.name);
    }
  }
  /** Forks one child per option, runs all at the same time, and keeps the child whose result scores highest. */
  async explore<O, R>(options: readonly O[], run: (child: Sandbox, option: O) => Promise<R>, score: (result: R) => number, settings: CallOptions & { adopt?: boolean } = {}): Promise<Exploration<O, R>> {
    const children = await this.fork(options.length, { signal: settings.signal } as CallOptions);
    const done = await Promise.allSettled(children.map((child, index) => run(child, options[index]!)));
    const outcomes = done.map((one, index): Outcome<O, R> => {
      const option = options[index]!;
      return one.status === "fulfilled" ? { option, result: one.value, score: score(one.value) } : { option, error: one.reason };
    });
    let best = -1;
    outcomes.forEach((one, index) => {
      if (one.score !== undefined && (best < 0 || one.score > outcomes[best]!.score!)) best = index;
    });
    await Promise.allSettled(children.filter((_, index) => index !== best).map((child) => child.kill()));
    if (best < 0) throw new ExploreError(outcomes.map((one) => one.error));
    if (settings.adopt) await this.kill();
    const winner = outcomes[best]!;
    return { sandbox: children[best]!, option: winner.option, result: winner.result as R, score: winner.score!, outcomes };
  }
}

/** The children of an answer. If one failed, `ForkError` has the others. */
function bindAll(used: Client, answer: unknown): Sandbox[] {
  const children: Sandbox[] = [];
  const errors: ApiError[] = [];
  for (const info of read.rows(answer, read.sandboxInfo)) {
    if (info.error || info.state === "failed") errors.push(info.error ?? apiError(500, { error: `${info.id} failed`, code: "launch_failed" }, "sandbox"));
    else children.push(new Sandbox(used, info.id, info.snapshotTag));
  }
  if (errors.length > 0) throw new ForkError(children, errors);
  return children;
}
