//! A checked request for a build.

use std::collections::BTreeMap;
use std::sync::Arc;

use base64::Engine;
use forkd_api::{BuildImage, ErrorCode};
use forkd_dockerfile::limits;
use forkd_sandboxes::error::Error;
use forkd_sandboxes::ops::branch::parse_tag;
use forkd_types::{Policy, Tag};

/// Arguments and secrets, each.
const MAX_VALUES: usize = 256;
const MAX_VALUE: usize = 512 << 10;
/// Size of the disk unless the request says otherwise.
const DISK_MIB: u32 = 8192;
const DISK_RANGE: std::ops::RangeInclusive<u32> = 64..=1 << 20;

/// A checked request for a build. It has no `Debug`: secrets may not be printed.
pub struct BuildWish {
    pub name: Tag,
    pub(crate) dockerfile: String,
    pub(crate) target: Option<String>,
    pub(crate) args: BTreeMap<String, String>,
    pub(crate) secrets: BTreeMap<String, Vec<u8>>,
    pub(crate) no_cache: bool,
    pub(crate) rm: bool,
    pub(crate) memory_mib: Option<u32>,
    pub(crate) vcpus: Option<u8>,
    pub(crate) disk_mib: u32,
    pub(crate) network: Policy,
    pub(crate) owner: String,
    pub(crate) owns: Owns,
}

/// Whether something of an owner is the asker's.
pub type Owns = Arc<dyn Fn(Option<&str>) -> bool + Send + Sync>;

impl BuildWish {
    /// Checks a request. The network policy is that of the daemon unless the request names one.
    pub fn check(
        request: BuildImage,
        default_network: Policy,
        owner: String,
        owns: Owns,
    ) -> Result<Self, Error> {
        let bad = |message: String| Error::refused(ErrorCode::InvalidRequest, message);
        let name = parse_tag(&request.name)?;
        if request.dockerfile.len() > limits::FILE_BYTES {
            let limit = limits::FILE_BYTES;
            return Err(bad(format!("a Dockerfile has at most {limit} bytes")));
        }
        let fits = |values: &BTreeMap<String, String>| {
            values.len() <= MAX_VALUES
                && values
                    .iter()
                    .all(|(key, value)| !key.is_empty() && key.len() + value.len() <= MAX_VALUE)
        };
        if !fits(&request.args) || !fits(&request.secrets) {
            return Err(bad(format!(
                "a build has at most {MAX_VALUES} arguments and secrets of {MAX_VALUE} bytes each"
            )));
        }
        let secrets = request
            .secrets
            .into_iter()
            .map(|(id, text)| {
                let value = base64::engine::general_purpose::STANDARD.decode(text);
                value
                    .map(|value| (id.clone(), value))
                    .map_err(|_| bad(format!("secret {id:.40} is not Base64")))
            })
            .collect::<Result<_, _>>()?;
        let memory = forkd_sandboxes::ops::build::MEMORY_MIB;
        if request.memory_mib.is_some_and(|mib| !memory.contains(&mib)) {
            return Err(bad(format!(
                "memory_mib is {} to {}",
                memory.start(),
                memory.end()
            )));
        }
        let vcpus = forkd_sandboxes::ops::build::VCPUS;
        if request.vcpus.is_some_and(|count| !vcpus.contains(&count)) {
            return Err(bad(format!(
                "vcpus is {} to {}",
                vcpus.start(),
                vcpus.end()
            )));
        }
        let disk_mib = request.disk_mib.unwrap_or(DISK_MIB);
        if !DISK_RANGE.contains(&disk_mib) {
            let (low, high) = (DISK_RANGE.start(), DISK_RANGE.end());
            return Err(bad(format!("disk_mib is {low} to {high}")));
        }
        Ok(Self {
            name,
            dockerfile: request.dockerfile,
            target: request.target,
            args: request.args,
            secrets,
            no_cache: request.no_cache,
            rm: request.rm,
            memory_mib: request.memory_mib,
            vcpus: request.vcpus,
            disk_mib,
            network: match request.network {
                Some(network) => network.checked()?,
                None => default_network,
            },
            owner,
            owns,
        })
    }
}
