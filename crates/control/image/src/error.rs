//! [`enum@Error`]: the failures of all commands.
//!
//! Each operation has its own error enum; this one joins them for `main`. [`Error::hint`] returns a remedy
//! where one is known.

use std::path::PathBuf;

use forkd_oci::registries::RegistriesError;
use forkd_oci::registry::RegistryError;
use thiserror::Error;

use crate::cache::CacheError;
use crate::debian::DebianError;
use crate::export::ExportError;
use crate::image::ImageError;
use crate::initramfs::InitramfsError;
use crate::kernel::KernelError;
use crate::kernel::modules::ModulesError;
use crate::machine::MachineError;
use crate::recipe::{Recipe, RecipeError};
use crate::root::ext4::Ext4Error;
use crate::root::oci::OciRootError;
use crate::tools::ToolError;

/// Why a command failed.
#[derive(Debug, Error)]
pub enum Error {
    #[error("cannot build the guest kernel")]
    Kernel(#[from] KernelError),
    #[error("cannot build the initramfs")]
    Initramfs(#[from] InitramfsError),
    #[error("cannot build the image")]
    Image(#[from] ImageError),
    #[error("cannot build the machine image")]
    Machine(#[from] MachineError),
    #[error("cannot read the recipe")]
    Recipe(#[from] RecipeError),
    #[error("the result could not be copied")]
    Export(#[from] ExportError),
    #[error("the cache cannot be used")]
    Cache(#[from] CacheError),
    #[error("Debian's packages are not available")]
    Debian(#[from] DebianError),
    #[error("cannot read the container image")]
    Oci(#[from] OciRootError),
    #[error("the registry cannot be used")]
    Registry(#[from] RegistryError),
    #[error("cannot read the password from {}", path.display())]
    Password {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("the container image is not named well")]
    Source(#[from] forkd_oci::source::SourceError),
    #[error("{name:?} is not a name for an image")]
    Name {
        name: String,
        #[source]
        source: forkd_types::InvalidTag,
    },
    #[error("--name and --disk-mib are for container images; a recipe has its own")]
    OnlyForContainers,
    /// No agent was given, and there is none beside this program.
    #[error("the guest agent is not at {}", path.display())]
    NoAgent {
        /// The expected path.
        path: PathBuf,
    },
}

impl Error {
    /// A remedy for the user, where one is known.
    pub fn hint(&self) -> Option<String> {
        if let Self::NoAgent { .. } = self {
            return Some("build it with `make build`, or name it with --agent FILE".into());
        }
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(self);
        while let Some(error) = cause {
            if let Some(hint) = hint_of(error) {
                return Some(hint);
            }
            cause = error.source();
        }
        None
    }
}

fn hint_of(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    if let Some(ToolError::Missing { .. }) = error.downcast_ref() {
        return Some("run `make setup`, which installs what is missing".into());
    }
    if let Some(error) = error.downcast_ref::<DebianError>() {
        return hint_of_debian(error);
    }
    if let Some(error) = error.downcast_ref::<std::io::Error>() {
        let full = error.kind() == std::io::ErrorKind::StorageFull;
        return full.then(|| "free some space, or set XDG_CACHE_HOME to a larger disk".into());
    }
    if let Some(ModulesError::Missing { .. }) = error.downcast_ref() {
        return Some("give the folder with the kernel's own modules: --modules DIR".into());
    }
    if let Some(InitramfsError::NotStatic { .. }) = error.downcast_ref() {
        return Some("build forkd-agent with `make build`, which links it statically".into());
    }
    if let Some(Ext4Error::TooSmall { .. }) = error.downcast_ref() {
        return Some(
            "raise disk_mib in the recipe, or --disk-mib for a container image: the file is sparse, a larger one costs nothing".into(),
        );
    }
    if let Some(RegistriesError::NoDefault { name }) = error.downcast_ref() {
        return Some(format!(
            "write HOST/{name}, or configure the registry of short names: --registry HOST[/PATH], FORKD_REGISTRY, \
             or a line default = \"HOST[/PATH]\" in /etc/forkd/registries.toml"
        ));
    }
    if let Some(RegistryError::Denied { host, .. }) = error.downcast_ref() {
        return Some(format!(
            "log in to {host} with your container tool, or give --username and --password-file; \
             a registry may also answer so for an image that does not exist"
        ));
    }
    if let Some(RecipeError::Unknown { .. }) = error.downcast_ref() {
        let names: Vec<_> = Recipe::built_in_names().collect();
        return Some(format!(
            "give the path of a folder with a recipe.toml, or one of: {}",
            names.join(", ")
        ));
    }
    None
}

fn hint_of_debian(error: &DebianError) -> Option<String> {
    let hint = match error {
        DebianError::NoMirror => {
            "name one with --mirror URL or in FORKD_DEBIAN_MIRROR, or install mmdebstrap"
        }
        DebianError::NoKeyring { .. } => {
            "run `make setup`, which installs the package debian-archive-keyring"
        }
        DebianError::Signature { .. } => {
            "the mirror may be wrong, or the package debian-archive-keyring too old: \
             upgrade it, or name another mirror with --mirror URL"
        }
        DebianError::Unreachable { .. } => {
            "check the network and the host's apt configuration, or name another mirror with \
             --mirror URL"
        }
        DebianError::NoSpace { .. } => "free some space, or set XDG_CACHE_HOME to a larger disk",
        DebianError::NoPackage { .. } => "check the name in the recipe's list of packages",
        _ => return None,
    };
    Some(hint.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hint_is_found_below_its_wrappers() {
        let error = Error::Kernel(KernelError::Debian(DebianError::Tool(ToolError::Missing {
            program: "mmdebstrap".into(),
        })));
        assert!(error.hint().unwrap().contains("make setup"));
        let error = Error::Kernel(KernelError::Debian(DebianError::NoMirror));
        assert!(error.hint().unwrap().contains("--mirror"));
    }
}
