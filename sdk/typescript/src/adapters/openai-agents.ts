/**
 * OpenAI Agents SDK: a sandbox client whose sessions are machines of forkd.
 *
 *     const client = new ForkdSandboxClient();
 *     await run(agent, "…", { sandbox: { client, options: { tag: "py" } } });
 *
 * A workspace is saved as a snapshot of the whole machine: memory, processes and files. A session that is restored from it
 * starts as a copy-on-write child. `fork` of a session copies it while it runs; `checkpoint` and `rollback` undo its work.
 */

import { applyDiff } from "@openai/agents-core";
import { Manifest, normalizeSandboxClientCreateArgs, type Entry, type ManifestInit, type SandboxClientCreateArgs } from "@openai/agents-core/sandbox";

import { CommandTimeout, ForkdError, Sandbox, SandboxGone, SandboxNotFound, type Checkpoint, type Client, type ClientOptions, type Network, type Rollback } from "../index.js";

export type ForkdSandboxOptions = {
  /** Snapshot to start from. */
  tag?: string;
  /** Seconds after which the daemon deletes the sandbox; null is never. */
  ttl?: number | null;
  network?: Network;
  /** Seconds after which the daemon kills a command. */
  commandTimeout?: number;
  /** Ports that others may use by their URL. */
  exposedPorts?: number[];
};
export type ForkdSessionState = {
  [key: string]: unknown;
  manifest: Manifest;
  environment: Record<string, string>;
  workspaceReady: boolean;
  sandboxId: string;
  options: ForkdSandboxOptions;
};
interface ExecArgs {
  cmd: string;
  workdir?: string;
  shell?: string;
  login?: boolean;
  runAs?: string;
}
interface ExecResult {
  output: string;
  stdout: string;
  stderr: string;
  wallTimeSeconds: number;
  exitCode: number;
}

/** A saved workspace that begins with this line is the name of a snapshot. */
const MAGIC = "forkd-snapshot-1\n";
const DAY = 24 * 3600;

export class ForkdSandboxClient {
  readonly backendId = "forkd";
  readonly supportsDefaultOptions = true;
  readonly #settings: ForkdSandboxOptions & { client?: Client | ClientOptions };

  /** The options are defaults of every session. */
  constructor(settings: ForkdSandboxOptions & { client?: Client | ClientOptions } = {}) {
    this.#settings = settings;
  }

  readonly create = async (args?: SandboxClientCreateArgs<ForkdSandboxOptions> | Manifest, manifestOptions?: ForkdSandboxOptions): Promise<ForkdSandboxSession> => {
    const given = normalizeSandboxClientCreateArgs(args, manifestOptions);
    const { client: _, ...defaults } = this.#settings;
    const options = { ...defaults, ...given.options };
    const sandbox = await this.start(options.tag, options);
    const environment = await given.manifest.resolveEnvironment();
    const session = new ForkdSandboxSession(this, sandbox, { manifest: given.manifest, environment, workspaceReady: false, sandboxId: sandbox.id, options });
    try {
      await session.applyManifest(given.manifest);
    } catch (error) {
      await sandbox.kill();
      throw error;
    }
    session.state.workspaceReady = true;
    return session;
  };

  /** Starts a sandbox with the settings of a session. */
  async start(tag: string | undefined, options: ForkdSandboxOptions): Promise<Sandbox> {
    if (!tag) throw new ForkdError("the option tag is missing: name the snapshot to start from");
    const { client } = this.#settings;
    return Sandbox.create({ tag, ...(options.ttl === undefined ? {} : { ttl: options.ttl }), ...(options.network ? { network: options.network } : {}), ...(client ? { client } : {}) });
  }

