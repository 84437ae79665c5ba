//! Programs that need a terminal.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use forkd_agent_client::{Calls, Exec, Output};
use forkd_guest_proto::{ExecRequest, ExitStatus, PtySize};
use forkd_testkit::BootOptions;

use crate::scenario::{Registered, Run, everyday};

pub const SCENARIOS: &[Registered] = &[everyday!(screen_programs)];

pub async fn screen_programs(run: Run) -> anyhow::Result<()> {
    let vm = run.kit.boot(BootOptions::default()).await?;
    let agent = vm.agent().await?;
    size_and_resize(&agent).await?;
    top(&agent).await?;
    editor(&agent).await?;
    let content = vm.sh("cat /tmp/edited").await?;
    ensure!(content == "written in a guest", "{content:?}");
    Ok(())
}

async fn open(agent: &Calls, line: &str) -> anyhow::Result<Screen> {
    let exec = agent
        .exec(ExecRequest {
            shell: Some(line.to_owned()),
            env: vec![("TERM".into(), Some("xterm".into()))],
            pty: Some(PtySize { rows: 24, cols: 80 }),
            stdin: true,
            ..Default::default()
        })
        .await?;
    Ok(Screen {
        exec,
        seen: String::new(),
    })
}

/// A terminal with the output since the last check.
struct Screen {
    exec: Exec,
    seen: String,
}

impl Screen {
    /// Waits until a text appears, and drops everything up to its end.
    async fn see(&mut self, text: &str) -> anyhow::Result<()> {
        let looking = async {
            loop {
                if let Some(at) = self.seen.find(text) {
                    self.seen.drain(..at + text.len());
                    return Ok(());
                }
                match self.exec.next_output().await? {
                    Some(Output::Stdout(bytes)) => {
                        self.seen.push_str(&String::from_utf8_lossy(&bytes));
                    }
                    Some(_) => {}
                    None => bail!("the program ended"),
                }
            }
        };
        let result = tokio::time::timeout(Duration::from_secs(90), looking).await;
        match result {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(error),
            Err(_) => bail!("nothing more came"),
        }
        .with_context(|| format!("{text:?} does not appear; the rest is {:?}", self.seen))
    }

    async fn type_keys(&self, keys: &str) -> anyhow::Result<()> {
        Ok(self.exec.stdin().write(keys.as_bytes()).await?)
    }
}

async fn size_and_resize(agent: &Calls) -> anyhow::Result<()> {
    let mut screen = open(
        agent,
        "tty; stty size; trap 'stty size; exit 0' WINCH; echo waiting; while :; do sleep 0.1; done",
    )
    .await?;
    screen.see("/dev/pts/").await?;
    screen.see("24 80").await?;
    screen.see("waiting").await?;
    screen.exec.resize(50, 132);
    screen.see("50 132").await?;
    let result = screen.exec.wait().await?;
    ensure!(result.status == ExitStatus::Code(0), "{result:?}");
    Ok(())
}

async fn top(agent: &Calls) -> anyhow::Result<()> {
    let mut screen = open(agent, "exec top -d 60").await?;
    screen.see("load average").await?;
    screen.see("PID").await?;
    screen.exec.resize(12, 100);
    // A new size makes the program redraw its screen.
    screen.see("load average").await?;
    screen.type_keys("q").await?;
    let result = screen.exec.wait().await?;
    ensure!(result.status == ExitStatus::Code(0), "{result:?}");
    Ok(())
}

async fn editor(agent: &Calls) -> anyhow::Result<()> {
    let mut screen = open(agent, "exec vi /tmp/edited").await?;
    screen.see("/tmp/edited").await?;
    screen.type_keys("iwritten in a guest").await?;
    screen.see("in a guest").await?;
    screen.type_keys("\u{1b}").await?;
    screen.type_keys(":wq\r").await?;
    let result = screen.exec.wait().await?;
    ensure!(result.status == ExitStatus::Code(0), "{result:?}");
    Ok(())
}
