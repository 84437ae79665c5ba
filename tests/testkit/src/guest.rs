//! Work in a guest, through its agent: commands, Python code, files.

use anyhow::{Context, bail};
use forkd_agent_client::{Calls, Captured, Client, Identified, Options};
use forkd_guest_proto::{EvalRequest, ExecRequest, IdentityRequest, NetworkRequest, WriteRequest};

use crate::{Vm, procfs};

/// Path of the test program in a guest.
const SELF: &str = "/var/tmp/forkd-e2e";

/// How long one request may take: some run for the whole of a scenario.
const REQUEST: std::time::Duration = std::time::Duration::from_secs(3600);

/// How many lines of a console are shown.
const LAST_WORDS: usize = 30;

impl Vm {
    /// Connects to the agent.
    pub async fn agent(&self) -> anyhow::Result<Calls> {
        let options = Options {
            // A guest in an emulated machine under load is slow.
            timeout: std::time::Duration::from_secs(60),
            ..Options::default()
        };
        let port = forkd_vmm_proto::AGENT_PORT;
        match Client::connect_vsock(&self.agent_socket(), port, options).await {
            Ok(client) => Ok(client.each_within(REQUEST)),
            Err(error) if procfs::is_alive(self.pid()) => Err(error.into()),
            Err(error) => Err(anyhow::Error::from(error).context(self.last_words().await)),
        }
    }

    /// How the VMM ended, and the last lines of the console.
    async fn last_words(&self) -> String {
        let console = self.console();
        let last: Vec<&str> = console.lines().rev().take(LAST_WORDS).collect();
        format!(
            "the VMM ended: {:?}; the guest said last, the latest first: {last:#?}",
            self.wait_end().await
        )
    }

    /// Waits until the agent answers. The agent of a child was ready before the cut and sends no ready
    /// signal.
    pub async fn answers(&self) -> anyhow::Result<()> {
        self.agent().await?.ping().await?;
        Ok(())
    }

    /// Runs a program to its end.
    pub async fn exec(&self, request: ExecRequest) -> anyhow::Result<Captured> {
        Ok(self.agent().await?.exec_capture(request).await?)
    }

    /// Runs a program and returns its stdout without the last newline. Fails unless the program succeeds.
    pub async fn output(&self, request: ExecRequest) -> anyhow::Result<String> {
        let captured = self.exec(request.clone()).await?;
        let stdout = String::from_utf8_lossy(&captured.stdout);
        if !captured.result.status.success() {
            let stderr = String::from_utf8_lossy(&captured.stderr);
            let what = request.shell.unwrap_or_else(|| request.argv.join(" "));
            bail!(
                "`{what}` ended with {:?}: {stdout}{stderr}",
                captured.result
            );
        }
        Ok(stdout.trim_end().to_owned())
    }

    /// Runs a shell command.
    pub async fn sh(&self, command: &str) -> anyhow::Result<String> {
        self.output(ExecRequest {
            shell: Some(command.to_owned()),
            ..Default::default()
        })
        .await
    }

    /// Runs a Python program in a new process.
    pub async fn python(&self, program: &str, args: &[&str]) -> anyhow::Result<String> {
        let mut argv = vec!["python3", "-c", program];
        argv.extend(args);
        self.output(ExecRequest {
            argv: argv.into_iter().map(str::to_owned).collect(),
            ..Default::default()
        })
        .await
    }

    /// Runs code in the warm interpreter and returns the value of its last expression as JSON.
    pub async fn eval(&self, code: &str) -> anyhow::Result<serde_json::Value> {
        let request = EvalRequest {
            code: code.to_owned(),
            ..Default::default()
        };
        let call = self.agent().await?.eval(request).await?;
        if let Some(error) = call.result.error {
            bail!("`{code}` raised {}", error.traceback);
        }
        match call.result.json {
            Some(json) => Ok(json.parse()?),
            None => Ok(serde_json::Value::Null),
        }
    }

    /// Writes a file in the guest.
    pub async fn put(&self, path: &str, content: &[u8], mode: u32) -> anyhow::Result<()> {
        let request = WriteRequest {
            path: path.to_owned(),
            mode: Some(mode),
            parents: true,
            ..Default::default()
        };
        self.agent().await?.write_file(request, content).await?;
        Ok(())
    }

    /// Copies the running test program into the guest.
    pub async fn put_self(&self) -> anyhow::Result<()> {
        let program = tokio::fs::File::open(std::env::current_exe()?).await?;
        let request = WriteRequest {
            path: SELF.to_owned(),
            mode: Some(0o755),
            parents: true,
            ..Default::default()
        };
        self.agent().await?.upload(request, program).await?;
        Ok(())
    }

    /// The request that runs the guest half of a scenario. Call [`Self::put_self`] before.
    pub fn guest_half(&self, name: &str, args: &[&str]) -> ExecRequest {
        let mut argv = vec![SELF, "guest", name];
        argv.extend(args);
        ExecRequest {
            argv: argv.into_iter().map(str::to_owned).collect(),
            ..Default::default()
        }
    }

    /// Gives a child its own identity, as the daemon does.
    pub async fn identify(
        &self,
        hostname: &str,
        network: Option<NetworkRequest>,
    ) -> anyhow::Result<Identified> {
        let generation: [u8; 16] = rand::random();
        let entropy: [u8; 64] = rand::random();
        let request = IdentityRequest {
            generation: hex::encode(generation),
            entropy: hex::encode(entropy),
            hostname: Some(hostname.to_owned()),
            machine_id: Some(hex::encode(rand::random::<[u8; 16]>())),
            network,
            hook_timeout_ms: Some(60_000),
            ..Default::default()
        };
        self.agent()
            .await?
            .identify(request)
            .await
            .context("the fork did not become a machine of its own")
    }
}
