//! `forkd-net`: the network engine of a host.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use forkd_net::confine;
use forkd_net::program::Program;

/// Connects sandboxes to the network.
///
/// The controller starts this program by itself; there is no need to run it by hand. When it ends, the connections of
/// all sandboxes break; the sandboxes themselves go on.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Where to listen for the controller: the path of a Unix socket.
    #[arg(long, value_name = "PATH", required_unless_present = "self_test_jail")]
    socket: Option<PathBuf>,

    /// A name server for the guests, in place of those of the host. May be repeated.
    #[arg(long, value_name = "ADDRESS:PORT")]
    resolver: Vec<SocketAddr>,

    /// Confine this process, try to get out, print one line per attempt, and exit.
    #[arg(long)]
    self_test_jail: bool,
}

fn main() -> anyhow::Result<ExitCode> {
    // The socket is this user's alone, whatever umask the program inherited.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    let args = Args::parse();
    // The hook of the runtime would read the program's own file for a backtrace, which the filter forbids.
    std::panic::set_hook(Box::new(|panic| eprintln!("forkd-net: {panic}")));
    let Some(socket) = args.socket.filter(|_| !args.self_test_jail) else {
        return Ok(match confine::self_test::run()? {
            true => ExitCode::SUCCESS,
            false => ExitCode::FAILURE,
        });
    };
    // Each flow is an open file; a low limit refuses flows and breaks nothing.
    let _ = forkd_os::raise_file_limit();
    let listener = forkd_os::seqpacket::listen_on(&socket)?;
    let mut program = Program::new(listener, args.resolver).context("the engine cannot start")?;
    let walls = confine::enter(&socket)?;
    for missing in &walls.missing {
        eprintln!(
            "forkd-net: no wall {}: {}",
            missing.wall.name(),
            missing.reason
        );
    }
    program.start(walls).context("the workers cannot start")?;
    confine::restrict_calls()?;
    program.run().context("the event loop cannot go on")?;
    Ok(ExitCode::SUCCESS)
}
