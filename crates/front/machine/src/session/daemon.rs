//! The daemon in the machine, and the port that leads to it.
//!
//! The daemon listens on the machine's loopback address. An nftables rule forwards the port from the
//! interface that faces the host. A new build of the daemon replaces a running one.

use std::time::Duration;

use forkd_guest_proto::{DialRequest, ExecRequest, OnDisconnect, ProcessInfo, ProcessState};

use super::{Session, agent_error, within};
use crate::error::MachineError;
use crate::machine::Machine;
use crate::programs;
use crate::progress::{Progress, Step};
use crate::qemu::API_PORT;

const PROGRAM: &str = "forkd-controller";
const TAG: &str = "forkd-controller";
/// In an emulated machine with a hundred children, a child may need minutes to answer.
const READY_TIMEOUT: &str = "5m";
const LOG: &str = "/var/log/forkd-controller.log";
const START_LIMIT: Duration = Duration::from_secs(60);
const STOP_LIMIT: Duration = Duration::from_secs(40);
const SIGTERM: i32 = 15;

/// Redirects the daemon's port from the interface that faces the host to the loopback address. Interfaces of
/// sandboxes stay closed.
const OPEN_PORT: &str = r#"
set -e
dev=$(ip -o -4 route show default | sed -n 's/.* dev \([^ ]*\).*/\1/p' | head -n 1)
echo 1 > "/proc/sys/net/ipv4/conf/$dev/route_localnet"
nft -f - <<RULES
table ip forkd_machine
delete table ip forkd_machine
table ip forkd_machine {
  chain prerouting {
    type nat hook prerouting priority dstnat
    iifname "$dev" tcp dport $1 dnat to 127.0.0.1:$1
  }
}
RULES
"#;

impl Machine {
    /// Opens the daemon's port for the host. Runs once per start of the machine.
    pub(crate) async fn open_port(&self) -> Result<(), MachineError> {
        let session = self.connect().await?;
        let port = API_PORT.to_string();
        let done = session.run(&["sh", "-c", OPEN_PORT, "sh", &port]).await?;
        if done.result.status.success() {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&done.stderr).trim().to_owned();
        Err(agent_error("open the daemon's port in the machine")(
            std::io::Error::other(text),
        ))
    }

    /// Starts the daemon if this build has one, and restarts it if the build is new. Returns `false` if there
    /// is no daemon.
    pub(crate) async fn ensure_daemon(
        &self,
        renewed: bool,
        progress: &dyn Progress,
    ) -> Result<bool, MachineError> {
        let there = programs::folder().is_some_and(|folder| folder.join(PROGRAM).is_file());
        if !there {
            return Ok(false);
        }
        let session = self.connect().await?;
        if let Some(process) = session.daemon().await? {
            if !renewed {
                return Ok(true);
            }
            session.end_daemon(&process).await?;
        }
        progress.step(&Step::Daemon);
        session.start_daemon().await?;
        Ok(true)
    }
}

impl Session {
    /// Whether the daemon runs. `None` if the agent does not answer.
    pub(crate) async fn daemon_runs(&self, limit: Duration) -> Option<bool> {
        within(limit, self.daemon())
            .await?
            .ok()
            .map(|process| process.is_some())
    }

    async fn daemon(&self) -> Result<Option<ProcessInfo>, MachineError> {
        let all = self
            .client
            .processes()
            .await
            .map_err(agent_error("list the processes in the machine"))?;
        Ok(all.into_iter().find(|process| {
            process.tag.as_deref() == Some(TAG) && process.state == ProcessState::Running
        }))
    }

    async fn end_daemon(&self, process: &ProcessInfo) -> Result<(), MachineError> {
        let action = "stop the daemon in the machine";
        self.client
            .signal(process.process, SIGTERM, false)
            .await
            .map_err(agent_error(action))?;
        if within(STOP_LIMIT, self.client.wait(process.process))
            .await
            .is_none()
        {
            self.client
                .forget(process.process)
                .await
                .map_err(agent_error(action))?;
        }
        Ok(())
    }

    async fn start_daemon(&self) -> Result<(), MachineError> {
        let action = "start the daemon in the machine";
        let request = ExecRequest {
            shell: Some(format!(
                "exec {PROGRAM} serve --e2b --mcp all --ready-timeout {READY_TIMEOUT} --network-default public >>{LOG} 2>&1"
            )),
            on_disconnect: OnDisconnect::Keep,
            tag: Some(TAG.to_owned()),
            ..Default::default()
        };
        let started = self
            .client
            .start(request)
            .await
            .map_err(agent_error(action))?;
        tokio::select! {
            answered = within(START_LIMIT, self.await_port()) => match answered {
                Some(()) => Ok(()),
                None => Err(agent_error(action)(self.complaint("it does not listen").await)),
            },
            _ = self.client.wait(started.process) => {
                Err(agent_error(action)(self.complaint("it ended").await))
            }
        }
    }

    /// Waits until the daemon answers HTTP. An open port is not enough: the daemon binds it before it adopts
    /// the sandboxes of the previous daemon, and adoption can fail.
    async fn await_port(&self) {
        let mut pace = tokio::time::interval(Duration::from_millis(50));
        pace.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            pace.tick().await;
            if self.speaks_http().await == Some(true) {
                return;
            }
        }
    }

    async fn speaks_http(&self) -> Option<bool> {
        let port = DialRequest::Tcp(API_PORT.to_string());
        let connection = self.client.dial(port).await.ok()?;
        connection
            .write(b"GET /healthz HTTP/1.0\r\n\r\n")
            .await
            .ok()?;
        let answer = connection.read().await.ok()??;
        Some(answer.starts_with(b"HTTP/"))
    }

    /// The last lines of the daemon's log, as an error.
    async fn complaint(&self, what: &str) -> std::io::Error {
        let said = match self.run(&["tail", "-n", "3", LOG]).await {
            Ok(tail) => String::from_utf8_lossy(&tail.stdout)
                .trim()
                .replace('\n', "; "),
            Err(_) => String::new(),
        };
        std::io::Error::other(if said.is_empty() {
            what.to_owned()
        } else {
            format!("{what}: {said}")
        })
    }
}
