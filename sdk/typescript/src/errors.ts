/** Errors of the client. Every one is a `ForkdError`; a refusal of the daemon is an `ApiError` with the daemon's code. */

import type { CommandResult, Evaluation } from "./models.js";

export class ForkdError extends Error {
  constructor(message: string, options?: { cause?: unknown }) {
    super(message, options);
    this.name = new.target.name;
  }
}

/** The address of the daemon is malformed. */
export class InvalidAddress extends ForkdError {}
/** The daemon cannot be reached, or the connection broke. */
export class ConnectionFailed extends ForkdError {}
/** The daemon did not answer within the timeout of the client. */
export class RequestTimeout extends ForkdError {}
/** An answer of the daemon is malformed. */
export class ProtocolError extends ForkdError {}

/** A stream ended without its last frame. A process that was started with `commands.start` goes on. */
export class StreamCut extends ConnectionFailed {
  pid: number | undefined;
  constructor(message: string, pid?: number, options?: { cause?: unknown }) {
    super(message, options);
    this.pid = pid;
  }
}
/** A stream was silent for longer than allowed. */
export class SandboxUnreachable extends StreamCut {}

/** A refusal of the daemon, with the fields of the published 0.5.3 client. */
export class ControllerError extends ForkdError {
  constructor(
    readonly status: number,
    readonly body: unknown,
    readonly url: string,
    message?: string,
  ) {
    super(message ?? `HTTP ${status} from ${url}`);
  }
}

const text = (value: unknown): string | undefined => (typeof value === "string" ? value : undefined);

export class ApiError extends ControllerError {
  readonly code: string;
  readonly hint: string | undefined;
  readonly requestId: string | undefined;
  constructor(status: number, body: unknown, url: string) {
    const fields = (typeof body === "object" && body !== null ? body : {}) as Record<string, unknown>;
    const code = text(fields["code"]) ?? "unknown";
    const hint = text(fields["hint"]);
    const id = text(fields["request_id"]);
    super(status, body, url, `${text(fields["error"]) ?? `HTTP ${status}`} (${code}${id ? `, request ${id}` : ""})${hint ? `; ${hint}` : ""}`);
    this.code = code;
    this.hint = hint;
    this.requestId = id;
  }
}

export class InvalidRequest extends ApiError {}
export class AuthError extends ApiError {}
export class NotFound extends ApiError {}
export class SandboxNotFound extends NotFound {}
export class SnapshotNotFound extends NotFound {}
export class FileMissing extends NotFound {}
export class ProcessNotFound extends NotFound {}
export class CheckpointNotFound extends NotFound {}
export class AlreadyExists extends ApiError {}
export class WrongState extends ApiError {}
export class SandboxGone extends ApiError {}
export class IdempotencyMismatch extends ApiError {}
export class Busy extends ApiError {}
export class LimitReached extends ApiError {}
export class LaunchFailed extends ApiError {}
export class AgentFailed extends ApiError {}
export class OperationTimeout extends ApiError {}
export class NoSpace extends ApiError {}
export class RegistryFailed extends ApiError {}

export class Unsupported extends ApiError {}

const BY_CODE: Record<string, typeof ApiError> = {
  invalid_request: InvalidRequest,
  invalid_name: InvalidRequest,
  policy_invalid: InvalidRequest,
  unsupported_media_type: InvalidRequest,
  too_large: InvalidRequest,
  no_such_route: NotFound,
  method_not_allowed: InvalidRequest,
  missing_token: AuthError,
  invalid_token: AuthError,
  forbidden: AuthError,
  sandbox_not_found: SandboxNotFound,
  snapshot_not_found: SnapshotNotFound,
  workspace_not_found: NotFound,
  image_not_found: NotFound,
  image_invalid: InvalidRequest,
  registry_denied: RegistryFailed,
  registry_failed: RegistryFailed,
  dockerfile_invalid: InvalidRequest,
  unsupported_instruction: InvalidRequest,
  step_failed: WrongState,
  operation_not_found: NotFound,
  token_not_found: NotFound,
  secret_not_found: NotFound,
  node_not_found: NotFound,
  node_lost: Busy,
  checkpoint_not_found: CheckpointNotFound,
  process_not_found: ProcessNotFound,
  file_not_found: FileMissing,
  already_exists: AlreadyExists,
  snapshot_not_ready: WrongState,
  snapshot_broken: WrongState,
  snapshot_incompatible: WrongState,
  has_dependents: WrongState,
  wrong_state: WrongState,
  idempotency_mismatch: IdempotencyMismatch,
  limit_reached: LimitReached,
  rate_limited: Busy,
  busy: Busy,
  shutting_down: Busy,
  agent_unreachable: AgentFailed,
  port_closed: NotFound,
  port_in_use: WrongState,
  network_unavailable: Unsupported,
  agent_failed: AgentFailed,
  timeout: OperationTimeout,
  sandbox_gone: SandboxGone,
  launch_failed: LaunchFailed,
  invalid_artifact: InvalidRequest,
  digest_mismatch: InvalidRequest,
  untrusted_signature: WrongState,
  contains_secrets: WrongState,
  no_space: NoSpace,
  unsupported: Unsupported,
};

/** The error class of a refusal. An unknown code is a plain `ApiError`. */
export function apiError(status: number, body: unknown, url: string): ApiError {
  const code = typeof body === "object" && body !== null ? text((body as Record<string, unknown>)["code"]) : undefined;
  const Kind = code !== undefined && Object.hasOwn(BY_CODE, code) ? BY_CODE[code]! : ApiError;
  return new Kind(status, body, url);
}

/** A command ended with a code other than zero, and `check` was set. */
export class CommandFailed extends ForkdError {
  constructor(readonly command: readonly string[], readonly result: CommandResult) {
    super(`${JSON.stringify(command)} ended with ${result.exitCode}`);
  }
}
/** A command was killed because its timeout expired. `result` has the output until then. */
export class CommandTimeout extends ForkdError {
  constructor(readonly command: readonly string[], readonly timeout: number, readonly result: CommandResult) {
    super(`${JSON.stringify(command)} was killed after ${timeout} s`);
  }
}
/** Code in the interpreter raised an exception. */
export class EvalError extends ForkdError {
  constructor(readonly evaluation: Evaluation) {
    super(evaluation.error ?? "the interpreter failed");
  }
}
/** Some children did not start. `children` are those that run. */
export class ForkError<S = unknown> extends ForkdError {
  constructor(readonly children: readonly S[], readonly errors: readonly ApiError[]) {
    super(`${errors.length} of ${children.length + errors.length} children did not start: ${errors[0]?.message ?? ""}`);
  }
}
/** Every run of `explore` failed. */
export class ExploreError extends ForkdError {
  constructor(readonly errors: readonly unknown[]) {
    super(`all ${errors.length} runs failed: ${String(errors[0])}`);
  }
}
