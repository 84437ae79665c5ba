//! Ends the guest: signals, unmounts, power off.

use std::io;
use std::rc::Rc;
use std::time::Duration;

use forkd_guest_proto::{ShutdownMode, ShutdownRequest};
use rustix::mount::{MountFlags, UnmountFlags, mount_remount, unmount};
use rustix::process::Signal;
use rustix::system::{RebootCommand, reboot};
use tokio::signal::unix::{SignalKind, signal};

use crate::agent::{Agent, Role};
use crate::files::blocking;

const GRACE: Duration = Duration::from_secs(2);

/// Ends the guest: a polite signal, the other one, disks written and let go, power off. An agent that is an
/// ordinary process only ends itself.
pub async fn run(agent: &Agent, request: ShutdownRequest) {
    if agent.role == Role::Process {
        std::process::exit(0);
    }
    let grace = request.grace_ms.map_or(GRACE, Duration::from_millis);
    // A frozen process would not hear the polite signal.
    let _ = agent.thaw();
    crate::sys::signal_everybody(Signal::TERM);
    let _ = tokio::time::timeout(grace, all_gone(agent)).await;
    crate::sys::signal_everybody(Signal::KILL);
    let _ = tokio::time::timeout(grace, all_gone(agent)).await;
    let _ = blocking(|| {
        let_go_of_disks();
        Ok(())
    })
    .await;
    let command = match request.mode {
        ShutdownMode::Poweroff => RebootCommand::PowerOff,
        ShutdownMode::Reboot => RebootCommand::Restart,
    };
    let _ = reboot(command);
}

async fn all_gone(agent: &Agent) {
    while crate::sys::anybody_else() {
        agent.reaper.next_end().await;
    }
}

fn let_go_of_disks() {
    rustix::fs::sync();
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let disks = mounts.lines().rev().filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let (source, mount) = (words.next()?, words.next()?);
        (source.starts_with("/dev/") && mount != "/").then_some(mount)
    });
    for mount in disks {
        let _ = unmount(mount, UnmountFlags::empty());
    }
    let _ = mount_remount("/", MountFlags::RDONLY, "");
    rustix::fs::sync();
}

/// Ends a guest that did not come up.
pub fn power_off_now() {
    rustix::fs::sync();
    let _ = reboot(RebootCommand::PowerOff);
}

/// A first process goes down when it is told by a signal, too.
pub fn on_signals(agent: &Rc<Agent>) -> io::Result<()> {
    if agent.role == Role::Process {
        return Ok(());
    }
    let _ = reboot(RebootCommand::CadOff);
    let modes = [
        (SignalKind::terminate(), ShutdownMode::Poweroff),
        (SignalKind::from_raw(libc::SIGPWR), ShutdownMode::Poweroff),
        (SignalKind::interrupt(), ShutdownMode::Reboot),
    ];
    for (kind, mode) in modes {
        let mut signals = signal(kind)?;
        let agent = Rc::clone(agent);
        tokio::task::spawn_local(async move {
            if signals.recv().await.is_some() {
                run(
                    &agent,
                    ShutdownRequest {
                        mode,
                        grace_ms: None,
                    },
                )
                .await;
            }
        });
    }
    Ok(())
}
