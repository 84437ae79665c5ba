/** TypeScript client of forkd: microVMs that start copy-on-write from a warm parent. */

export { Client, Snapshots, type CreateSnapshotOptions } from "./client.js";
export { Commands, Process, Pty, Session, type Command, type Output, type RunOptions, type StartOptions } from "./commands.js";
export * from "./errors.js";
export type { CallOptions, ClientOptions, WebSocketClass } from "./http.js";
export type { BranchMode, Checkpoint, CommandResult, Evaluation, Event, FileChange, FileEntry, Frame, Json, Network, PortAccess, PortInfo, ProcessInfo, Rollback, SandboxInfo, SnapshotInfo } from "./models.js";
export { Files, Interpreter, Ports, Sandbox, type CreateOptions, type Exploration, type Outcome } from "./sandbox.js";
