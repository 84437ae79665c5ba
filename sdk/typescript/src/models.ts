/** Results of the client, and the parsers of the daemon's answers. A field of the wrong type is a `ProtocolError`. */

import { ApiError, ProtocolError, apiError } from "./errors.js";

export type BranchMode = "full" | "diff" | "live";
/** A network mode, or a policy with rules such as `allow api.example:443`. */
export type Network = "none" | "public" | "open" | "custom" | { mode: "none" | "public" | "open" | "custom"; rules?: string[]; limits?: Record<string, number> };
export type Json = null | boolean | number | string | Json[] | { [name: string]: Json };

export interface SandboxInfo {
  id: string;
  snapshotTag: string;
  state: string;
  labels: Record<string, string>;
  error: ApiError | undefined;
  /** Every field of the daemon's answer. */
  raw: Record<string, unknown>;
}
export interface SnapshotInfo {
  tag: string;
  status: string | undefined;
  raw: Record<string, unknown>;
}
export interface Checkpoint {
  name: string;
  pauseUs: number;
  bytes: number;
  unchanged: boolean;
}
export interface Rollback {
  to: string;
  pauseUs: number;
  pages: number;
}
/** A negative exit code is the number of the signal that ended the command. */
export interface CommandResult {
  stdout: string;
  stderr: string;
  exitCode: number;
  timedOut: boolean;
}
export type Frame =
  | { type: "started"; pid: number }
  | { type: "stdout" | "stderr"; data: Uint8Array }
  | { type: "exit"; exitCode: number; timedOut: boolean };
export interface ProcessInfo {
  pid: number;
  args: string[];
  running: boolean;
  exitCode: number | undefined;
}
/** `value` is the result if it could be converted to JSON, otherwise its printed form. */
export interface Evaluation {
  value: Json;
  text: string | undefined;
  stdout: string;
  stderr: string;
  error: string | undefined;
  traceback: string | undefined;
}
export interface FileEntry {
  name: string;
  path: string;
  kind: string;
  size: number;
  mode: number;
  /** Where a symbolic link points. */
  target: string | undefined;
}
export type PortAccess = "owner" | "token" | "public";
export interface PortInfo {
  port: number;
  listening: boolean;
  access: PortAccess;
  /** Path of the port on the daemon, for the owner. */
  path: string;
  /** URL under the host name of the port. */
  url: string | undefined;
  /** Address on which the daemon's host publishes the port. */
  host: string | undefined;
  /** For the header `Forkd-Access-Token`, if the access is `token`. */
  token: string | undefined;
}
export interface FileChange {
  change: string;
  path: string;
}
export interface Event {
  seq: number;
  atUnixMs: number;
  kind: string;
  object: string;
  detail: string | undefined;
}

type Fields = Record<string, unknown>;

export function fields(value: unknown, what: string): Fields {
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw new ProtocolError(`${what}: expected a JSON object`);
  return value as Fields;
}
function want<T>(f: Fields, name: string, kind: string): T {
  if (typeof f[name] !== kind) throw new ProtocolError(`field ${name} is missing or malformed`);
  return f[name] as T;
}
const text = (f: Fields, name: string): string => want(f, name, "string");
const number = (f: Fields, name: string): number => want(f, name, "number");
const maybe = (f: Fields, name: string): string | undefined => (f[name] == null ? undefined : text(f, name));