  /** Finds the sandbox of a session again. If it is gone, another one starts with the files of the manifest. */
  async resume(state: ForkdSessionState): Promise<ForkdSandboxSession> {
    const { client } = this.#settings;
    try {
      return new ForkdSandboxSession(this, await Sandbox.connect(state.sandboxId, client ? { client } : {}), state);
    } catch (error) {
      if (!(error instanceof SandboxNotFound || error instanceof SandboxGone)) throw error;
    }
    return this.create({ manifest: state.manifest, options: state.options });
  }
  async delete(state: ForkdSessionState): Promise<void> {
    const { client } = this.#settings;
    try {
      await (await Sandbox.connect(state.sandboxId, client ? { client } : {})).kill();
    } catch (error) {
      if (!(error instanceof SandboxNotFound || error instanceof SandboxGone)) throw error;
    }
  }
  async serializeSessionState(state: ForkdSessionState): Promise<Record<string, unknown>> {
    const { manifest, ...rest } = state;
    return { ...rest, manifest: { version: manifest.version, root: manifest.root, entries: manifest.entries, users: manifest.users, groups: manifest.groups } };
  }
  async deserializeSessionState(stored: Record<string, unknown>): Promise<ForkdSessionState> {
    const sandboxId = stored["sandboxId"];
    if (typeof sandboxId !== "string") throw new ForkdError("the stored state has no sandbox");
    const manifest = new Manifest(stored["manifest"] as ManifestInit);
    return { manifest, environment: (stored["environment"] ?? {}) as Record<string, string>, workspaceReady: stored["workspaceReady"] === true, sandboxId, options: (stored["options"] ?? {}) as ForkdSandboxOptions };
  }
}

export class ForkdSandboxSession {
  /** The machine; another one after `hydrateWorkspace` from a snapshot. */
  sandbox: Sandbox;

  constructor(readonly client: ForkdSandboxClient, sandbox: Sandbox, readonly state: ForkdSessionState) {
    this.sandbox = sandbox;
  }

