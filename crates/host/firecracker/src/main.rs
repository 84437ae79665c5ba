//! The program `forkd-fc`: one microVM per process, run by an installed Firecracker.
//!
//! Started by `forkd-spawn` like `forkd-vmm`, and speaks the same protocol. The exit status is an [`ExitCode`].

use std::io::Write;
use std::path::PathBuf;

use clap::Parser;
use forkd_fc::Session;
use forkd_sys::jail::close_other_descriptors;
use forkd_sys::{Channel, ignore_sigpipe, inherited_fd};
use forkd_types::chain;
use forkd_vmm_proto::ExitCode;
use rustix::process::{Signal, set_parent_process_death_signal};

/// Runs one microVM with an installed Firecracker.
///
/// forkd-spawn starts this program; there is no need to run it by hand.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// The connected SOCK_SEQPACKET socket that commands come over.
    #[arg(long, value_name = "FD")]
    control_fd: i32,

    /// The Firecracker program.
    #[arg(long, value_name = "PATH")]
    firecracker: PathBuf,

    /// The folder of this VM: empty, and for this VM alone.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
}

fn main() {
    let code = match run(Args::parse()) {
        Ok(code) => code,
        Err((code, error)) => {
            let _ = writeln!(std::io::stderr(), "forkd-fc: {}", chain(error.as_ref()));
            code
        }
    };
    std::process::exit(code as i32);
}

type Failure = (ExitCode, Box<dyn std::error::Error>);

fn run(args: Args) -> Result<ExitCode, Failure> {
    ignore_sigpipe();
    let session = start(args).map_err(|error| (ExitCode::BadStart, error))?;
    session
        .run()
        .map_err(|error| (ExitCode::Internal, error.into()))
}

fn start(args: Args) -> Result<Session, Box<dyn std::error::Error>> {
    close_other_descriptors(args.control_fd)?;
    // The parent may have ended before this call. Then the control socket is closed, too, and the session ends.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let channel = Channel::from_fd(inherited_fd(args.control_fd)?);
    Ok(Session::new(channel, args.firecracker, args.dir)?)
}
