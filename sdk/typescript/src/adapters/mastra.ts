/**
 * Mastra: a sandbox for workspaces.
 *
 *     const sandbox = new ForkdMastraSandbox({ tag: "py" });
 *     new Agent({ ..., workspace: new Workspace({ sandbox }) });
 *
 * `snapshot` keeps the state of the machine, and `rollback` returns to it: files, memory and processes. `fork` starts copies
 * that run already. `clone` of the interface is a further machine from the same snapshot.
 */

import { MastraSandbox, ProcessHandle, SandboxProcessManager } from "@mastra/core/workspace";

import { ForkdError, Sandbox, type Client, type ClientOptions, type Network, type Process } from "../index.js";

type Status = "pending" | "starting" | "running" | "stopping" | "stopped" | "destroying" | "destroyed" | "error";
interface Environment {
  [name: string]: string | undefined;
}
export interface CommandOptions {
  timeout?: number;
  env?: Environment;
  cwd?: string;
  onStdout?: (data: string) => void;
  onStderr?: (data: string) => void;
  abortSignal?: AbortSignal;
  maxRetainedBytes?: number;
  stdinMode?: "pipe" | "ignore";
}
interface Result {
  success: boolean;
  exitCode: number;
  stdout: string;
  stderr: string;
  executionTimeMs: number;
  timedOut: boolean;
  killed: boolean;
}
export interface ForkdMastraOptions {
  tag: string;
  ttl?: number | null;
  network?: Network;
  client?: Client | ClientOptions;
  env?: Environment;
  /** Directory of commands that name none. */
  workingDirectory?: string;
}

class ForkdHandle extends ProcessHandle {
  readonly pid: string;
  readonly #process: Process;
  readonly #end: Promise<Result>;
  #killed = false;

  constructor(process: Process, options: CommandOptions) {
    super(options);
    this.pid = String(process.pid);
    this.#process = process;
    this.#end = this.#follow(options.timeout);
    // `wait` reports the failure.
    this.#end.catch(() => undefined);
  }
  get exitCode(): number | undefined {
    return this.#process.exitCode;
  }
  async #follow(timeout: number | undefined): Promise<Result> {
    const begin = performance.now();
    let timedOut = false;
    const expire = (): void => {
      timedOut = true;
      void this.#process.kill().catch(() => undefined);
    };
    const timer = timeout ? setTimeout(expire, timeout) : undefined;
    const decoders = { stdout: new TextDecoder(), stderr: new TextDecoder() };
    try {
      for await (const output of this.#process) {
        const text = decoders[output.type].decode(output.data, { stream: true });
        if (output.type === "stdout") this.emitStdout(text);
        else this.emitStderr(text);
      }
    } finally {
      clearTimeout(timer);
    }
    const exitCode = this.#process.exitCode ?? 0;
    return { success: exitCode === 0, exitCode, stdout: this.stdout, stderr: this.stderr, executionTimeMs: performance.now() - begin, timedOut, killed: this.#killed || timedOut };
  }
  override wait(): Promise<Result> {
    return this.#end;
  }
  async kill(): Promise<boolean> {
    if (this.exitCode !== undefined) return false;
    this.#killed = true;
    await this.#process.kill();
    return true;
  }
  sendStdin(data: string): Promise<void> {
    return this.#process.write(data);
  }
  override closeStdin(): Promise<void> {
    return this.#process.closeStdin();
  }
}

