//! Images: the root disks that parents are booted from, and operations that fetch them.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ErrorBody;

/// An image from which parents can be built.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageInfo {
    /// Name for snapshot requests.
    pub name: String,
    /// Path on the host.
    pub dir: String,
    /// Size that the guest sees, in bytes.
    pub logical_bytes: u64,
    /// Space on the host, in bytes.
    pub physical_bytes: u64,
    /// Where the image came from: the name of a container image with its registry, or a release of Debian.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// Digest of the container image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Time at which the image was installed, in seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_at_unix: Option<u64>,
    /// Whether every owner sees the image. An image that was fetched with a credential is private.
    #[serde(default = "crate::snapshots::yes")]
    pub public: bool,
}

/// Response to `GET /v1/images/{name}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageDetail {
    /// The fields that lists show, too.
    #[serde(flatten)]
    pub info: ImageInfo,
    /// A sentence for people.
    pub description: String,
    /// Guest memory in MiB, unless a request asks for another size.
    pub memory_mib: u32,
    /// Number of vCPUs, unless a request asks for another number.
    pub vcpus: u8,
    /// Environment of every process.
    pub env: BTreeMap<String, String>,
    /// User that programs run as; root if missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Directory that programs start in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub working_dir: Option<String>,
    /// Program of the image; it is not started by itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub entrypoint: Vec<String>,
    /// Arguments of that program, or the program.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cmd: Vec<String>,
    /// TCP ports that the program listens on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<u16>,
    /// `CMD` and arguments, or `CMD-SHELL` and a line: shows whether the program is well.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub healthcheck: Vec<String>,
    /// Signal that stops the program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_signal: Option<String>,
    /// Number of Debian packages that the image was made of.
    pub packages: usize,
    /// Names of the services that run in a parent, and so in its children.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub services: Vec<String>,
    /// Command that shows that a child works.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub check: Option<ImageCheck>,
    /// Snapshots that were booted from the image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub snapshots: Vec<String>,
}

/// A command that shows that a child of an image works.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageCheck {
    /// Program and arguments.
    pub exec: Vec<String>,
    /// User to run as.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Standard output that the command has to print.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdout: Option<String>,
    /// Timeout in seconds.
    pub timeout_secs: u32,
}

/// When a registry is asked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PullPolicy {
    /// Use an image that was fetched under the same name before.
    #[default]
    IfMissing,
    /// Ask the registry. Layers that are on the host are not fetched again.
    Always,
}

/// Body of `POST /v1/images`: fetch a container image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FetchImage {
    /// Name of the image in a registry: `[HOST[:PORT]/]NAME[:TAG][@sha256:…]`.
    #[schema(min_length = 1, max_length = 1024)]
    pub from: String,
    /// Name of the image here; by default one is made from its source and digest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(
        min_length = 1,
        max_length = 64,
        pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]*$"
    )]
    pub name: Option<String>,
    /// Platform to choose, such as `linux/amd64`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 100)]
    pub platform: Option<String>,
    /// Size of the disk; only what is used takes space on the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 64, maximum = 1048576)]
    pub disk_mib: Option<u32>,
    /// When the registry is asked.
    #[serde(default)]
    pub pull: PullPolicy,
    /// Credential for the registry. The daemon neither stores nor logs it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credential: Option<RegistryCredential>,
}

/// A right to read from a registry.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum RegistryCredential {
    /// User name and password.
    Password {
        /// Name of the user.
        username: String,
        /// Password, or a token that stands for one.
        password: String,
    },
    /// Token that the registry's token service exchanges for another.
    Identity {
        /// The text of the token.
        token: String,
    },
    /// Token that is sent as it is.
    Bearer {
        /// The text of the token.
        token: String,
    },
}

/// Prints the kind only.
impl fmt::Debug for RegistryCredential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Password { .. } => "Password(…)",
            Self::Identity { .. } => "Identity(…)",
            Self::Bearer { .. } => "Bearer(…)",
        })
    }
}

/// State of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OperationStatus {
    /// The operation waits for its turn, or runs.
    Running,
    /// The operation succeeded.
    Done,
    /// The operation failed; `error` has the reason.
    Failed,
}

/// Work that goes on after the request was answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OperationInfo {
    /// ID for `/v1/operations/{id}`.
    pub id: String,
    /// State of the operation.
    pub status: OperationStatus,
    /// The image that is fetched.
    pub from: String,
    /// The current step, for people.
    pub step: String,
    /// Bytes of layers that are on the host.
    #[serde(default)]
    pub bytes: u64,
    /// Bytes of all layers; 0 until they are known.
    #[serde(default)]
    pub total_bytes: u64,
    /// Time of the request, in seconds since 1970.
    pub created_at_unix: u64,
    /// The image, when it is done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageInfo>,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ErrorBody>,
}

/// Response to `POST /v1/images/prune`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PrunedImages {
    /// Names of the removed images.
    pub images: Vec<String>,
    /// Bytes that became free on the host.
    pub bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_credential_is_never_printed() {
        let request = FetchImage {
            from: "a:1".into(),
            name: None,
            platform: None,
            disk_mib: None,
            pull: PullPolicy::default(),
            credential: Some(RegistryCredential::Password {
                username: "u".into(),
                password: "hidden".into(),
            }),
        };
        assert!(!format!("{request:?}").contains("hidden"));
    }
}
