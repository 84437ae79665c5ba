//! `forkd-net`: the network engine of a host.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Parser;
use forkd_net::program::Program;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};

/// Connects sandboxes to the network.
///
/// The controller starts this program by itself; there is no need to run it by hand. When it ends, the connections of
/// all sandboxes break; the sandboxes themselves go on.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Where to listen for the controller: the path of a Unix socket.
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,

    /// A name server for the guests, in place of those of the host. May be repeated.
    #[arg(long, value_name = "ADDRESS:PORT")]
    resolver: Vec<SocketAddr>,
}

fn main() -> anyhow::Result<()> {
    // The socket is this user's alone, whatever umask the program inherited.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    let args = Args::parse();
    // Each flow is an open file; a low limit refuses flows and breaks nothing.
    let _ = forkd_os::raise_file_limit();
    let listener = listen_on(&args.socket)?;
    Program::new(listener, args.resolver)
        .and_then(|mut program| program.run())
        .context("the event loop cannot go on")
}

/// Listens on the path, and replaces a socket that no process listens on any more.
fn listen_on(path: &Path) -> anyhow::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)
        .with_context(|| format!("{} is no path for a socket", path.display()))?;
    let new = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
    };
    if connect(new()?, &address).is_ok() {
        bail!("another forkd-net listens on {}", path.display());
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("{} is in the way", path.display()));
        }
        _ => {}
    }
    let listener = new()?;
    bind(&listener, &address).with_context(|| format!("cannot bind {}", path.display()))?;
    listen(&listener, 16)?;
    Ok(listener)
}
