/** Requests to the daemon: address, token, retries, streams. Uses nothing but `fetch` and `WebSocket`. */

import { ConnectionFailed, InvalidAddress, ProtocolError, RequestTimeout, SandboxUnreachable, StreamCut, apiError, ForkdError } from "./errors.js";
import { parse } from "./models.js";

export interface ClientOptions {
  /** `http://HOST:PORT` or `https://HOST:PORT`; otherwise `FORKD_URL`, otherwise the default port on this host. */
  url?: string | undefined;
  token?: string | undefined;
  /** Milliseconds for one answer. Calls that take longer by nature have their own. */
  timeoutMs?: number | undefined;
  retries?: number | undefined;
  /** Another `fetch`, for example one with a dispatcher for a Unix socket. */
  fetch?: typeof globalThis.fetch | undefined;
  /** Another `WebSocket`, for runtimes without one (Node 20). */
  webSocket?: WebSocketClass | undefined;
}
/** The constructor of runtimes that accept headers. */
export type WebSocketClass = new (url: string, options?: any) => WebSocket;
/** Every call can be cancelled. */
export interface CallOptions {
  signal?: AbortSignal | undefined;
}
export interface RequestOptions extends CallOptions {
  json?: unknown;
  content?: Uint8Array | undefined;
  query?: Record<string, string | undefined> | undefined;
  /** Idempotency key, the same for every repetition. */
  key?: string | undefined;
  timeoutMs?: number | undefined;
}

const TRANSIENT = new Set(["rate_limited", "busy", "shutting_down"]);
export const LONG_MS = 600_000;
/** The daemon sends a keepalive after every 15 s of silence: a stream that is silent for longer is dead. */
export const SILENCE_MS = 45_000;

function variable(name: string): string | undefined {
  const process = (globalThis as { process?: { env?: Record<string, string | undefined> } }).process;
  return process?.env?.[name] || undefined;
}

function address(text: string): string {
  const host = /^https?:\/\/([^/?# @]+)\/*$/.exec(text);
  if (!host) throw new InvalidAddress(`${JSON.stringify(text)} is not the address of a daemon: write http://HOST:PORT or https://HOST:PORT`);
  return text.replace(/\/+$/, "");
}

/** Milliseconds to wait before a repetition. The daemon's wish has precedence, up to 30 s. */
function delay(attempt: number, wished: string | null): number {
  const seconds = Number(wished ?? 0);
  if (seconds > 0) return Math.min(seconds, 30) * 1000;
  const top = Math.min(5000, 100 * 2 ** attempt);
  return top / 2 + (Math.random() * top) / 2;
}

function sleep(ms: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const stop = (): void => {
      clearTimeout(timer);
      reject(signal?.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", stop);
      resolve();
    }, ms);
    signal?.addEventListener("abort", stop, { once: true });
  });
}

export class Http {
  readonly base: string;
  readonly timeoutMs: number;
  readonly #token: string | undefined;
  readonly #retries: number;
  readonly #fetch: typeof globalThis.fetch;
  readonly #webSocket: WebSocketClass | undefined;

  constructor(options: ClientOptions = {}) {
    this.base = address(options.url ?? variable("FORKD_URL") ?? "http://127.0.0.1:8889");
    this.timeoutMs = options.timeoutMs ?? 60_000;
    this.#token = options.token ?? variable("FORKD_TOKEN");
    this.#retries = options.retries ?? 3;
    this.#fetch = options.fetch ?? globalThis.fetch.bind(globalThis);
    this.#webSocket = options.webSocket ?? (globalThis.WebSocket as WebSocketClass | undefined);
  }

