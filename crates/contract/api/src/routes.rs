//! Paths of all routes. A test in the daemon checks them against the routes that it serves.
//!
//! A comment lists the methods of a route; `openapi/v1.json` has the details.

/// Defines a constant per route, and the list of all routes.
macro_rules! routes {
    ($($(#[$doc:meta])* $name:ident = $path:literal;)*) => {
        $($(#[$doc])* pub const $name: &str = $path;)*

        /// The paths of all routes.
        pub const ALL: &[&str] = &[$($name),*];
    };
}

routes! {
    /// `GET` the health of the daemon.
    HEALTHZ = "/healthz";
    /// `GET` the version of the daemon.
    VERSION = "/version";
    /// `GET` the metrics in Prometheus' format.
    METRICS = "/metrics";
    /// `GET` the OpenAPI document.
    OPENAPI = "/openapi.json";
    /// `GET` the walls around sandboxes.
    STATUS = "/v1/status";
    /// `GET` the name and load of this host, `PATCH` drains it.
    NODE = "/v1/node";
    /// `GET` lists, `POST` creates.
    SNAPSHOTS = "/v1/snapshots";
    /// `PATCH` shares it, `DELETE` removes it.
    SNAPSHOT = "/v1/snapshots/{tag}";
    SNAPSHOT_INFO = "/v1/snapshots/{tag}/info";
    SNAPSHOT_COMPACT = "/v1/snapshots/{tag}/compact";
    /// `POST`; the response is an OCI layout as a tar stream.
    SNAPSHOT_PACK = "/v1/snapshots/{tag}/pack";
    /// `POST` the documents of an artifact; the answer says which packs are missing.
    HUB_CHECK = "/v1/hub/check";
    /// `POST` an OCI layout as a tar stream.
    HUB_UNPACK = "/v1/hub/unpack";
    /// `GET` lists, `POST` starts children.
    SANDBOXES = "/v1/sandboxes";
    /// `GET` the resource usage of each sandbox.
    STATS = "/v1/stats";
    SANDBOX = "/v1/sandboxes/{id}";
    PING = "/v1/sandboxes/{id}/ping";
    EXEC = "/v1/sandboxes/{id}/exec";
    /// `POST`; the response is a stream.
    EXEC_STREAM = "/v1/sandboxes/{id}/exec/stream";
    EVAL = "/v1/sandboxes/{id}/eval";
    BRANCH = "/v1/sandboxes/{id}/branch";
    FORK = "/v1/sandboxes/{id}/fork";
    /// `GET` lists, `POST` creates.
    CHECKPOINTS = "/v1/sandboxes/{id}/checkpoints";
    CHECKPOINT = "/v1/sandboxes/{id}/checkpoints/{name}";
    ROLLBACK = "/v1/sandboxes/{id}/rollback";
    PAUSE = "/v1/sandboxes/{id}/pause";
    RESUME = "/v1/sandboxes/{id}/resume";
    /// `GET` reads, `PUT` replaces, `PATCH` edits the network policy.
    NETWORK = "/v1/sandboxes/{id}/network";
    /// `GET` open flows.
    NETWORK_FLOWS = "/v1/sandboxes/{id}/network/flows";
    /// `GET` a stream of denied and ended flows.
    NETWORK_LOG = "/v1/sandboxes/{id}/network/log";
    NETWORK_RESET = "/v1/sandboxes/{id}/network/reset";
    /// `GET` lists the ports of the guest.
    PORTS = "/v1/sandboxes/{id}/ports";
    /// `GET` one port, `PUT` sets who may use it and its host port, `DELETE` forgets both.
    PORT = "/v1/sandboxes/{id}/ports/{port}";
    /// `GET`; upgraded to a byte stream to the port.
    PORT_CONNECT = "/v1/sandboxes/{id}/ports/{port}/connect";
    /// `GET` the console output.
    LOGS = "/v1/sandboxes/{id}/logs";
    /// `GET` reads, `PUT` writes, `DELETE` removes; `?path=`.
    FILES = "/v1/sandboxes/{id}/files";
    /// `GET` lists a directory; `?path=`.
    FILES_LIST = "/v1/sandboxes/{id}/files/list";
    FILES_MKDIR = "/v1/sandboxes/{id}/files/mkdir";
    /// `GET` the attributes of one path; `?path=`.
    FILES_STAT = "/v1/sandboxes/{id}/files/stat";
    FILES_RENAME = "/v1/sandboxes/{id}/files/rename";
    FILES_ATTRIBUTES = "/v1/sandboxes/{id}/files/attributes";
    /// `GET` packs a directory as tar, `PUT` unpacks one; `?path=`.
    FILES_ARCHIVE = "/v1/sandboxes/{id}/files/archive";
    /// `GET` a stream of changes; `?path=`.
    FILES_WATCH = "/v1/sandboxes/{id}/files/watch";
    /// `GET`; upgraded to a WebSocket.
    TERMINAL = "/v1/sandboxes/{id}/terminal";
    /// `GET` lists, `POST` starts in the background.
    PROCESSES = "/v1/sandboxes/{id}/processes";
    PROCESS_SIGNAL = "/v1/sandboxes/{id}/processes/{pid}/signal";
    /// `POST` bytes; `?eof=true` closes the input after them.
    PROCESS_STDIN = "/v1/sandboxes/{id}/processes/{pid}/stdin";
    PROCESS_RESIZE = "/v1/sandboxes/{id}/processes/{pid}/resize";
    /// `GET` a stream.
    PROCESS_OUTPUT = "/v1/sandboxes/{id}/processes/{pid}/output";
    /// `GET` lists, `POST` starts.
    INTERPRETERS = "/v1/sandboxes/{id}/interpreters";
    /// `DELETE` stops an interpreter.
    INTERPRETER = "/v1/sandboxes/{id}/interpreters/{name}";
    INTERPRETER_RESTART = "/v1/sandboxes/{id}/interpreters/{name}/restart";
    INTERPRETER_INTERRUPT = "/v1/sandboxes/{id}/interpreters/{name}/interrupt";
    /// `GET` a stream.
    EVENTS = "/v1/events";
    /// `GET` lists, `POST` fetches from a registry.
    IMAGES = "/v1/images";
    /// `POST` the bytes of an archive.
    IMAGES_ARCHIVE = "/v1/images/archive";
    IMAGES_PRUNE = "/v1/images/prune";
    /// `GET` packs an image as an OCI archive.
    IMAGE_ARCHIVE = "/v1/images/{name}/archive";
    /// `POST`: build an image from a Dockerfile.
    BUILDS = "/v1/builds";
    /// `GET` describes, `DELETE` removes.
    IMAGE = "/v1/images/{name}";
    /// `GET` lists those that are remembered.
    OPERATIONS = "/v1/operations";
    /// `GET` waits with `?wait_secs=`, `DELETE` cancels.
    OPERATION = "/v1/operations/{operation}";
    STORE = "/v1/store";
    STORE_FSCK = "/v1/store/fsck";
    /// `GET`: list, `POST`: make.
    TOKENS = "/v1/tokens";
    /// `DELETE` revokes a token.
    TOKEN = "/v1/tokens/{name}";
    /// `GET` lists names.
    SECRETS = "/v1/secrets";
    /// `PUT` sets a value, `DELETE` removes it.
    SECRET = "/v1/secrets/{name}";
    /// `GET`: list, `POST`: make.
    WORKSPACES = "/v1/workspaces";
    WORKSPACE = "/v1/workspaces/{name}";
    WORKSPACE_SUSPEND = "/v1/workspaces/{name}/suspend";
    WORKSPACE_RESUME = "/v1/workspaces/{name}/resume";
}

/// `POST` messages of the Model Context Protocol; only with `--mcp`. It is not REST, so the document does not have it.
pub const MCP: &str = "/mcp";

/// Any method: passes a request on to a port of the guest. OpenAPI cannot describe the rest of the path, so the document
/// does not have it.
pub const PROXY: &str = "/v1/sandboxes/{id}/proxy/{port}";
/// The same, with the path `/`.
pub const PROXY_ROOT: &str = "/v1/sandboxes/{id}/proxy/{port}/";
/// The same, with a longer path.
pub const PROXY_PATH: &str = "/v1/sandboxes/{id}/proxy/{port}/{*path}";

/// `GET` lists the hosts of a fleet. Gateways have it, daemons do not.
pub const NODES: &str = "/v1/nodes";
/// `GET`, `PATCH`: one host of a fleet. A path behind it is sent on to that host. Gateways have it, daemons do not.
pub const FLEET_NODE: &str = "/v1/nodes/{name}";

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
