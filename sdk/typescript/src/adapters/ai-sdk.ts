/**
 * AI SDK: a sandbox session whose commands and files are those of a sandbox of forkd.
 *
 *     const session = await createForkdSession({ tag: "py" });
 *     await generateText({ model, tools, experimental_sandbox: session, prompt: "…" });
 *
 * `fork` copies the session with its processes; `checkpoint` and `rollback` undo steps of an agent. The session has the type
 * `Experimental_SandboxSession` of the package `ai`, which this module does not import.
 */

import { Sandbox, FileMissing, InvalidRequest, type Checkpoint, type CreateOptions, type Process, type Rollback } from "../index.js";

interface Cancellable {
  abortSignal?: AbortSignal | undefined;
}
interface PathOptions extends Cancellable {
  path: string;
}
export interface CommandOptions extends Cancellable {
  command: string;
  workingDirectory?: string | undefined;
  env?: Record<string, string> | undefined;
}
export interface SpawnedProcess {
  readonly pid: number;
  readonly stdout: ReadableStream<Uint8Array>;
  readonly stderr: ReadableStream<Uint8Array>;
  wait(): Promise<{ exitCode: number }>;
  kill(): Promise<void>;
}
export interface WritableProcess extends SpawnedProcess {
  readonly stdin: WritableStream<Uint8Array>;
}
export interface ForkdSessionOptions {
  /** Base of relative paths and commands. */
  directory?: string;
  /** Seconds after which the daemon kills a command of `run`. */
  timeout?: number;
}

/** Starts a sandbox and returns its session. */
export async function createForkdSession(options: CreateOptions & ForkdSessionOptions): Promise<ForkdSession> {
  return new ForkdSession(await Sandbox.create(options), options);
}

export class ForkdSession {
  readonly #directory: string;
  readonly #timeout: number;

  constructor(readonly sandbox: Sandbox, options: ForkdSessionOptions = {}) {
    this.#directory = options.directory ?? "/root";
    this.#timeout = options.timeout ?? 24 * 3600;
  }

  get description(): string {
    return `A Linux machine of its own (sandbox ${this.sandbox.id}). The base directory is ${this.#directory}. Commands run in /bin/sh as root.`;
  }

