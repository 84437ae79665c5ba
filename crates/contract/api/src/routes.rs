//! Where things are. A test in the daemon checks these against the routes it serves.

/// Names the routes, and lists them all so that none is forgotten.
macro_rules! routes {
    ($($(#[$doc:meta])* $name:ident = $path:literal;)*) => {
        $($(#[$doc])* pub const $name: &str = $path;)*

        /// Every route.
        pub const ALL: &[&str] = &[$($name),*];
    };
}

routes! {
    /// `GET`: is the daemon well.
    HEALTHZ = "/healthz";
    /// `GET`: which version.
    VERSION = "/version";
    /// `GET`: Prometheus metrics.
    METRICS = "/metrics";
    /// `GET`: the OpenAPI document.
    OPENAPI = "/openapi.json";
    /// `GET`: list, `POST`: make.
    SNAPSHOTS = "/v1/snapshots";
    /// `PATCH`, `DELETE`.
    SNAPSHOT = "/v1/snapshots/{tag}";
    /// `GET`.
    SNAPSHOT_INFO = "/v1/snapshots/{tag}/info";
    /// `POST`.
    SNAPSHOT_COMPACT = "/v1/snapshots/{tag}/compact";
    /// `GET`: list, `POST`: start.
    SANDBOXES = "/v1/sandboxes";
    /// `GET`: what each uses.
    STATS = "/v1/stats";
    /// `GET`, `PATCH`, `DELETE`.
    SANDBOX = "/v1/sandboxes/{id}";
    /// `POST`.
    PING = "/v1/sandboxes/{id}/ping";
    /// `POST`.
    EXEC = "/v1/sandboxes/{id}/exec";
    /// `POST`, answers with a stream.
    EXEC_STREAM = "/v1/sandboxes/{id}/exec/stream";
    /// `POST`.
    EVAL = "/v1/sandboxes/{id}/eval";
    /// `POST`.
    BRANCH = "/v1/sandboxes/{id}/branch";
    /// `POST`.
    FORK = "/v1/sandboxes/{id}/fork";
    /// `GET`: list, `POST`: make.
    CHECKPOINTS = "/v1/sandboxes/{id}/checkpoints";
    /// `DELETE`.
    CHECKPOINT = "/v1/sandboxes/{id}/checkpoints/{name}";
    /// `POST`.
    ROLLBACK = "/v1/sandboxes/{id}/rollback";
    /// `POST`.
    PAUSE = "/v1/sandboxes/{id}/pause";
    /// `POST`.
    RESUME = "/v1/sandboxes/{id}/resume";
    /// `GET`: the console.
    LOGS = "/v1/sandboxes/{id}/logs";
    /// `GET`: read, `PUT`: write, `DELETE`: remove; `?path=`.
    FILES = "/v1/sandboxes/{id}/files";
    /// `GET`: list a directory; `?path=`.
    FILES_LIST = "/v1/sandboxes/{id}/files/list";
    /// `POST`.
    FILES_MKDIR = "/v1/sandboxes/{id}/files/mkdir";
    /// `GET`: a stream; `?path=`.
    FILES_WATCH = "/v1/sandboxes/{id}/files/watch";
    /// `GET`, upgraded to a WebSocket.
    TERMINAL = "/v1/sandboxes/{id}/terminal";
    /// `GET`: list, `POST`: start in the background.
    PROCESSES = "/v1/sandboxes/{id}/processes";
    /// `POST`.
    PROCESS_SIGNAL = "/v1/sandboxes/{id}/processes/{pid}/signal";
    /// `GET`: a stream.
    PROCESS_OUTPUT = "/v1/sandboxes/{id}/processes/{pid}/output";
    /// `GET`: a stream.
    EVENTS = "/v1/events";
    /// `GET`.
    IMAGES = "/v1/images";
    /// `GET`.
    STORE = "/v1/store";
    /// `POST`.
    STORE_FSCK = "/v1/store/fsck";
    /// `GET`: list, `POST`: make.
    TOKENS = "/v1/tokens";
    /// `DELETE`: revoke.
    TOKEN = "/v1/tokens/{name}";
    /// `GET`: list, `POST`: make.
    WORKSPACES = "/v1/workspaces";
    /// `GET`, `DELETE`.
    WORKSPACE = "/v1/workspaces/{name}";
    /// `POST`.
    WORKSPACE_SUSPEND = "/v1/workspaces/{name}/suspend";
    /// `POST`.
    WORKSPACE_RESUME = "/v1/workspaces/{name}/resume";
}

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
