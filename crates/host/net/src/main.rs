//! `forkd-net`: the network engine of a host.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context;
use clap::Parser;
use forkd_net::program::Program;

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
    let listener = forkd_os::seqpacket::listen_on(&args.socket)?;
    Program::new(listener, args.resolver)
        .and_then(|mut program| program.run())
        .context("the event loop cannot go on")
}