export function rows<T>(value: unknown, read: (item: unknown) => T): T[] {
  if (!Array.isArray(value)) throw new ProtocolError("expected a JSON list");
  return value.map((item) => read(item));
}
export function sandboxInfo(value: unknown): SandboxInfo {
  const f = fields(value, "sandbox");
  const error = f["error"] == null ? undefined : apiError(500, f["error"], "sandbox");
  const labels = f["labels"] == null ? {} : (fields(f["labels"], "labels") as Record<string, string>);
  return { id: text(f, "id"), snapshotTag: text(f, "snapshot_tag"), state: maybe(f, "state") ?? "running", labels, error, raw: f };
}
export function snapshotInfo(value: unknown): SnapshotInfo {
  const f = fields(value, "snapshot");
  return { tag: text(f, "tag"), status: maybe(f, "status"), raw: f };
}
export function checkpoint(value: unknown): Checkpoint {
  const f = fields(value, "checkpoint");
  return { name: text(f, "name"), pauseUs: number(f, "pause_us"), bytes: number(f, "bytes"), unchanged: f["unchanged"] === true };
}
export function rollback(value: unknown): Rollback {
  const f = fields(value, "rollback");
  return { to: text(f, "to"), pauseUs: number(f, "pause_us"), pages: number(f, "pages") };
}
export function processInfo(value: unknown): ProcessInfo {
  const f = fields(value, "process");
  const args = rows(f["args"], String);
  return { pid: number(f, "pid"), args, running: f["running"] === true, exitCode: f["exit_code"] == null ? undefined : number(f, "exit_code") };
}
export function pid(value: unknown): number {
  return number(fields(value, "process"), "pid");
}
export function evaluation(value: unknown): Evaluation {
  const f = fields(value, "eval");
  const shown = maybe(f, "result");
  const json = maybe(f, "result_json");
  const result = json === undefined ? (shown ?? null) : (parse(json, "eval") as Json);
  return { value: result, text: shown, stdout: maybe(f, "stdout") ?? "", stderr: maybe(f, "stderr") ?? "", error: maybe(f, "error"), traceback: maybe(f, "traceback") };
}
/** An entry of a directory, or a path that was asked for alone. */
export function fileEntry(value: unknown, folder?: string): FileEntry {
  const f = fields(value, "file");
  const name = text(f, "name");
  const path = folder === undefined ? name : `${folder.replace(/\/+$/, "")}/${name}`;
  return { name: folder === undefined ? name.slice(name.lastIndexOf("/") + 1) : name, path, kind: text(f, "kind"), size: number(f, "size"), mode: number(f, "mode"), target: maybe(f, "symlink_target") };
}
export function portInfo(value: unknown): PortInfo {
  const f = fields(value, "port");
  const access = text(f, "access") as PortAccess;
  return { port: number(f, "port"), listening: f["listening"] === true, access, path: text(f, "path"), url: maybe(f, "url"), host: maybe(f, "host"), token: maybe(f, "token") };
}
export function fileChange(value: unknown): FileChange {
  const f = fields(value, "change");
  return { change: text(f, "change"), path: text(f, "path") };
}
export function event(value: unknown): Event {
  const f = fields(value, "event");
  return { seq: number(f, "seq"), atUnixMs: number(f, "at_unix_ms"), kind: text(f, "kind"), object: text(f, "object"), detail: maybe(f, "detail") };
}
/** A frame of a process. A frame type of a newer daemon is undefined; an error frame is thrown as its `ApiError`. */
export function frame(value: unknown): Frame | undefined {
  const f = fields(value, "frame");
  const type = text(f, "type");
  if (type === "started") return { type, pid: number(f, "pid") };
  if (type === "stdout" || type === "stderr") return { type, data: bytes(f) };
  if (type === "exit") return { type, exitCode: number(f, "exit_code"), timedOut: f["timed_out"] === true };
  if (type === "error") throw apiError(500, value, "stream");
  return undefined;
}
function bytes(f: Fields): Uint8Array {
  const plain = maybe(f, "text");
  if (plain !== undefined) return new TextEncoder().encode(plain);
  try {
    return Uint8Array.from(atob(text(f, "base64")), (c) => c.charCodeAt(0));
  } catch (cause) {
    throw new ProtocolError("frame: the data is not base64", { cause });
  }
}
export function isKeepalive(value: unknown): boolean {
  return typeof value === "object" && value !== null && (value as Fields)["type"] === "keepalive";
}
export function parse(line: string, what: string): unknown {
  try {
    return JSON.parse(line);
  } catch (cause) {
    throw new ProtocolError(`${what}: a line is not JSON`, { cause });
  }
}
