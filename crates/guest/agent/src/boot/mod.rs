//! Brings a guest up, from the kernel's first call to a system in which programs can run.
//!
//! The agent is `/init` of an initramfs: it mounts what every Linux program expects, loads modules, puts the
//! root disk under itself and goes on in the same process, so that nothing of the image needs to run for
//! the guest to answer. What fails is printed on the console; only a root disk that is there and cannot be
//! mounted ends the boot, since a guest that answers without its disk would lie.

mod cgroup;
mod cmdline;
mod machine;
mod modules;
mod mounts;
mod root;

use std::io;

use thiserror::Error;

use crate::agent::Role;
use crate::net;
use crate::process::Reaper;
use crate::sys;
use crate::transport::Address;

pub use cmdline::Cmdline;

/// Why a guest cannot come up.
#[derive(Debug, Error)]
pub enum BootError {
    /// Something could not be mounted.
    #[error("cannot mount {what} on {target}: {source}")]
    Mount {
        what: String,
        target: String,
        source: io::Error,
    },
    /// A disk that the kernel announced did not appear.
    #[error("the disk {device} did not appear")]
    NoDisk { device: String },
    /// The way to the new root failed.
    #[error("cannot change to the root disk: {source}")]
    SwitchRoot { source: io::Error },
}

/// A guest that is up.
pub struct Booted {
    pub role: Role,
    pub listen: Address,
    pub token: Option<String>,
    /// The group that user processes join.
    pub cgroup: Option<crate::user_group::UserGroup>,
}

/// Says something on the console.
pub fn say(message: impl std::fmt::Display) {
    eprintln!("forkd-agent: {message}");
}

/// Whether this process is the first of its machine and has to bring it up.
pub fn is_first_process() -> bool {
    std::process::id() == 1
}

/// Brings the guest up as far as no child is needed.
pub fn bring_up() -> Result<Booted, BootError> {
    mounts::early()?;
    sys::open_standard_descriptors();
    let cmdline = Cmdline::read();
    modules::load();
    let token = machine::read_token();
    root::enter(&cmdline)?;
    mounts::late();
    protect_self();
    let cgroup = cgroup::set_up(cmdline.role);
    if let Err(error) = sys::set_hostname(&cmdline.hostname) {
        say(format_args!("cannot set the host name: {error}"));
    }
    if let Err(error) = sys::link_up("lo") {
        say(format_args!("cannot start the loopback: {error}"));
    }
    set_up_network(&cmdline);
    if cmdline.role == Role::Guest
        && let Err(error) = crate::identity::keep_in_memory()
    {
        say(format_args!(
            "children will write their names to the disk: {error}"
        ));
    }
    Ok(Booted {
        role: cmdline.role,
        listen: cmdline.listen,
        token: token.filter(|_| cmdline.role == Role::Machine),
        cgroup,
    })
}

/// Carries out the steps that need programs of the image.
pub async fn finish(role: Role, reaper: &Reaper) {
    if role == Role::Machine {
        machine::finish(reaper).await;
    }
}

fn set_up_network(cmdline: &Cmdline) {
    if let Some(network) = &cmdline.network
        && let Err(error) = net::configure(network)
    {
        say(format_args!("cannot set up the network: {}", error.message));
    }
}

/// When memory or processor time runs out, the agent is the one that must still answer.
fn protect_self() {
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
    sys::raise_priority();
}
