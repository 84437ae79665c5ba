//! Where things are. A test in the daemon checks these against the routes it serves.

/// `GET`: is the daemon well.
pub const HEALTHZ: &str = "/healthz";
/// `GET`: which version.
pub const VERSION: &str = "/version";
/// `GET`: Prometheus metrics.
pub const METRICS: &str = "/metrics";
/// `GET`: the OpenAPI document.
pub const OPENAPI: &str = "/openapi.json";
/// `GET`: list, `POST`: make.
pub const SNAPSHOTS: &str = "/v1/snapshots";
/// `DELETE`.
pub const SNAPSHOT: &str = "/v1/snapshots/{tag}";
/// `GET`.
pub const SNAPSHOT_INFO: &str = "/v1/snapshots/{tag}/info";
/// `POST`.
pub const SNAPSHOT_COMPACT: &str = "/v1/snapshots/{tag}/compact";
/// `GET`: list, `POST`: start.
pub const SANDBOXES: &str = "/v1/sandboxes";
/// `GET`: what each uses.
pub const STATS: &str = "/v1/stats";
/// `GET`, `PATCH`, `DELETE`.
pub const SANDBOX: &str = "/v1/sandboxes/{id}";
/// `POST`.
pub const PING: &str = "/v1/sandboxes/{id}/ping";
/// `POST`.
pub const EXEC: &str = "/v1/sandboxes/{id}/exec";
/// `POST`, answers with a stream.
pub const EXEC_STREAM: &str = "/v1/sandboxes/{id}/exec/stream";
/// `POST`.
pub const EVAL: &str = "/v1/sandboxes/{id}/eval";
/// `POST`.
pub const BRANCH: &str = "/v1/sandboxes/{id}/branch";
/// `POST`.
pub const FORK: &str = "/v1/sandboxes/{id}/fork";
/// `GET`: list, `POST`: make.
pub const CHECKPOINTS: &str = "/v1/sandboxes/{id}/checkpoints";
/// `DELETE`.
pub const CHECKPOINT: &str = "/v1/sandboxes/{id}/checkpoints/{name}";
/// `POST`.
pub const ROLLBACK: &str = "/v1/sandboxes/{id}/rollback";
/// `POST`.
pub const PAUSE: &str = "/v1/sandboxes/{id}/pause";
/// `POST`.
pub const RESUME: &str = "/v1/sandboxes/{id}/resume";
/// `GET`: the console.
pub const LOGS: &str = "/v1/sandboxes/{id}/logs";
/// `GET`: read, `PUT`: write, `DELETE`: remove; `?path=`.
pub const FILES: &str = "/v1/sandboxes/{id}/files";
/// `GET`: list a directory; `?path=`.
pub const FILES_LIST: &str = "/v1/sandboxes/{id}/files/list";
/// `POST`.
pub const FILES_MKDIR: &str = "/v1/sandboxes/{id}/files/mkdir";
/// `GET`: a stream; `?path=`.
pub const FILES_WATCH: &str = "/v1/sandboxes/{id}/files/watch";
/// `GET`, upgraded to a WebSocket.
pub const TERMINAL: &str = "/v1/sandboxes/{id}/terminal";
/// `GET`: list, `POST`: start in the background.
pub const PROCESSES: &str = "/v1/sandboxes/{id}/processes";
/// `POST`.
pub const PROCESS_SIGNAL: &str = "/v1/sandboxes/{id}/processes/{pid}/signal";
/// `GET`: a stream.
pub const PROCESS_OUTPUT: &str = "/v1/sandboxes/{id}/processes/{pid}/output";
/// `GET`: a stream.
pub const EVENTS: &str = "/v1/events";
/// `GET`.
pub const IMAGES: &str = "/v1/images";
/// `GET`.
pub const STORE: &str = "/v1/store";
/// `POST`.
pub const STORE_FSCK: &str = "/v1/store/fsck";
/// `GET`: list, `POST`: make.
pub const WORKSPACES: &str = "/v1/workspaces";
/// `GET`, `DELETE`.
pub const WORKSPACE: &str = "/v1/workspaces/{name}";
/// `POST`.
pub const WORKSPACE_SUSPEND: &str = "/v1/workspaces/{name}/suspend";
/// `POST`.
pub const WORKSPACE_RESUME: &str = "/v1/workspaces/{name}/resume";

/// Puts values into the `{…}` of a route, escaped so that they stay one path segment each.
pub fn fill(route: &str, values: &[&str]) -> String {
    let mut values = values.iter();
    let mut out = String::with_capacity(route.len() + 32);
    for (at, segment) in route.split('/').enumerate() {
        if at > 0 {
            out.push('/');
        }
        match segment.starts_with('{').then(|| values.next()).flatten() {
            Some(value) => push_escaped(&mut out, value),
            None => out.push_str(segment),
        }
    }
    out
}

/// Escapes a value for a path segment or a query.
pub fn push_escaped(out: &mut String, value: &str) {
    for byte in value.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                out.push(char::from(byte));
            }
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_stay_one_segment() {
        assert_eq!(fill(EXEC, &["sb-1"]), "/v1/sandboxes/sb-1/exec");
        assert_eq!(fill(SNAPSHOT, &["../x y"]), "/v1/snapshots/..%2Fx%20y");
        assert_eq!(
            fill(PROCESS_SIGNAL, &["a", "7"]),
            "/v1/sandboxes/a/processes/7/signal"
        );
        assert_eq!(fill(SANDBOXES, &[]), SANDBOXES);
    }
}
