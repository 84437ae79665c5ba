//! Tools about sandboxes: start, list, delete.

use std::collections::BTreeMap;

use forkd_api::routes::{self, fill};
use forkd_api::{CreateSandboxes, SandboxInfo, UpdateSandbox};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::snapshots::Nothing;
use crate::call::{Call, LABEL};
use crate::refusal::Refusal;
use crate::tool::{Effect, Set, Tool};

/// The most sandboxes that one call starts.
pub const MAX_CHILDREN: u32 = 100;

/// A sandbox as a model sees it.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Sandbox {
    /// ID for all other tools.
    pub id: String,
    /// Tag of the snapshot from which the sandbox was started.
    pub snapshot_tag: String,
    /// `running` is ready for commands.
    pub state: String,
    /// Time of creation, in seconds since 1970.
    pub created_at_unix: u64,
    /// Time at which the sandbox is deleted, in seconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at_unix: Option<u64>,
    /// Guest memory in MiB.
    pub memory_mib: u32,
    /// Number of vCPUs of the machine.
    pub vcpus: u8,
    /// Limit on host memory, in MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_limit_mib: Option<u64>,
    /// Number of branches of the sandbox.
    pub branch_count: u32,
    /// Labels of the sandbox.
    pub labels: BTreeMap<String, String>,
    /// Error of a failed sandbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl From<SandboxInfo> for Sandbox {
    fn from(info: SandboxInfo) -> Self {
        Self {
            id: info.id,
            snapshot_tag: info.snapshot_tag,
            state: serde_json::to_value(info.state)
                .ok()
                .and_then(|value| value.as_str().map(str::to_owned))
                .unwrap_or_default(),
            created_at_unix: info.created_at_unix,
            expires_at_unix: info.expires_at_unix,
            memory_mib: info.memory_mib,
            vcpus: info.vcpus,
            memory_limit_mib: info.memory_limit_mib,
            branch_count: info.branch_count,
            labels: info.labels,
            error: info.error.map(|body| body.error),
        }
    }
}

/// A list of sandboxes.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Sandboxes {
    /// The sandboxes, in the order of their start.
    pub result: Vec<Sandbox>,
}

impl From<Vec<SandboxInfo>> for Sandboxes {
    fn from(found: Vec<SandboxInfo>) -> Self {
        Self {
            result: found.into_iter().map(Into::into).collect(),
        }
    }
}

/// The ID of a sandbox.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ById {
    /// ID of the sandbox, as spawn_sandboxes or list_sandboxes shows it.
    #[schemars(length(min = 1, max = 64))]
    pub sandbox_id: String,
}

/// The labels of everything that a tool makes.
pub fn labels() -> BTreeMap<String, String> {
    BTreeMap::from([(LABEL.to_owned(), "true".to_owned())])
}

/// Refuses a number of children that is out of range.
pub fn check_children(n: u32) -> Result<(), Refusal> {
    if (1..=MAX_CHILDREN).contains(&n) {
        return Ok(());
    }
    Err(Refusal::invalid(format!("n is 1 to {MAX_CHILDREN}")))
}

/// Arguments of the tool `spawn_sandboxes`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SpawnInput {
    /// Tag of the snapshot to start from.
    #[schemars(length(min = 1, max = 64))]
    snapshot_tag: String,
    /// Number of sandboxes to start.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 100))]
    n: u32,
    /// Give each sandbox a network namespace of its own.
    #[serde(default)]
    per_child_netns: bool,
    /// Limit on host memory of each sandbox, in MiB; none by default.
    #[serde(default)]
    memory_limit_mib: Option<u64>,
    /// Accepted for compatibility; has no effect.
    #[serde(default)]
    prewarm: bool,
    /// Accepted for compatibility; has no effect.
    #[serde(default)]
    live_fork: bool,
    /// Seconds after which the sandboxes are deleted; half an hour by default, 0 for never.
    #[serde(default)]
    ttl_secs: Option<u64>,
    /// Environment variables of every command.
    #[serde(default)]
    env: BTreeMap<String, String>,
}

pub fn one() -> u32 {
    1
}

/// Implements the tool `spawn_sandboxes`.
pub struct SpawnSandboxes;

impl Tool for SpawnSandboxes {
    const NAME: &'static str = "spawn_sandboxes";
    const TITLE: &'static str = "Start sandboxes";
    const ABOUT: &'static str = "Start isolated Linux machines (sandboxes) from a snapshot, in milliseconds. \
        Each is a VM of its own; nothing that runs in it can touch the host. They are deleted after their time.";
    const SET: Set = Set::Compat;
    const EFFECT: Effect = Effect::Adds;
    type Input = SpawnInput;
    type Output = Sandboxes;

    async fn run(call: &Call<'_>, input: SpawnInput) -> Result<Sandboxes, Refusal> {
        check_children(input.n)?;
        call.check_room(input.n).await?;
        let request = CreateSandboxes {
            snapshot_tag: input.snapshot_tag,
            n: input.n,
            per_child_netns: input.per_child_netns,
            memory_limit_mib: input.memory_limit_mib,
            prewarm: input.prewarm,
            live_fork: input.live_fork,
            timeout_secs: call.ttl(input.ttl_secs),
            labels: labels(),
            env: input.env,
            ..CreateSandboxes::default()
        };
        Ok(call.client.spawn(&request).await?.into())
    }
}

/// Implements the tool `list_sandboxes`.
pub struct ListSandboxes;

impl Tool for ListSandboxes {
    const NAME: &'static str = "list_sandboxes";
    const TITLE: &'static str = "List sandboxes";
    const ABOUT: &'static str = "List the live sandboxes of this owner.";
    const SET: Set = Set::Compat;
    const EFFECT: Effect = Effect::Reads;
    type Input = Nothing;
    type Output = Sandboxes;