  #path(path = ""): string {
    const root = this.state.manifest.root;
    const full = path.startsWith("/") ? path : `${root}/${path}`;
    const parts: string[] = [];
    for (const part of full.split("/")) {
      if (part === "..") parts.pop();
      else if (part !== "" && part !== ".") parts.push(part);
    }
    return `/${parts.join("/")}`;
  }

  // ---- commands

  async exec(args: ExecArgs): Promise<ExecResult> {
    const shell = args.shell ?? "/bin/sh";
    const begin = performance.now();
    let output = "";
    const add = (text: string): void => void (output += text);
    const command = [shell, args.login ? "-lc" : "-c", args.cmd];
    const options = { cwd: this.#path(args.workdir), env: this.state.environment, timeout: this.state.options.commandTimeout ?? DAY, onStdout: add, onStderr: add, ...(args.runAs ? { user: args.runAs } : {}) };
    let result: { stdout: string; stderr: string; exitCode: number };
    try {
      result = await this.sandbox.commands.run(command, options);
    } catch (error) {
      if (!(error instanceof CommandTimeout)) throw error;
      result = { ...error.result, exitCode: 124 };
    }
    return { output, stdout: result.stdout, stderr: result.stderr, exitCode: result.exitCode, wallTimeSeconds: (performance.now() - begin) / 1000 };
  }
  async execCommand(args: ExecArgs): Promise<string> {
    const done = await this.exec(args);
    return `Wall time: ${done.wallTimeSeconds.toFixed(4)} seconds\nProcess exited with code ${done.exitCode}\nOutput:\n${done.output}`;
  }
  async #checked(command: string[], runAs?: string): Promise<string> {
    return (await this.sandbox.commands.run(command, { timeout: DAY, check: true, ...(runAs ? { user: runAs } : {}) })).stdout;
  }

  // ---- files

  async readFile(args: { path: string; runAs?: string; maxBytes?: number }): Promise<Uint8Array> {
    const path = this.#path(args.path);
    if (args.runAs) await this.#checked(["test", "-r", path], args.runAs);
    const content = await this.sandbox.files.readBytes(path);
    return args.maxBytes === undefined ? content : content.subarray(0, args.maxBytes);
  }
  async listDir(args: { path: string }): Promise<Array<{ name: string; path: string; type: "file" | "dir" | "other" }>> {
    const entries = await this.sandbox.files.list(this.#path(args.path));
    return entries.map(({ name, path, kind }) => ({ name, path, type: kind === "file" || kind === "dir" ? kind : "other" }));
  }
  async pathExists(path: string): Promise<boolean> {
    return this.sandbox.files.exists(this.#path(path));
  }
  async directoryExists(path: string): Promise<boolean> {
    return (await this.sandbox.commands.run(["test", "-d", this.#path(path)])).exitCode === 0;
  }
  async viewImage(args: { path: string; runAs?: string }): Promise<{ type: "image"; image: { data: Uint8Array<ArrayBuffer>; mediaType: string } }> {
    const data = new Uint8Array(await this.readFile(args));
    const mediaType = imageType(data);
    if (!mediaType) throw new ForkdError(`${args.path} is not a PNG, JPEG, GIF or WebP image`);
    return { type: "image", image: { data, mediaType } };
  }
  /** Applies patches of the model. */
  createEditor(runAs?: string): {
    createFile(operation: { path: string; diff: string }): Promise<object>;
    updateFile(operation: { path: string; diff: string; moveTo?: string | undefined }): Promise<object>;
    deleteFile(operation: { path: string }): Promise<object>;
  } {
    const write = async (path: string, text: string): Promise<void> => {
      await this.sandbox.files.write(path, text);
      if (runAs) await this.#checked(["chown", "--", runAs, path]);
    };
    return {
      createFile: async ({ path, diff }) => {
        const full = this.#path(path);
        if (await this.sandbox.files.exists(full)) throw new ForkdError(`${path} exists already`);
        await write(full, applyDiff("", diff, "create"));
        return {};
      },
      updateFile: async ({ path, diff, moveTo }) => {
        const [full, target] = [this.#path(path), this.#path(moveTo ?? path)];
        await write(target, applyDiff(await this.sandbox.files.read(full), diff));
        if (target !== full) await this.sandbox.files.remove(full);
        return {};
      },
      deleteFile: async ({ path }) => {
        await this.sandbox.files.remove(this.#path(path));
        return {};
      },
    };
  }

  // ---- the manifest

  async applyManifest(manifest: Manifest, runAs?: string): Promise<void> {
    await this.sandbox.files.mkdir(this.#path());
    for (const group of manifest.groups) await this.#checked(["groupadd", "-f", "--", group.name]);
    for (const user of manifest.users) await this.#checked(["sh", "-c", 'id -- "$1" >/dev/null 2>&1 || useradd -m -- "$1"', "sh", user.name]);
    for (const [path, entry] of Object.entries(manifest.entries)) await this.materializeEntry({ path, entry, ...(runAs ? { runAs } : {}) });
    Object.assign(this.state.environment, await manifest.resolveEnvironment());
  }
  async materializeEntry(args: { path: string; entry: Entry; runAs?: string }): Promise<void> {
    const path = this.#path(args.path);
    await this.#materialize(path, args.entry);
    if (args.runAs) await this.#checked(["chown", "-R", "--", args.runAs, path]);
  }
  async #materialize(path: string, entry: Entry): Promise<void> {
    if (entry.type === "file") return this.sandbox.files.write(path, entry.content);
    if (entry.type === "local_file") return this.sandbox.files.write(path, await (await import("node:fs/promises")).readFile(entry.src));
    if (entry.type === "local_dir") return this.#upload(entry.src ?? ".", path);
    if (entry.type === "dir") {
      await this.sandbox.files.mkdir(path);
      for (const [name, child] of Object.entries(entry.children ?? {})) await this.#materialize(`${path}/${name}`, child);
      return;
    }
    throw new ForkdError(`an entry of the type ${entry.type} cannot be put into a sandbox of forkd`);
  }
  async #upload(from: string, to: string): Promise<void> {
    const [fs, { join }] = [await import("node:fs/promises"), await import("node:path")];
    await this.sandbox.files.mkdir(to);
    for (const item of await fs.readdir(from, { withFileTypes: true })) {
      const source = join(from, item.name);
      // Links could lead out of the directory.
      if (item.isDirectory()) await this.#upload(source, `${to}/${item.name}`);
      else if (item.isFile()) await this.sandbox.files.write(`${to}/${item.name}`, await fs.readFile(source), { mode: (await fs.stat(source)).mode & 0o777 });
    }
  }

  // ---- the workspace, saved and restored

  /** Freezes the machine under a tag, and returns the name of the tag. */
  async persistWorkspace(): Promise<Uint8Array> {
    const snapshot = await this.sandbox.branch({ tag: `agents-${globalThis.crypto.randomUUID()}` });
    return new TextEncoder().encode(MAGIC + JSON.stringify({ tag: snapshot.tag }));
  }
  /** Restores a saved workspace. A snapshot replaces the sandbox by a child of it; other data is a tar archive. */
  async hydrateWorkspace(data: string | ArrayBuffer | Uint8Array): Promise<void> {
    const bytes = typeof data === "string" ? new TextEncoder().encode(data) : new Uint8Array(data);
    const text = new TextDecoder().decode(bytes.subarray(0, 4096));
    if (text.startsWith(MAGIC)) {
      const { tag } = JSON.parse(text.slice(MAGIC.length)) as { tag?: unknown };
      const before = this.sandbox;
      this.sandbox = await this.client.start(String(tag), this.state.options);
      this.state.sandboxId = this.sandbox.id;
      return before.kill();
    }
    await this.sandbox.client.http.call("PUT", `/v1/sandboxes/${this.sandbox.id}/files/archive`, { content: bytes, query: { path: this.#path() } });
  }

  // ---- life

  async running(): Promise<boolean> {
    try {
      await this.sandbox.ping();
      return true;
    } catch (error) {
      if (error instanceof ForkdError) return false;
      throw error;
    }
  }
  async resolveExposedPort(port: number): Promise<{ host: string; port: number; tls: boolean; url: string }> {
    if (!this.state.options.exposedPorts?.includes(port)) throw new ForkdError(`port ${port} is not among the exposed ports`);
    const info = await this.sandbox.ports.set(port, { access: "public" });
    const url = new URL(info.url ?? (await this.sandbox.ports.url(port)));
    const tls = url.protocol === "https:";
    return { host: url.hostname, port: Number(url.port || (tls ? 443 : 80)), tls, url: url.href };
  }
  supportsPty(): boolean {
    return false;
  }
  async delete(): Promise<void> {
    await this.sandbox.kill();
  }
  async close(): Promise<void> {
    await this.sandbox.kill();
  }

  // ---- beyond the interface of the framework

  /** Copies of the session as it is now: files, memory and processes. */
  async fork(n = 1): Promise<ForkdSandboxSession[]> {
    return (await this.sandbox.fork(n)).map((child) => new ForkdSandboxSession(this.client, child, { ...this.state, environment: { ...this.state.environment }, sandboxId: child.id }));
  }
  checkpoint(name?: string): Promise<Checkpoint> {
    return this.sandbox.checkpoint(name);
  }
  rollback(to?: string): Promise<Rollback> {
    return this.sandbox.rollback(to);
  }
}

function imageType(data: Uint8Array): string | undefined {
  const head = String.fromCharCode(...data.subarray(0, 12));
  if (head.startsWith("\x89PNG")) return "image/png";
  if (head.startsWith("\xff\xd8\xff")) return "image/jpeg";
  if (head.startsWith("GIF8")) return "image/gif";
  return head.startsWith("RIFF") && head.endsWith("WEBP") ? "image/webp" : undefined;
}
