//! Looks after one process from its start to its end.

use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use forkd_guest_proto::{ExecRequest, ExecResult, ExitStatus};
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, oneshot};
use tokio::time::sleep;

use super::pump::{Gone, pump};
use super::table::Process;
use crate::sys::Reaped;

const GRACE: Duration = Duration::from_secs(1);

/// Our ends of the outputs.
pub struct Outputs {
    pub stdout: AsyncFd<OwnedFd>,
    pub stderr: Option<AsyncFd<OwnedFd>>,
}

/// When a process is ended by us.
pub struct Limits {
    timeout: Option<Duration>,
    grace: Duration,
    output: u64,
}

impl Limits {
    pub fn of(request: &ExecRequest) -> Self {
        Self {
            timeout: request.timeout_ms.map(Duration::from_millis),
            grace: request.grace_ms.map_or(GRACE, Duration::from_millis),
            output: request.output_limit.unwrap_or(u64::MAX),
        }
    }
}

#[derive(Default)]
struct Printed {
    bytes: Cell<u64>,
    over: Cell<bool>,
    notify: Notify,
}

/// Runs until the process has ended and its output is in the logs.
pub async fn supervise(
    process: &Rc<Process>,
    mut ended: oneshot::Receiver<Reaped>,
    outputs: Outputs,
    limits: Limits,
) -> ExecResult {
    let start = Instant::now();
    let gone = Rc::new(Gone::default());
    let printed = Rc::new(Printed::default());
    let counter = |printed: &Rc<Printed>| {
        let printed = Rc::clone(printed);
        let limit = limits.output;
        move |count: usize| {
            printed
                .bytes
                .set(printed.bytes.get().saturating_add(count as u64));
            if printed.bytes.get() > limit {
                printed.over.set(true);
                printed.notify.notify_one();
            }
        }
    };
    let logs = [Some(&process.stdout), process.stderr.as_ref()];
    let fds = [Some(outputs.stdout), outputs.stderr];
    for (log, fd) in logs.into_iter().zip(fds) {
        if let (Some(log), Some(fd)) = (log, fd) {
            tokio::task::spawn_local(pump(
                Rc::new(fd),
                Rc::clone(log),
                Rc::clone(&gone),
                counter(&printed),
            ));
        }
    }
    let (reaped, timed_out) = tokio::select! {
        reaped = &mut ended => (reaped, false),
        () = expire(limits.timeout) => (end_gently(process, &mut ended, limits.grace).await, true),
        () = printed.notify.notified() => {
            let _ = process.signal(libc::SIGKILL, true);
            (ended.await, false)
        }
    };
    process.set_reaped();
    let wall_ms = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
    gone.set();
    for log in logs.into_iter().flatten() {
        log.ended().await;
    }
    let reaped = reaped.unwrap_or(Reaped {
        status: ExitStatus::Code(255),
        usage: Default::default(),
    });
    ExecResult {
        process: process.id,
        status: reaped.status,
        timed_out,
        output_limit_hit: printed.over.get(),
        wall_ms,
        usage: reaped.usage,
    }
}

async fn expire(timeout: Option<Duration>) {
    match timeout {
        Some(timeout) => sleep(timeout).await,
        None => std::future::pending().await,
    }
}

async fn end_gently(
    process: &Process,
    ended: &mut oneshot::Receiver<Reaped>,
    grace: Duration,
) -> Result<Reaped, oneshot::error::RecvError> {
    let _ = process.signal(libc::SIGTERM, true);
    tokio::select! {
        reaped = &mut *ended => reaped,
        () = sleep(grace) => {
            let _ = process.signal(libc::SIGKILL, true);
            ended.await
        }
    }
}
