/** The rooms `commands` and `pty` of a sandbox. */

import { CommandFailed, CommandTimeout, ProtocolError, SandboxUnreachable, StreamCut } from "./errors.js";
import { SILENCE_MS, type CallOptions, type Http } from "./http.js";
import { frame, parse, pid as readPid, processInfo, rows, type CommandResult, type Frame, type ProcessInfo } from "./models.js";

export interface StartOptions extends CallOptions {
  cwd?: string;
  env?: Record<string, string>;
  user?: string;
}
export interface RunOptions extends StartOptions {
  /** Seconds; the daemon kills the command afterwards. */
  timeout?: number;
  stdin?: string;
  onStdout?: (text: string) => void;
  onStderr?: (text: string) => void;
  /** Throw `CommandFailed` for a code other than zero. */
  check?: boolean;
}
export type Output = Extract<Frame, { data: Uint8Array }>;
/** A string is for the guest's shell; a list is a program with its arguments. */
export type Command = string | readonly string[];

const argv = (command: Command): string[] => (typeof command === "string" ? ["/bin/sh", "-c", command] : [...command]);

function request(command: Command, o: RunOptions, timeout?: number): Record<string, unknown> {
  return { args: argv(command), timeout_secs: timeout === undefined ? undefined : Math.max(1, Math.ceil(timeout)), cwd: o.cwd, env: o.env, user: o.user, stdin: o.stdin };
}

class Collected {
  readonly #parts = { stdout: [] as Uint8Array[], stderr: [] as Uint8Array[] };
  add(output: Output): void {
    this.#parts[output.type].push(output.data);
  }
  text(stream: "stdout" | "stderr"): string {
    const decoder = new TextDecoder();
    return this.#parts[stream].map((data) => decoder.decode(data, { stream: true })).join("") + decoder.decode();
  }
  result(exitCode: number, timedOut = false): CommandResult {
    return { stdout: this.text("stdout"), stderr: this.text("stderr"), exitCode, timedOut };
  }
}

export class Commands {
  constructor(readonly http: Http, readonly base: string) {}

  /** Runs a command to its end. Aborting the signal kills the command in the guest. */
  async run(command: Command, options: RunOptions = {}): Promise<CommandResult> {
    const collected = new Collected();
    const decoders = { stdout: new TextDecoder(), stderr: new TextDecoder() };
    const callbacks = { stdout: options.onStdout, stderr: options.onStderr };
    let result: CommandResult | undefined;
    for await (const one of this.stream(command, options)) {
      if (one.type === "exit") result = collected.result(one.exitCode, one.timedOut);
      else if (one.type !== "started") {
        collected.add(one);
        callbacks[one.type]?.(decoders[one.type].decode(one.data, { stream: true }));
      }
    }
    if (!result) throw new ProtocolError("the command has no exit code");
    if (result.timedOut) throw new CommandTimeout(argv(command), options.timeout ?? 60, result);
    if (options.check && result.exitCode !== 0) throw new CommandFailed(argv(command), result);
    return result;
  }

  /** The frames of a command as they come. The command is killed when the iteration ends early. */
  async *stream(command: Command, options: RunOptions = {}): AsyncGenerator<Frame> {
    const timeout = options.timeout ?? 60;
    yield* frames(this.http, "POST", `${this.base}/exec/stream`, { json: request(command, options, timeout), signal: options.signal });
  }

  /**
   * Starts a command in the background. The command has no timeout and outlives the connection. A text is its whole input;
   * with `stdin: true` its input stays open for `write`.
   */
  async start(command: Command, options: StartOptions & { stdin?: string | boolean } = {}): Promise<Process> {
    const { stdin, ...rest } = options;
    const json = { ...request(command, rest), open_stdin: stdin !== undefined && stdin !== false };
    const process = this.connect(readPid(await this.http.json("POST", `${this.base}/processes`, { json, signal: options.signal })));
    if (typeof stdin === "string") {
      await process.write(stdin, options);
      await process.closeStdin(options);
    }
    return process;
  }

  /** A process that was started in the background. */
  connect(pid: number): Process {
    return new Process(this.http, this.base, pid);
  }

  /** Starts a command whose input stays open. The command is killed when the connection closes. */
  open(command: Command, options: StartOptions = {}): Promise<Session> {
    return Session.start(this.http, this.base, { args: argv(command) }, options);
  }

  async list(options: CallOptions = {}): Promise<ProcessInfo[]> {
    return rows(await this.http.json("GET", `${this.base}/processes`, options), processInfo);
  }
}

export class Pty {
  constructor(readonly http: Http, readonly base: string) {}

  /** A program on a terminal; the user's shell if no command is given. */
  create(command?: Command, options: StartOptions & { rows?: number; cols?: number } = {}): Promise<Session> {
    const args = command === undefined ? [] : argv(command);
    return Session.start(this.http, this.base, { args, rows: options.rows ?? 24, cols: options.cols ?? 80 }, options);
  }
}

/** A process in the background. Iterating yields its kept output, then new output, and ends with the process. */
export class Process {
  exitCode: number | undefined;
  constructor(readonly http: Http, readonly base: string, readonly pid: number) {}