class ForkdProcesses extends SandboxProcessManager<ForkdMastraSandbox> {
  override async spawn(command: string, options: CommandOptions = {}): Promise<ProcessHandle> {
    const env = Object.fromEntries(Object.entries({ ...this.env, ...options.env }).filter((pair): pair is [string, string] => pair[1] !== undefined));
    const cwd = options.cwd ?? this.sandbox.workingDirectory ?? "/root";
    const process = await this.sandbox.machine.commands.start(command, { cwd, env, stdin: options.stdinMode !== "ignore" });
    const handle = new ForkdHandle(process, options);
    this._tracked.set(handle.pid, handle);
    return handle;
  }
  override async list(): Promise<Array<{ pid: string; command?: string; running: boolean; exitCode?: number }>> {
    const found = await this.sandbox.machine.commands.list();
    return found.map(({ pid, args, running, exitCode }) => ({ pid: String(pid), command: args.join(" "), running, ...(exitCode === undefined ? {} : { exitCode }) }));
  }
}

export class ForkdMastraSandbox extends MastraSandbox {
  readonly id: string;
  readonly name = "forkd";
  readonly provider = "forkd";
  status: Status = "pending";
  override readonly supportsCheckpoints = true;
  readonly #options: ForkdMastraOptions;
  #sandbox: Sandbox | undefined;

  constructor(options: ForkdMastraOptions, running?: Sandbox) {
    super({ name: "forkd", processes: new ForkdProcesses(), env: options.env ?? {}, workingDirectory: options.workingDirectory ?? "/root" });
    this.#options = options;
    this.#sandbox = running;
    this.id = running?.id ?? `forkd-${globalThis.crypto.randomUUID()}`;
  }

  /** The sandbox; there is one after `start`. */
  get machine(): Sandbox {
    if (!this.#sandbox) throw new ForkdError("the sandbox is not started");
    return this.#sandbox;
  }
  readonly networking = { getPortUrl: async (port: number): Promise<string | null> => (await this.machine.ports.get(port)).url ?? this.machine.ports.url(port) };

  override async start(): Promise<void> {
    const { tag, ttl, network, client } = this.#options;
    this.#sandbox ??= await Sandbox.create({ tag, ...(ttl === undefined ? {} : { ttl }), ...(network ? { network } : {}), ...(client ? { client } : {}) });
  }
  override async stop(): Promise<void> {
    await this.destroy();
  }
  override async destroy(): Promise<void> {
    await this.#sandbox?.kill();
    this.#sandbox = undefined;
  }
  async getInfo(): Promise<{ id: string; name: string; provider: string; status: Status; createdAt: Date; metadata: Record<string, unknown> }> {
    const info = await this.machine.info();
    return { id: this.id, name: this.name, provider: this.provider, status: this.status, createdAt: new Date(Number(info.raw["created_at_unix"]) * 1000), metadata: { sandbox: info.id, tag: info.snapshotTag } };
  }
  getInstructions(): string {
    return `Commands run as root in a Linux machine of their own, in ${this.workingDirectory ?? "/root"}.`;
  }
  async writeFiles(files: Array<{ path: string; content: string | Uint8Array; mode?: number }>, options: { abortSignal?: AbortSignal } = {}): Promise<void> {
    await this.ensureRunning();
    for (const { path, content, mode } of files) await this.machine.files.write(path, content, { ...(mode === undefined ? {} : { mode }), signal: options.abortSignal });
  }

  /** Keeps this moment of the machine. */
  override async snapshot(): Promise<void> {
    await this.ensureRunning();
    await this.machine.checkpoint();
  }
  /** Returns to the newest snapshot, or to a checkpoint with this name: files, memory and processes. */
  async rollback(to?: string): Promise<void> {
    await this.machine.rollback(to);
  }
  /** Copies of the machine as it is now. */
  async fork(n = 1): Promise<ForkdMastraSandbox[]> {
    await this.ensureRunning();
    return (await this.machine.fork(n)).map((child) => new ForkdMastraSandbox(this.#options, child));
  }
  /** A further machine from the same snapshot tag. */
  clone(options: { env?: Record<string, string>; workingDirectory?: string } = {}): ForkdMastraSandbox {
    return new ForkdMastraSandbox({ ...this.#options, ...(options.env ? { env: options.env } : {}), ...(options.workingDirectory ? { workingDirectory: options.workingDirectory } : {}) });
  }
}
