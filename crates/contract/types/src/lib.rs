//! Names, sizes, digests and error helpers that every part of forkd shares.
//!
//! Each type is parsed once, at the border, and is valid from then on: a function that takes a [`Tag`] does not check
//! again whether the tag is safe as a file name. The crate knows no operating system beyond `std`.

mod chain;
mod digest;
mod dirs;
mod engine;
mod id;
mod network;
mod node;
mod path_error;
mod secret;
mod size;
mod tag;

pub use chain::chain;
pub use digest::{Digest, InvalidDigest};
pub use dirs::data_dir;
pub use engine::{Engine, InvalidEngine};
pub use id::{InvalidSandboxId, SandboxId};
pub use network::{
    Action, Cidr, DomainName, Group, HeaderName, HostPort, InjectRule, InvalidCidr, InvalidDomain,
    InvalidInject, InvalidMode, InvalidPolicy, InvalidPorts, InvalidRule, MAX_CONNECTIONS,
    MAX_INJECTIONS, MAX_RULES, Mode, NamePattern, NetLimits, Policy, PortSet, Protocol, Rule,
    Target, Template, TemplatePart, VariableName,
};
pub use node::{InvalidNodeName, NodeName};
pub use path_error::{PathError, path_error};
pub use secret::{InvalidSecretName, InvalidSecretValue, MAX_SECRET, SecretName, SecretValue};
pub use size::{InvalidSize, MiB, PAGE_SIZE};
pub use tag::{InvalidTag, Tag};