  [Symbol.asyncIterator](): AsyncGenerator<Output> {
    return this.output();
  }
  async *output(options: CallOptions = {}): AsyncGenerator<Output> {
    try {
      for await (const one of frames(this.http, "GET", `${this.base}/processes/${this.pid}/output`, options)) {
        if (one.type === "exit") this.exitCode = one.exitCode;
        else if (one.type !== "started") yield one;
      }
    } catch (error) {
      if (error instanceof StreamCut) error.pid = this.pid;
      throw error;
    }
  }
  async wait(options: CallOptions = {}): Promise<CommandResult> {
    const collected = new Collected();
    for await (const one of this.output(options)) collected.add(one);
    if (this.exitCode === undefined) throw new ProtocolError("the process has no exit code");
    return collected.result(this.exitCode);
  }
  /** Sends data to the input of a process that was started with `stdin`. */
  async write(data: string | Uint8Array, options: CallOptions = {}): Promise<void> {
    const content = typeof data === "string" ? new TextEncoder().encode(data) : data;
    await this.http.call("POST", `${this.base}/processes/${this.pid}/stdin`, { content, signal: options.signal });
  }
  /** Ends the input. */
  async closeStdin(options: CallOptions = {}): Promise<void> {
    await this.http.call("POST", `${this.base}/processes/${this.pid}/stdin`, { content: new Uint8Array(), query: { eof: "true" }, signal: options.signal });
  }
  async signal(number: number, options: CallOptions = {}): Promise<void> {
    await this.http.call("POST", `${this.base}/processes/${this.pid}/signal`, { json: { signal: number }, ...options });
  }
  kill(options: CallOptions = {}): Promise<void> {
    return this.signal(9, options);
  }
}

/** A program with input. Iterating yields its output until it ends. The daemon kills it when the connection closes. */
export class Session {
  pid: number | undefined;
  exitCode: number | undefined;
  readonly #queue: MessageEvent[] = [];
  #closed = false;
  #wake: (() => void) | undefined;

  constructor(readonly socket: WebSocket, readonly silenceMs: number = SILENCE_MS) {
    const wake = (): void => this.#wake?.();
    socket.onmessage = (message) => (this.#queue.push(message), wake());
    const close = (): void => ((this.#closed = true), wake());
    socket.onclose = close;
    socket.onerror = close;
  }

  static async start(http: Http, base: string, start: Record<string, unknown>, options: StartOptions): Promise<Session> {
    const session = new Session(await http.socket(`${base}/terminal`, options.signal));
    options.signal?.addEventListener("abort", () => session.kill(), { once: true });
    session.#send(JSON.stringify({ ...start, env: options.env ?? {}, cwd: options.cwd, user: options.user }));
    // The first frame says that the program runs, or why it does not.
    await session.#next();
    return session;
  }
  #send(message: string | Uint8Array): void {
    if (this.#closed) throw new StreamCut("the connection to the program is closed", this.pid);
    this.socket.send(message as string);
  }
  write(data: string | Uint8Array): void {
    this.#send(typeof data === "string" ? new TextEncoder().encode(data) : data);
  }
  closeStdin(): void {
    this.#send(JSON.stringify({ type: "eof" }));
  }
  resize(rows: number, cols: number): void {
    this.#send(JSON.stringify({ type: "resize", rows, cols }));
  }
  signal(number: number): void {
    this.#send(JSON.stringify({ type: "signal", signal: number }));
  }
  kill(): void {
    this.socket.close();
  }
  /** Whether a message, or the end, comes in time. The daemon sends a keepalive after 15 s of silence. */
  async #arrival(): Promise<boolean> {
    let timer: ReturnType<typeof setTimeout> | undefined;
    const woken = new Promise<boolean>((resolve) => (this.#wake = () => resolve(true)));
    const late = new Promise<boolean>((resolve) => (timer = setTimeout(() => resolve(false), this.silenceMs)));
    return Promise.race([woken, late]).finally(() => clearTimeout(timer));
  }
  async #next(): Promise<Output | undefined> {
    for (;;) {
      const message = this.#queue.shift();
      if (!message) {
        if (this.#closed) throw new StreamCut("the connection closed before the program ended", this.pid);
        if (!(await this.#arrival())) {
          this.kill();
          throw new SandboxUnreachable(`no message for ${this.silenceMs} ms`, this.pid);
        }
        continue;
      }
      if (message.data instanceof ArrayBuffer) {
        const data = new Uint8Array(message.data);
        if (data.length > 1) return { type: data[0] === 2 ? "stderr" : "stdout", data: data.subarray(1) };
        continue;
      }
      const one = frame(parse(String(message.data), "terminal"));
      if (one?.type === "started") this.pid = one.pid;
      else if (one?.type === "exit") this.exitCode = one.exitCode;
      else continue;
      return undefined;
    }
  }
  async *[Symbol.asyncIterator](): AsyncGenerator<Output> {
    while (this.exitCode === undefined) {
      const output = await this.#next();
      if (output) yield output;
    }
  }
  async wait(): Promise<CommandResult> {
    const collected = new Collected();
    for await (const one of this) collected.add(one);
    return collected.result(this.exitCode ?? 0);
  }
}

/** The frames of a process. A stream that ends without its exit frame is a `StreamCut`. */
async function* frames(http: Http, method: string, path: string, options: CallOptions & { json?: unknown }): AsyncGenerator<Frame> {
  let pid: number | undefined;
  try {
    for await (const line of await http.open(method, path, options)) {
      const one = frame(line);
      if (one?.type === "started") pid = one.pid;
      if (one) yield one;
      if (one?.type === "exit") return;
    }
  } catch (error) {
    if (error instanceof StreamCut) error.pid = pid;
    throw error;
  }
  throw new StreamCut("the output ended before the process did", pid);
}
