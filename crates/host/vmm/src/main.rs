//! The program `forkd-vmm`: one microVM per process.
//!
//! Parses the command line, installs signal handlers and the log, and runs the control loop
//! ([`forkd_vmm::program::Session`]). The exit status is an [`ExitCode`].

use std::io::Write;
use std::process;

use forkd_sys::jail::close_other_descriptors;
use forkd_sys::{
    Channel, ignore_sigpipe, inherited_fd, install_forbidden_call_handler, install_kick_handler,
    use_one_heap,
};
use forkd_vmm::program::{Options, Session, USAGE, chain, init_log, self_test};
use forkd_vmm_proto::ExitCode;
use rustix::process::{Signal, set_parent_process_death_signal};

fn main() {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("error: {error}\n\n{USAGE}");
            process::exit(ExitCode::BadStart as i32);
        }
    };
    let code = match options {
        Options::Help => {
            print!("{USAGE}");
            ExitCode::Ok
        }
        Options::Version => {
            println!("forkd-vmm {}", env!("CARGO_PKG_VERSION"));
            ExitCode::Ok
        }
        Options::SelfTestJail { control_fd: None } => self_test::run(),
        Options::SelfTestJail {
            control_fd: Some(control_fd),
        } => self_test::inside(control_fd),
        Options::Run {
            control_fd,
            seccomp,
        } => run(control_fd, seccomp),
    };
    process::exit(code as i32);
}

fn run(control_fd: i32, seccomp: bool) -> ExitCode {
    use_one_heap();
    init_log();
    end_on_panic();
    ignore_sigpipe();
    let started = start(control_fd, seccomp);
    let session = match started {
        Ok(session) => session,
        Err(error) => {
            tracing::error!("cannot start: {}", chain(error.as_ref()));
            return ExitCode::BadStart;
        }
    };
    session.run().unwrap_or_else(|error| {
        tracing::error!("the control loop ended: {}", chain(&error));
        ExitCode::Internal
    })
}

/// Ends the process when a thread panics. A VM with a missing thread would hang without a report.
fn end_on_panic() {
    std::panic::set_hook(Box::new(|panic| {
        let _ = writeln!(std::io::stderr(), "forkd-vmm: {panic}");
        process::exit(ExitCode::Internal as i32);
    }));
}

fn start(control_fd: i32, seccomp: bool) -> Result<Session, Box<dyn std::error::Error>> {
    close_other_descriptors(control_fd)?;
    install_kick_handler()?;
    install_forbidden_call_handler()?;
    // The parent may have ended before this call. Then the control socket is closed, too, and the session ends.
    // Entering the jail clears the setting and sets it again.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let channel = Channel::from_fd(inherited_fd(control_fd)?);
    Ok(Session::new(channel, seccomp)?)
}
