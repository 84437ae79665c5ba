/**
 * deepagents: a backend whose files and commands are those of a sandbox.
 *
 *     const backend = await ForkdSandbox.create({ tag: "py" });
 *     const agent = createDeepAgent({ model, backend });
 *
 * `checkpoint` and `rollback` undo what an agent did; `fork` gives copies, one for each way to try.
 */

import { BaseSandbox } from "deepagents";

import { ApiError, CommandTimeout, FileMissing, Sandbox, type Checkpoint, type CreateOptions, type Rollback } from "../index.js";

type FileError = "file_not_found" | "permission_denied" | "is_directory" | "invalid_path";

const MAX_OUTPUT = 100_000;

function reason(error: unknown): FileError {
  if (error instanceof FileMissing) return "file_not_found";
  if (!(error instanceof ApiError)) throw error;
  if (/permission denied/i.test(error.message)) return "permission_denied";
  return /is a directory|not a regular file/i.test(error.message) ? "is_directory" : "invalid_path";
}

export class ForkdSandbox extends BaseSandbox {
  readonly id: string;
  readonly #timeout: number;

  /** `timeout` is that of a command, in seconds. */
  constructor(readonly sandbox: Sandbox, options: { timeout?: number } = {}) {
    super();
    this.id = sandbox.id;
    this.#timeout = options.timeout ?? 1800;
  }
  static async create(options: CreateOptions & { timeout?: number }): Promise<ForkdSandbox> {
    return new ForkdSandbox(await Sandbox.create(options), options);
  }

  async execute(command: string): Promise<{ output: string; exitCode: number | null; truncated: boolean }> {
    let output = "";
    let exitCode = 124;
    const add = (text: string): void => void (output += text);
    try {
      exitCode = (await this.sandbox.commands.run(command, { timeout: this.#timeout, onStdout: add, onStderr: add })).exitCode;
    } catch (error) {
      if (!(error instanceof CommandTimeout)) throw error;
      add(`\n${error.message}`);
    }
    return { output: output.slice(0, MAX_OUTPUT), exitCode, truncated: output.length > MAX_OUTPUT };
  }

  /** Writes files. A failure is part of the answer. */
  async uploadFiles(files: Array<[string, Uint8Array]>): Promise<Array<{ path: string; error: FileError | null }>> {
    const write = async ([path, data]: [string, Uint8Array]): Promise<{ path: string; error: FileError | null }> => {
      if (!path.startsWith("/")) return { path, error: "invalid_path" };
      return this.sandbox.files.write(path, data).then(() => ({ path, error: null }), (error: unknown) => ({ path, error: reason(error) }));
    };
    return Promise.all(files.map(write));
  }

  /** Reads files. A failure is part of the answer. */
  async downloadFiles(paths: string[]): Promise<Array<{ path: string; content: Uint8Array | null; error: FileError | null }>> {
    const fetch = async (path: string): Promise<{ path: string; content: Uint8Array | null; error: FileError | null }> => {
      if (!path.startsWith("/")) return { path, content: null, error: "invalid_path" };
      try {
        return { path, content: await this.sandbox.files.readBytes(path), error: null };
      } catch (error) {
        return { path, content: null, error: reason(error) };
      }
    };
    return Promise.all(paths.map(fetch));
  }

  /** Copies of the sandbox as it is now, each a backend of its own. */
  async fork(n = 1): Promise<ForkdSandbox[]> {
    return (await this.sandbox.fork(n)).map((child) => new ForkdSandbox(child, { timeout: this.#timeout }));
  }
  checkpoint(name?: string): Promise<Checkpoint> {
    return this.sandbox.checkpoint(name);
  }
  /** Returns to a checkpoint: files, memory and processes. */
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
