//! The conditions of readiness: a port, a file, a command, a line of output.
//!
//! Each condition is looked at until it holds, in short and growing intervals, and all of them once more at the end: a
//! program may listen, fail and go away.

use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use forkd_guest_proto::{ExecRequest, Readiness, ServiceStart};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use crate::process::{Log, Process, Processes, Read};

/// The first and the longest time between two looks.
const LOOK: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(100));
/// How long one look may take.
const ONE_LOOK: Duration = Duration::from_secs(30);
/// The longest line of a log that is compared.
const MAX_LINE: usize = 64 * 1024;

/// Waits until every condition of a service holds.
pub async fn wait(processes: &Rc<Processes>, start: &ServiceStart, process: &Rc<Process>) {
    loop {
        for condition in &start.ready {
            until(processes, start, process, condition).await;
        }
        let mut all = true;
        for condition in &start.ready {
            // A line that came once may be gone from the log by now.
            let line = matches!(condition, Readiness::Log(_));
            all &= line || holds(processes, start, process, condition).await;
        }
        if all {
            return;
        }
    }
}

/// The first condition that does not hold, for a message.
pub async fn missing(
    processes: &Rc<Processes>,
    start: &ServiceStart,
    process: &Rc<Process>,
) -> String {
    for condition in &start.ready {
        if !holds(processes, start, process, condition).await {
            return match condition {
                Readiness::Port(port) => format!("port {port} does not listen"),
                Readiness::File(path) => format!("{path} does not exist"),
                Readiness::Exec(argv) => format!("{} does not succeed", argv.join(" ")),
                Readiness::Log(text) => format!("no line of its output has {text:?}"),
            };
        }
    }
    "every condition holds by now".to_owned()
}

async fn until(
    processes: &Rc<Processes>,
    start: &ServiceStart,
    process: &Rc<Process>,
    condition: &Readiness,
) {
    if let Readiness::Log(text) = condition {
        return printed(process, text).await;
    }
    let mut pause = LOOK.0;
    while !holds(processes, start, process, condition).await {
        sleep(pause).await;
        pause = (pause * 2).min(LOOK.1);
    }
}

async fn holds(
    processes: &Rc<Processes>,
    start: &ServiceStart,
    process: &Rc<Process>,
    condition: &Readiness,
) -> bool {
    match condition {
        Readiness::Port(port) => {
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, *port));
            timeout(ONE_LOOK, TcpStream::connect(address))
                .await
                .is_ok_and(|connected| connected.is_ok())
        }
        Readiness::File(path) => std::fs::symlink_metadata(path).is_ok(),
        Readiness::Exec(argv) => succeeds(processes, start, argv).await,
        Readiness::Log(text) => outputs(process).any(|log| kept_line(log, text)),
    }
}

async fn succeeds(processes: &Rc<Processes>, start: &ServiceStart, argv: &[String]) -> bool {
    let request = ExecRequest {
        argv: argv.to_vec(),
        env: start.env.clone(),
        cwd: start.cwd.clone(),
        user: start.user.clone(),
        timeout_ms: Some(ONE_LOOK.as_millis() as u64),
        keep_output: Some(0),
        background: true,
        ..ExecRequest::default()
    };
    let Ok(process) = processes.start(&request) else {
        return false;
    };
    // A look that is dropped must not leave its process behind.
    let looked = Looked(processes, &process);
    let result = process.wait().await;
    drop(looked);
    result.status.success() && !result.timed_out
}

struct Looked<'a>(&'a Processes, &'a Process);

impl Drop for Looked<'_> {
    fn drop(&mut self) {
        let _ = self.0.forget(self.1.id);
    }
}

fn outputs(process: &Process) -> impl Iterator<Item = &Rc<Log>> {
    [Some(&process.stdout), process.stderr.as_ref()]
        .into_iter()
        .flatten()
}

fn kept_line(log: &Rc<Log>, text: &str) -> bool {
    match log.follow(true, false).read(usize::MAX) {
        Some(Read::Bytes { bytes, .. }) => String::from_utf8_lossy(&bytes)
            .lines()
            .any(|line| line.contains(text)),
        _ => false,
    }
}

/// Waits for a line on either output.
async fn printed(process: &Rc<Process>, text: &str) {
    let line = |log: Rc<Log>| async move {
        let follower = log.follow(true, false);
        let mut line = Vec::new();
        loop {
            follower.ready().await;
            match follower.read(4096) {
                Some(Read::Bytes { bytes, .. }) => line.extend_from_slice(&bytes),
                // No line comes any more. The caller sees the end of the process.
                Some(Read::End) => return std::future::pending().await,
                None => continue,
            }
            let ended = line.iter().rposition(|byte| *byte == b'\n');
            if String::from_utf8_lossy(&line)
                .lines()
                .any(|line| line.contains(text))
            {
                return;
            }
            line.drain(..ended.map_or(0, |at| at + 1));
            if line.len() > MAX_LINE {
                line.clear();
            }
        }
    };
    match &process.stderr {
        Some(stderr) => tokio::select! {
            () = line(Rc::clone(&process.stdout)) => {}
            () = line(Rc::clone(stderr)) => {}
        },
        None => line(Rc::clone(&process.stdout)).await,
    }
}