    async fn run(call: &Call<'_>, _: Nothing) -> Result<Sandboxes, Refusal> {
        Ok(call.client.sandboxes().await?.into())
    }
}

/// Implements the tool `get_sandbox`.
pub struct GetSandbox;

impl Tool for GetSandbox {
    const NAME: &'static str = "get_sandbox";
    const TITLE: &'static str = "Describe a sandbox";
    const ABOUT: &'static str = "Describe one live sandbox.";
    const SET: Set = Set::Compat;
    const EFFECT: Effect = Effect::Reads;
    type Input = ById;
    type Output = Sandbox;

    async fn run(call: &Call<'_>, input: ById) -> Result<Sandbox, Refusal> {
        Ok(call.client.sandbox(&input.sandbox_id).await?.into())
    }
}

/// A sandbox that was deleted.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Killed {
    /// ID of the sandbox.
    id: String,
    /// Always true: a failure is an error.
    killed: bool,
}

/// Implements the tool `kill_sandbox`.
pub struct KillSandbox;

impl Tool for KillSandbox {
    const NAME: &'static str = "kill_sandbox";
    const TITLE: &'static str = "Delete a sandbox";
    const ABOUT: &'static str =
        "Delete a sandbox with everything in it. Branch it before if its state is still needed.";
    const SET: Set = Set::Compat;
    const EFFECT: Effect = Effect::Replaces;
    type Input = ById;
    type Output = Killed;

    async fn run(call: &Call<'_>, input: ById) -> Result<Killed, Refusal> {
        call.client.kill(&input.sandbox_id).await?;
        Ok(Killed {
            id: input.sandbox_id,
            killed: true,
        })
    }
}

/// The answer of the agent in a sandbox.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Pong {
    /// Whether the agent answered.
    pong: bool,
    /// Version of NumPy in the warm interpreter, or `not-installed`.
    numpy_version: String,
    /// Process ID of the agent in the guest.
    pid: u32,
    /// Language of the tool eval_code.
    agent_lang: String,
    /// Whether the warm-up of the image is done.
    warmup_ready: bool,
    /// Round trip in microseconds.
    rtt_us: u64,
}

/// Implements the tool `ping_sandbox`.
pub struct PingSandbox;

impl Tool for PingSandbox {
    const NAME: &'static str = "ping_sandbox";
    const TITLE: &'static str = "Ping a sandbox";
    const ABOUT: &'static str =
        "Check that a sandbox answers, and show the language of its warm interpreter.";
    const SET: Set = Set::Compat;
    const EFFECT: Effect = Effect::Reads;
    type Input = ById;
    type Output = Pong;

    async fn run(call: &Call<'_>, input: ById) -> Result<Pong, Refusal> {
        let found = call.client.ping(&input.sandbox_id).await?;
        Ok(Pong {
            pong: found.pong,
            numpy_version: found.numpy_version,
            pid: found.pid,
            agent_lang: found.agent_lang,
            warmup_ready: found.warmup_ready,
            rtt_us: found.rtt_us,
        })
    }
}

/// Arguments of the tool `set_timeout`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SetTimeoutInput {
    /// ID of the sandbox.
    #[schemars(length(min = 1, max = 64))]
    sandbox_id: String,
    /// Seconds from now after which the sandbox is deleted; 0 for never.
    ttl_secs: u64,
}

/// Implements the tool `set_timeout`.
pub struct SetTimeout;

impl Tool for SetTimeout {
    const NAME: &'static str = "set_timeout";
    const TITLE: &'static str = "Set the lifetime of a sandbox";
    const ABOUT: &'static str = "Set the time after which a sandbox is deleted by itself.";
    const SET: Set = Set::All;
    const EFFECT: Effect = Effect::Replaces;
    type Input = SetTimeoutInput;
    type Output = Sandbox;

    async fn run(call: &Call<'_>, input: SetTimeoutInput) -> Result<Sandbox, Refusal> {
        let request = UpdateSandbox {
            timeout_secs: Some(input.ttl_secs),
            ..UpdateSandbox::default()
        };
        Ok(call
            .client
            .update(&input.sandbox_id, &request)
            .await?
            .into())
    }
}

/// Arguments of the tool `port_url`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PortUrlInput {
    /// ID of the sandbox.
    #[schemars(length(min = 1, max = 64))]
    sandbox_id: String,
    /// Port on which a server in the sandbox listens.
    #[schemars(range(min = 1, max = 65535))]
    port: u16,
}

/// Where a port of a sandbox can be reached.
#[derive(Debug, Serialize, JsonSchema)]
pub struct PortAddress {
    /// Path on the daemon; put the address of the daemon before it.
    path: String,
}

/// Implements the tool `port_url`.
pub struct PortUrl;

impl Tool for PortUrl {
    const NAME: &'static str = "port_url";
    const TITLE: &'static str = "Address of a port";
    const ABOUT: &'static str = "The path on the daemon under which an HTTP server in the sandbox is reached. \
        Requests need the same token as the daemon.";
    const SET: Set = Set::All;
    const EFFECT: Effect = Effect::Reads;
    type Input = PortUrlInput;
    type Output = PortAddress;

    async fn run(call: &Call<'_>, input: PortUrlInput) -> Result<PortAddress, Refusal> {
        if input.port == 0 {
            return Err(Refusal::invalid("port is 1 to 65535"));
        }
        // A sandbox that does not exist has no address.
        let found = call.client.sandbox(&input.sandbox_id).await?;
        let port = input.port.to_string();
        Ok(PortAddress {
            path: fill(routes::PROXY_ROOT, &[&found.id, &port]),
        })
    }
}
