// The parts of the frameworks that the adapters use, so that the package is compiled without them. The tests of the
// adapters compile the same sources with the types of the real packages, and without this file.

declare module "deepagents" {
  export abstract class BaseSandbox {
    abstract readonly id: string;
  }
}

declare module "@openai/agents-core" {
  export function applyDiff(input: string, diff: string, mode?: "create"): string;
}

declare module "@openai/agents-core/sandbox" {
  export type Entry =
    | { type: "dir"; children?: Record<string, Entry> }
    | { type: "file"; content: string | Uint8Array }
    | { type: "local_file"; src: string }
    | { type: "local_dir"; src?: string }
    | { type: "git_repo" };
  export interface ManifestInit {
    version?: number;
    root?: string;
    entries?: Record<string, Entry>;
  }
  export class Manifest {
    readonly version: number;
    readonly root: string;
    readonly entries: Record<string, Entry>;
    readonly users: Array<{ name: string }>;
    readonly groups: Array<{ name: string }>;
    constructor(init?: ManifestInit);
    resolveEnvironment(): Promise<Record<string, string>>;
  }
  export interface SandboxClientCreateArgs<T> {
    manifest?: Manifest | ManifestInit;
    options?: T;
  }
  export function normalizeSandboxClientCreateArgs<T>(args?: SandboxClientCreateArgs<T> | Manifest, options?: T): { manifest: Manifest; options?: T };
}

declare module "@mastra/core/workspace" {
  export abstract class ProcessHandle {
    abstract readonly pid: string;
    abstract readonly exitCode: number | undefined;
    constructor(options?: object);
    wait(): Promise<unknown>;
    closeStdin(): Promise<void>;
    abstract kill(): Promise<boolean>;
    abstract sendStdin(data: string): Promise<void>;
    get stdout(): string;
    get stderr(): string;
    emitStdout(data: string): void;
    emitStderr(data: string): void;
  }
  export abstract class SandboxProcessManager<T> {
    sandbox: T;
    protected readonly env: Record<string, string | undefined>;
    protected readonly _tracked: Map<string, ProcessHandle>;
    spawn(command: string, options?: object): Promise<ProcessHandle>;
    list(): Promise<unknown>;
  }
  export abstract class MastraSandbox {
    readonly supportsCheckpoints: boolean;
    readonly processes?: unknown;
    constructor(options: { name: string; processes: unknown; env: Record<string, string | undefined>; workingDirectory: string });
    get workingDirectory(): string | undefined;
    start(): Promise<void>;
    stop(): Promise<void>;
    destroy(): Promise<void>;
    snapshot(): Promise<void>;
    ensureRunning(): Promise<void>;
  }
}

// Node's modules, which the adapters import only when they need them.
declare module "node:fs/promises" {
  export function readFile(path: string): Promise<Uint8Array>;
  export function stat(path: string): Promise<{ mode: number }>;
  export function readdir(path: string, options: { withFileTypes: true }): Promise<Array<{ name: string; isDirectory(): boolean; isFile(): boolean }>>;
}
declare module "node:path" {
  export function join(...parts: string[]): string;
}
