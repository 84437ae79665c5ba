//! `forkd-broker`: the broker of secrets of a host.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use forkd_broker::program::Program;
use forkd_broker::{authority, confine};
use rustix::process::DumpableBehavior;

/// Adds secrets to requests of sandboxes.
///
/// The controller starts this program by itself; there is no need to run it by hand. When it ends, requests that need a
/// secret are refused until it runs again.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Where to listen for the controller: the path of a Unix socket.
    #[arg(long, value_name = "PATH", required_unless_present = "self_test_jail")]
    socket: Option<PathBuf>,

    /// Certificates in PEM that are trusted beside those of the host. May be repeated.
    #[arg(long, value_name = "FILE")]
    roots: Vec<PathBuf>,

    /// Confine this process, try to get out, print one line per attempt, and exit.
    #[arg(long)]
    self_test_jail: bool,
}

fn main() -> anyhow::Result<ExitCode> {
    // The socket is this user's alone, whatever umask the program inherited.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    let args = Args::parse();
    // The hook of the runtime would read the program's own file for a backtrace, which the filter forbids. The message
    // of a panic could hold a value, so only the place is printed.
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string);
        eprintln!("forkd-broker: panic at {}", place.unwrap_or_default());
    }));
    let Some(socket) = args.socket.filter(|_| !args.self_test_jail) else {
        return Ok(match confine::self_test::run()? {
            true => ExitCode::SUCCESS,
            false => ExitCode::FAILURE,
        });
    };
    // No core file and no debugger of the same user sees the values.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .context("cannot refuse core files")?;
    let _ = forkd_os::raise_file_limit();
    let client = authority::upstream(&args.roots)?;
    // The library of cryptography opens what it needs now, and not after the filter.
    authority::Signer::new(&authority::make()?)?;
    let listener = forkd_os::seqpacket::listen_on(&socket)?;
    let mut program = Program::new(listener, client).context("the broker cannot start")?;
    let walls = confine::enter(&socket)?;
    for missing in &walls.missing {
        let (wall, reason) = (missing.wall.name(), &missing.reason);
        eprintln!("forkd-broker: no wall {wall}: {reason}");
    }
    program.start(walls).context("the workers cannot start")?;
    confine::restrict_calls()?;
    program.run().context("the event loop cannot go on")?;
    Ok(ExitCode::SUCCESS)
}
