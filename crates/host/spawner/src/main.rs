//! `forkd-spawn`: starts VMM processes and keeps a pool of shells ready.
//!
//! It is the parent of every VMM, so that the controller can die and come back without taking the
//! sandboxes along. The conversation is described in `forkd_vmm_proto::spawn`.

mod cgroup;
mod client;
mod engines;
mod handshake;
mod jail;
mod pool;
mod process;
mod server;

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use cgroup::Cgroups;
use clap::Parser;
use engines::{Adapted, Engines, Program};
use forkd_types::Engine;
use jail::Jails;
use server::{Server, Settings};

/// Starts VMM processes and keeps a pool of shells ready.
///
/// The controller starts this program by itself; there is no need to run it by hand. When it ends, the kernel
/// kills every microVM that it started.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Where to listen for the controller: the path of a Unix socket.
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,

    /// The VMM program [default: forkd-vmm beside this program].
    #[arg(long, value_name = "PATH")]
    vmm: Option<PathBuf>,

    /// The engine that the VMM program is. A VMM that announces another one is ended.
    #[arg(long, value_name = "NAME", default_value_t = Engine::FORKD)]
    engine: Engine,

    /// An installed Firecracker: VMs of the engine `firecracker` can be started.
    #[arg(long, value_name = "PATH", requires = "firecracker_dir")]
    firecracker: Option<PathBuf>,

    /// Where VMs of Firecracker have their files. Whatever is in it goes at the start.
    #[arg(long, value_name = "DIR", requires = "firecracker")]
    firecracker_dir: Option<PathBuf>,

    /// A folder below which VMs of Firecracker read the memory of snapshots.
    #[arg(long, value_name = "DIR", requires = "firecracker")]
    snapshots: Option<PathBuf>,

    /// How many shells may be in the making at one time.
    ///
    /// Making one mostly waits for the kernel, so this may be far more than there are cores.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=256))]
    parallel: u32,

    /// The most VMM processes there may be, shells included.
    #[arg(long, value_name = "N", default_value_t = 4096)]
    max_vms: usize,
}

fn main() -> anyhow::Result<()> {
    // Sockets and logs are this user's alone, whatever umask the program inherited.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    let args = Args::parse();
    let engines = engines(&args)?;
    if let Err(error) = forkd_os::raise_file_limit() {
        say(&format!("the limit on open files stays as it is: {error}"));
    }
    let listener = forkd_os::seqpacket::listen_on(&args.socket)?;
    let socket = args.socket.canonicalize().unwrap_or(args.socket);
    let cgroups = Cgroups::open(&socket);
    // Before the first thread and the first VMM: the namespaces of this process may change.
    let jails = Jails::build(&socket);
    engines
        .clear_folders()
        .context("the folder of Firecracker's VMs cannot be used")?;
    let home = cgroups.as_ref().ok().map(|(cgroups, _)| cgroups.root());
    let (mut readable, mut writable) = engines.paths();
    readable.extend(args.snapshots.as_deref());
    writable.extend(home);
    for problem in jail::confine_this_program(&readable, &socket, &writable) {
        say(&format!(
            "this program keeps rights it does not need: {problem}"
        ));
    }
    let settings = Settings {
        engines,
        parallel: args.parallel,
        max_processes: args.max_vms,
    };
    Server::new(settings, listener, cgroups, jails)
        .and_then(|mut server| server.run())
        .context("the event loop cannot go on")
}

/// The engines that the command line names.
fn engines(args: &Args) -> anyhow::Result<Engines> {
    let mut engines = Engines::default();
    let path = match &args.vmm {
        Some(path) => path.clone(),
        None => beside_this_program("forkd-vmm")?,
    };
    engines.add(
        args.engine,
        Program {
            path,
            adapted: None,
        },
    );
    if let (Some(program), Some(folders)) = (&args.firecracker, &args.firecracker_dir) {
        let adapted = Adapted {
            program: program.clone(),
            folders: folders.clone(),
        };
        let program = Program {
            path: beside_this_program("forkd-fc")?,
            adapted: Some(adapted),
        };
        engines.add(Engine::FIRECRACKER, program);
    }
    Ok(engines)
}

fn beside_this_program(name: &str) -> anyhow::Result<PathBuf> {
    let this = std::env::current_exe().context("this program's own path is unknown")?;
    Ok(this.with_file_name(name))
}

/// A line on standard error. A log that cannot be written, on a full disk, is no reason to end.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "forkd-spawn: {line}");
}
