/** The daemon: sandboxes, snapshots, events. */

import { StreamCut } from "./errors.js";
import { Http, LONG_MS, type CallOptions, type ClientOptions } from "./http.js";
import * as read from "./models.js";
import type { Event, SandboxInfo, SnapshotInfo } from "./models.js";

export interface CreateSnapshotOptions extends CallOptions {
  tag: string;
  image?: string;
  warmup?: string[];
  warmupCode?: string;
  memSizeMib?: number;
  vcpus?: number;
  labels?: Record<string, string>;
  wait?: boolean;
}

export class Client {
  readonly http: Http;
  readonly snapshots: Snapshots;
  constructor(options: ClientOptions = {}) {
    this.http = new Http(options);
    this.snapshots = new Snapshots(this.http);
  }
  async version(options: CallOptions = {}): Promise<string> {
    return String(read.fields(await this.http.json("GET", "/version", options), "version")["version"]);
  }
  /** The live sandboxes, the oldest first. */
  async sandboxes(options: CallOptions & { tag?: string; state?: string } = {}): Promise<SandboxInfo[]> {
    const { signal, ...query } = options;
    return read.rows(await this.http.json("GET", "/v1/sandboxes", { query, signal }), read.sandboxInfo);
  }
  /** Changes from now on. The stream has no end: `StreamCut` is thrown when the daemon stops. */
  async *events(options: CallOptions = {}): AsyncGenerator<Event> {
    for await (const line of await this.http.open("GET", "/v1/events", options)) if (!read.isKeepalive(line)) yield read.event(line);
    throw new StreamCut("the events ended: the daemon stops");
  }
}

export class Snapshots {
  constructor(readonly http: Http) {}
  /** Boots an image, warms it up, and freezes it under a tag. */
  async create(o: CreateSnapshotOptions): Promise<SnapshotInfo> {
    const json = { tag: o.tag, image: o.image, warmup: o.warmup, warmup_code: o.warmupCode, mem_size_mib: o.memSizeMib, vcpus: o.vcpus, labels: o.labels, wait: o.wait };
    return read.snapshotInfo(await this.http.json("POST", "/v1/snapshots", { json, timeoutMs: LONG_MS, signal: o.signal }));
  }
  async list(options: CallOptions = {}): Promise<SnapshotInfo[]> {
    return read.rows(await this.http.json("GET", "/v1/snapshots", options), read.snapshotInfo);
  }
  async info(tag: string, options: CallOptions = {}): Promise<SnapshotInfo> {
    return read.snapshotInfo(await this.http.json("GET", `/v1/snapshots/${encodeURIComponent(tag)}/info`, options));
  }
  async delete(tag: string, options: CallOptions & { cascade?: boolean; force?: boolean } = {}): Promise<void> {
    const query = { cascade: options.cascade ? "true" : undefined, force: options.force ? "true" : undefined };
    await this.http.call("DELETE", `/v1/snapshots/${encodeURIComponent(tag)}`, { query, signal: options.signal });
  }
}