  #headers(): Record<string, string> {
    return this.#token ? { authorization: `Bearer ${this.#token}` } : {};
  }

  /** Sends a request, repeats it where that is harmless, and returns a successful answer. */
  async #send(method: string, path: string, options: RequestOptions, limit: AbortSignal | undefined): Promise<Response> {
    options.signal?.throwIfAborted();
    const headers = this.#headers();
    if (options.key) headers["idempotency-key"] = options.key;
    if (options.json !== undefined) headers["content-type"] = "application/json";
    if (options.content) headers["content-type"] = "application/octet-stream";
    const url = new URL(this.base + path);
    for (const [name, value] of Object.entries(options.query ?? {})) if (value !== undefined) url.searchParams.set(name, value);
    const harmless = ["GET", "PUT", "DELETE"].includes(method) || options.key !== undefined;
    const body = options.content ?? (options.json === undefined ? undefined : JSON.stringify(options.json));
    const signals = [options.signal, limit].filter((one) => one !== undefined);
    for (let attempt = 0; ; attempt++) {
      const last = attempt >= this.#retries;
      let wished: string | null = null;
      try {
        const init: RequestInit = { method, headers, signal: AbortSignal.any(signals) };
        if (body !== undefined) init.body = body as BodyInit;
        const response = await this.#fetch(url, init);
        if (response.ok) return response;
        const refusal = await read(response);
        if (last || !isTransient(response.status, refusal, harmless)) throw apiError(response.status, refusal, url.href);
        wished = response.headers.get("retry-after");
      } catch (cause) {
        if (cause instanceof ForkdError) throw cause;
        options.signal?.throwIfAborted();
        if (limit?.aborted) throw new RequestTimeout(`${method} ${path}: no answer in time`, { cause });
        if (last || !(harmless || neverSent(cause))) throw new ConnectionFailed(`${method} ${path}: ${why(cause)}`, { cause });
      }
      await sleep(delay(attempt, wished), options.signal);
    }
  }

  async call(method: string, path: string, options: RequestOptions = {}): Promise<Uint8Array> {
    const limit = AbortSignal.timeout(options.timeoutMs ?? this.timeoutMs);
    const response = await this.#send(method, path, options, limit);
    try {
      return new Uint8Array(await response.arrayBuffer());
    } catch (cause) {
      options.signal?.throwIfAborted();
      throw new ConnectionFailed(`${method} ${path}: ${why(cause)}`, { cause });
    }
  }

  /** The JSON of the answer; undefined if the answer is empty. */
  async json(method: string, path: string, options: RequestOptions = {}): Promise<unknown> {
    const text = new TextDecoder().decode(await this.call(method, path, options));
    return text === "" ? undefined : parse(text, `${method} ${path}`);
  }

  /**
   * The lines of an NDJSON stream, once the daemon has accepted the request. Ending the iteration closes the connection.
   * `silenceMs` is the longest time without a byte.
   */
  async open(method: string, path: string, options: RequestOptions & { silenceMs?: number | undefined } = {}): Promise<AsyncGenerator<unknown>> {
    const silenceMs = options.silenceMs ?? SILENCE_MS;
    const end = new AbortController();
    const late = new AbortController();
    const timer = setTimeout(() => late.abort(), silenceMs);
    try {
      const signal = AbortSignal.any([end.signal, ...(options.signal ? [options.signal] : [])]);
      const response = await this.#send(method, path, { ...options, signal }, late.signal);
      return lines(response, path, end, { ...options, silenceMs });
    } catch (cause) {
      if (cause instanceof RequestTimeout) throw new SandboxUnreachable(`${path}: no byte for ${silenceMs} ms`, undefined, { cause });
      throw cause;
    } finally {
      clearTimeout(timer);
    }
  }

  /** A WebSocket to a route. */
  async socket(path: string, signal?: AbortSignal): Promise<WebSocket> {
    if (!this.#webSocket) throw new ForkdError("this runtime has no WebSocket: give a class with the option webSocket, or use Node 22");
    signal?.throwIfAborted();
    const socket = new this.#webSocket(this.base.replace(/^http/, "ws") + path, this.#token ? { headers: this.#headers() } : undefined);
    socket.binaryType = "arraybuffer";
    await new Promise<void>((resolve, reject) => {
      socket.onopen = () => resolve();
      socket.onerror = () => reject(new ConnectionFailed(`${path}: the connection was refused`));
      signal?.addEventListener("abort", () => (socket.close(), reject(signal.reason)), { once: true });
    });
    return socket;
  }
}

async function* lines(response: Response, path: string, end: AbortController, options: CallOptions & { silenceMs?: number | undefined }): AsyncGenerator<unknown> {
  if (!response.body) throw new ProtocolError(`${path}: the answer has no body`);
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let silent = false;
  try {
    for (;;) {
      const timer = options.silenceMs === undefined ? undefined : setTimeout(() => ((silent = true), end.abort()), options.silenceMs);
      const piece = await reader.read().finally(() => clearTimeout(timer));
      rest += piece.done ? decoder.decode() : decoder.decode(piece.value, { stream: true });
      const parts = rest.split("\n");
      rest = piece.done ? "" : (parts.pop() ?? "");
      for (const part of parts) if (part.trim() !== "") yield parse(part, path);
      if (piece.done) return;
    }
  } catch (cause) {
    if (cause instanceof ForkdError) throw cause;
    options.signal?.throwIfAborted();
    if (silent) throw new SandboxUnreachable(`${path}: no byte for ${options.silenceMs} ms`, undefined, { cause });
    throw new StreamCut(`${path}: ${why(cause)}`, undefined, { cause });
  } finally {
    end.abort();
  }
}

async function read(response: Response): Promise<unknown> {
  const text = await response.text();
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

function isTransient(status: number, body: unknown, harmless: boolean): boolean {
  if (status === 429) return true;
  if (!harmless) return false;
  const code = typeof body === "object" && body !== null ? (body as Record<string, unknown>)["code"] : undefined;
  // Without a code the answer is not the daemon's: a proxy between could not reach it.
  return typeof code === "string" ? TRANSIENT.has(code) : [502, 503, 504].includes(status);
}

/** Whether the connection could not be made, so that the daemon has not seen the request. */
function neverSent(cause: unknown): boolean {
  const code = ((cause as { cause?: { code?: unknown } } | undefined)?.cause ?? {}).code;
  return code === "ECONNREFUSED" || code === "ENOTFOUND" || code === "EAI_AGAIN" || code === "UND_ERR_CONNECT_TIMEOUT";
}

function why(cause: unknown): string {
  const inner = (cause as { cause?: unknown } | undefined)?.cause;
  return inner instanceof Error ? inner.message : cause instanceof Error ? cause.message : String(cause);
}
