//! Builds of images from Dockerfiles.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ErrorBody;
use crate::images::ImageInfo;
use crate::network::NetworkRequest;

/// The first entry of the archive that `POST /v1/builds` takes: its name is `build.json`. The files of the context follow
/// below `context/`.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BuildImage {
    /// Name of the image. An image that an earlier build of the same owner made is replaced.
    #[schema(
        min_length = 1,
        max_length = 64,
        pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]*$"
    )]
    pub name: String,
    /// Text of the Dockerfile.
    #[schema(max_length = 1048576)]
    pub dockerfile: String,
    /// Stage to build; the last one if missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// Values of `ARG`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub args: BTreeMap<String, String>,
    /// Secrets for `RUN --mount=type=secret`, by ID, in Base64. No image and no cache key has them in it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub secrets: BTreeMap<String, String>,
    /// Run every step again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_cache: bool,
    /// Delete the sandbox of a step that fails, too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rm: bool,
    /// Guest memory of the build in MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u32>,
    /// vCPUs of the build.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<u8>,
    /// Size of the disk of the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 64, maximum = 1048576)]
    pub disk_mib: Option<u32>,
    /// Network of the steps; the default of the daemon if missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkRequest>,
}

impl fmt::Debug for BuildImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Secrets and arguments are not printed.
        f.debug_struct("BuildImage")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// One line of the answer of `POST /v1/builds`. The last one is `finished` or `failed`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum BuildEvent {
    /// A step begins.
    Step {
        /// Line in the Dockerfile.
        line: u32,
        /// Number of the stage, from 0.
        stage: usize,
        /// The instruction as it was written.
        text: String,
        /// Whether its result was in the cache.
        cached: bool,
    },
    /// A step printed something.
    Output {
        /// Whether the text is from standard error.
        stderr: bool,
        text: String,
    },
    /// Something happened between steps.
    Note { text: String },
    /// The image is installed.
    Finished {
        image: ImageInfo,
        /// Steps that ran.
        ran: u32,
        /// Steps whose result was in the cache.
        cached: u32,
    },
    /// The build failed.
    Failed {
        #[serde(flatten)]
        error: ErrorBody,
        /// Line in the Dockerfile.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        line: Option<u32>,
        /// The sandbox in which the step failed, if it was kept.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sandbox: Option<String>,
        /// Exit code of the command.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        exit_code: Option<i32>,
    },
}