  #path(path: string | undefined): string {
    if (path === undefined) return this.#directory;
    return path.startsWith("/") ? path : `${this.#directory}/${path}`;
  }

  // Methods are fields, because the AI SDK may call them without `this`.

  readonly readBinaryFile = async (options: PathOptions): Promise<Uint8Array | null> => missingIsNull(this.sandbox.files.readBytes(this.#path(options.path), { signal: options.abortSignal }));

  readonly readFile = async (options: PathOptions): Promise<ReadableStream<Uint8Array> | null> => {
    const content = await this.readBinaryFile(options);
    return content && stream([content]);
  };

  readonly readTextFile = async (options: PathOptions & { encoding?: string | undefined; startLine?: number | undefined; endLine?: number | undefined }): Promise<string | null> => {
    const content = await this.readBinaryFile(options);
    if (!content) return null;
    const text = new TextDecoder(options.encoding ?? "utf-8").decode(content);
    if (options.startLine === undefined && options.endLine === undefined) return text;
    return text.split(/(?<=\n)/).slice((options.startLine ?? 1) - 1, options.endLine).join("");
  };

  readonly writeBinaryFile = async (options: PathOptions & { content: Uint8Array }): Promise<void> => {
    await this.sandbox.files.write(this.#path(options.path), options.content, { signal: options.abortSignal });
  };

  readonly writeFile = async (options: PathOptions & { content: ReadableStream<Uint8Array> }): Promise<void> => {
    const content = new Uint8Array(await new Response(options.content).arrayBuffer());
    await this.writeBinaryFile({ ...options, content });
  };

  readonly writeTextFile = async (options: PathOptions & { content: string; encoding?: string | undefined }): Promise<void> => {
    if (!/^utf-?8$/i.test(options.encoding ?? "utf-8")) throw new RangeError(`files are written as UTF-8, not as ${options.encoding}`);
    await this.writeBinaryFile({ ...options, content: new TextEncoder().encode(options.content) });
  };

  readonly stat = async (options: PathOptions): Promise<{ type: "file" | "directory" | "other"; size: number } | null> => {
    const path = this.#path(options.path);
    const entry = await missingIsNull(this.sandbox.files.stat(path, { signal: options.abortSignal }));
    if (entry?.kind !== "symlink") return entry && { type: kindOf(entry.kind), size: entry.size };
    const target = await this.sandbox.commands.run(["readlink", "-f", "--", path], { signal: options.abortSignal });
    const final = target.exitCode === 0 ? await missingIsNull(this.sandbox.files.stat(target.stdout.replace(/\n$/, ""), { signal: options.abortSignal })) : null;
    return final && { type: kindOf(final.kind), size: final.size };
  };

  readonly listDirectory = async (options: PathOptions): Promise<Array<{ name: string; type: "file" | "directory" | "symlink" | "other" }> | null> => {
    const found = await this.stat(options);
    if (!found) return null;
    if (found.type !== "directory") throw new Error(`${options.path} is not a directory`);
    const entries = await this.sandbox.files.list(this.#path(options.path), { signal: options.abortSignal });
    return entries.map((entry) => ({ name: entry.name, type: entry.kind === "symlink" ? "symlink" : kindOf(entry.kind) }));
  };

  readonly deleteFile = async (options: PathOptions): Promise<boolean> => {
    const path = this.#path(options.path);
    const entry = await missingIsNull(this.sandbox.files.stat(path, { signal: options.abortSignal }));
    if (!entry) return false;
    if (entry.kind === "dir") throw new Error(`${options.path} is a directory`);
    await this.sandbox.files.remove(path, { signal: options.abortSignal });
    return true;
  };

  readonly run = async (options: CommandOptions): Promise<{ exitCode: number; stdout: string; stderr: string }> => {
    const { exitCode, stdout, stderr } = await this.sandbox.commands.run(options.command, {
      cwd: this.#path(options.workingDirectory),
      env: options.env ?? {},
      timeout: this.#timeout,
      signal: options.abortSignal,
    });
    return { exitCode, stdout, stderr };
  };

  readonly spawn = (async (options: CommandOptions & { stdin?: boolean }): Promise<SpawnedProcess | WritableProcess> => {
    const cwd = this.#path(options.workingDirectory);
    const process = await this.sandbox.commands.start(options.command, { cwd, env: options.env ?? {}, stdin: options.stdin === true, signal: options.abortSignal });
    const spawned = follow(process);
    const kill = (): void => void spawned.kill().catch(() => undefined);
    if (options.abortSignal?.aborted) kill();
    options.abortSignal?.addEventListener("abort", kill, { once: true });
    if (!options.stdin) return spawned;
    const stdin = new WritableStream<Uint8Array>({ write: (chunk) => process.write(chunk), close: () => process.closeStdin(), abort: () => process.closeStdin() });
    return Object.assign(spawned, { stdin });
  }) as {
    (options: CommandOptions & { stdin: true }): Promise<WritableProcess>;
    (options: CommandOptions & { stdin?: false }): Promise<SpawnedProcess>;
    (options: CommandOptions & { stdin?: boolean }): Promise<SpawnedProcess | WritableProcess>;
  };

  /** Copies of the session as it is now: files, memory and processes. */
  async fork(n = 1): Promise<ForkdSession[]> {
    const settings = { directory: this.#directory, timeout: this.#timeout };
    return (await this.sandbox.fork(n)).map((child) => new ForkdSession(child, settings));
  }
  checkpoint(name?: string): Promise<Checkpoint> {
    return this.sandbox.checkpoint(name);
  }
  rollback(to?: string): Promise<Rollback> {
    return this.sandbox.rollback(to);
  }
  close(): Promise<void> {
    return this.sandbox.kill();
  }
  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }
}

const kindOf = (kind: string): "file" | "directory" | "other" => (kind === "dir" ? "directory" : kind === "file" ? "file" : "other");

async function missingIsNull<T>(value: Promise<T>): Promise<T | null> {
  try {
    return await value;
  } catch (error) {
    // The daemon refuses a path below a file: nothing can be there.
    if (error instanceof FileMissing || (error instanceof InvalidRequest && /not a directory/i.test(error.message))) return null;
    throw error;
  }
}

function stream(chunks: Uint8Array[]): ReadableStream<Uint8Array> {
  return new ReadableStream({
    start(controller) {
      for (const chunk of chunks) controller.enqueue(chunk);
      controller.close();
    },
  });
}

/** The output of a process as two streams. A stream that nobody reads keeps its chunks. */
function follow(process: Process): SpawnedProcess {
  const controllers: Partial<Record<"stdout" | "stderr", ReadableStreamDefaultController<Uint8Array>>> = {};
  const side = (name: "stdout" | "stderr"): ReadableStream<Uint8Array> => new ReadableStream({ start: (controller) => void (controllers[name] = controller), cancel: () => void delete controllers[name] });
  const [stdout, stderr] = [side("stdout"), side("stderr")];
  const end = (async () => {
    try {
      for await (const output of process) controllers[output.type]?.enqueue(output.data);
      for (const controller of Object.values(controllers)) controller.close();
    } catch (error) {
      for (const controller of Object.values(controllers)) controller.error(error);
      throw error;
    }
    return { exitCode: process.exitCode ?? 0 };
  })();
  // `wait` reports the failure; a caller that never waits sees it on the streams.
  end.catch(() => undefined);
  const kill = async (): Promise<void> => {
    if (process.exitCode === undefined) await process.kill();
  };
  return { pid: process.pid, stdout, stderr, wait: () => end, kill };
}
