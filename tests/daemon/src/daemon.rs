//! A daemon of its own for each scenario.
//!
//! [`Daemon`] starts `forkd-controller` with an empty store. Dropping it ends its processes and removes its files. A
//! failed start shows the end of the log.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use forkd_api::{CreateSandboxes, CreateSnapshot, CreateToken, Role, SandboxInfo, SnapshotInfo};
use forkd_rest_client::{Client, Error, Target};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::process::{Child, Command};

use crate::fake::{Faults, LIMITS, MISSING_WALLS};
use crate::leftovers::{self, Leftovers};
use crate::{Programs, Sandbox, Vmms, until};

/// The image of parents with real VMMs, unless this variable names another.
const IMAGE: &str = "FORKD_TEST_IMAGE";
/// Guest memory of parents with fake VMMs.
const MEMORY_MIB: u32 = 64;
/// Size of the root disk of parents with fake VMMs.
const DISK_BYTES: u64 = 1 << 20;
/// How much of the log a failed scenario shows.
const LOG_TAIL: usize = 12_000;

/// Arguments of `forkd-controller serve`, besides those that every scenario needs.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Appended to the command line.
    pub args: Vec<String>,
    /// Names of tokens; without any, none is asked for.
    pub tokens: Vec<String>,
}

impl Options {
    /// The given arguments.
    pub fn args(args: &[&str]) -> Self {
        Self {
            args: args.iter().map(ToString::to_string).collect(),
            ..Self::default()
        }
    }
}

/// A running daemon and everything below it. Dropping it ends its processes and removes its files.
#[derive(Debug)]
pub struct Daemon {
    programs: TempDir,
    home: TempDir,
    vmms: Vmms,
    options: Options,
    process: Option<Child>,
    client: Client,
    faults: Faults,
}

impl Daemon {
    /// Starts a daemon with an empty store.
    ///
    /// # Panics
    ///
    /// Panics when the daemon does not come up; the message holds the end of its log.
    pub async fn start(programs: Programs) -> Self {
        Self::with(programs, Options::default()).await
    }

    /// Starts a daemon with an empty store and more arguments.
    ///
    /// # Panics
    ///
    /// Panics when the daemon does not come up; the message holds the end of its log.
    pub async fn with(programs: Programs, options: Options) -> Self {
        let mut daemon = Self::prepare(&programs, options);
        daemon.launch().await;
        daemon
    }

    /// Everything but the process: a scenario may fill the data directory first.
    ///
    /// # Panics
    ///
    /// Panics when files cannot be made.
    pub fn prepare(programs: &Programs, options: Options) -> Self {
        // Short: the name of a socket has 108 bytes.
        let home = tempfile::Builder::new()
            .prefix("forkd-")
            .tempdir()
            .expect("a home directory");
        let bin = programs.install().expect("programs are installed");
        let faults = Faults::beside(&bin.path().join("forkd-vmm"));
        faults.create().expect("a directory of faults");
        let daemon = Self {
            client: client(home.path(), None),
            programs: bin,
            home,
            vmms: programs.vmms(),
            options,
            process: None,
            faults,
        };
        for dir in [
            daemon.data(),
            daemon.run(),
            daemon.data().join("images/parent"),
        ] {
            std::fs::create_dir_all(dir).expect("a directory");
        }
        for name in ["vmlinux", "initramfs.cpio", "root.ext4"] {
            File::create(daemon.data().join("images/parent").join(name))
                .and_then(|file| file.set_len(DISK_BYTES))
                .expect("a file to boot from");
        }
        let tokens: String = daemon
            .options
            .tokens
            .iter()
            .map(|name| format!("{name}={}\n", token(name)))
            .collect();
        if !tokens.is_empty() {
            std::fs::write(daemon.home.path().join("tokens"), tokens).expect("a token file");
        }
        daemon
    }

    /// Where the daemon keeps everything.
    pub fn data(&self) -> PathBuf {
        self.home.path().join("data")
    }

    /// The process ID of the daemon.
    ///
    /// # Panics
    ///
    /// Panics when the daemon does not run.
    pub fn pid(&self) -> u32 {
        let process = self.process.as_ref().expect("the daemon was started");
        process.id().expect("the daemon runs")
    }

    fn run(&self) -> PathBuf {
        self.home.path().join("run")
    }

    fn log(&self) -> PathBuf {
        self.home.path().join("log")
    }

    /// A client of the first token, if tokens are asked for.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// A client of another token.
    pub fn client_of(&self, name: &str) -> Client {
        client(self.home.path(), Some(token(name)))
    }

    /// A client of a new token that allows use and nothing else. The tokens of [`Options`] are those of operators.
    ///
    /// # Panics
    ///
    /// Panics if the daemon refuses the token.
    pub async fn user(&self, name: &str) -> Client {
        let request = CreateToken {
            name: name.into(),
            owner: None,
            role: Role::Use,
        };
        let created = self.client.create_token(&request).await;
        client(self.home.path(), Some(created.expect("a token").token))
    }

    /// Faults for the VMMs of this daemon.
    ///
    /// # Panics
    ///
    /// Panics with real VMMs, which know no faults.
    pub fn faults(&self) -> &Faults {
        assert_eq!(self.vmms, Vmms::Fake, "faults need fake VMMs");
        &self.faults
    }

    /// Takes a wall down that the fake `forkd-spawn` would report as standing.
    ///
    /// # Panics
    ///
    /// Panics when the file cannot be written.
    pub fn without_wall(&self, wall: &str, reason: &str) {
        let path = self.programs.path().join(MISSING_WALLS);
        std::fs::write(path, format!("{wall} {reason}\n")).expect("a wall is taken down");
    }

    /// The memory limits in bytes that the fake `forkd-spawn` was asked to set on live VMs, in order.
    pub fn limits_set(&self) -> Vec<u64> {
        let text = std::fs::read_to_string(self.programs.path().join(LIMITS));
        text.unwrap_or_default()
            .lines()
            .filter_map(|line| line.parse().ok())
            .collect()
    }

    /// Starts the process and waits until it answers.
    ///
    /// # Panics
    ///
    /// Panics when the daemon does not come up; the message holds the end of its log.
    pub async fn launch(&mut self) {
        if let Err(status) = self.try_launch().await {
            panic!("the daemon ended with {status}:\n{}", self.log_tail());
        }
    }

    /// Starts the process and waits until it answers or ends. The error is how it ended.
    ///
    /// # Panics
    ///
    /// Panics when the process cannot be started, or neither answers nor ends.
    pub async fn try_launch(&mut self) -> Result<(), std::process::ExitStatus> {
        let bin = self.programs.path();
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.log())
            .expect("a log");
        let mut command = Command::new(bin.join("forkd-controller"));
        command
            .arg("serve")
            .arg("--data-dir")
            .arg(self.data())
            .arg("--run-dir")
            .arg(self.run())
            .arg("--socket")
            .arg(socket(self.home.path()))
            .arg("--spawn-program")
            .arg(bin.join("forkd-spawn"))
            // Shells of the pool would claim faults that are meant for the VMMs of the test.
            .args(["--pool", "0", "--reserve-mib", "0"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .kill_on_drop(true);
        if !self.options.tokens.is_empty() {
            command
                .arg("--token-file")
                .arg(self.home.path().join("tokens"));
        }
        command.args(&self.options.args);
        let mut process = command.spawn().expect("the daemon starts");
        // Connections of an earlier process are of no use.
        let first = self.options.tokens.first().map(|name| token(name));
        self.client = client(self.home.path(), first);
        let client = &self.client;
        let mut ended = None;
        until("the daemon answers", async || {
            ended = process.try_wait().expect("the daemon is waited for");
            (ended.is_some() || client.health().await.is_ok()).then_some(())
        })
        .await;
        match ended {
            Some(status) => Err(status),
            None => {
                self.process = Some(process);
                Ok(())
            }
        }
    }

    /// Ends the process by `SIGKILL`. Its VMs go on.
    ///
    /// # Panics
    ///
    /// Panics when the process does not end.
    pub async fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().await.expect("the daemon is killed");
        }
    }

    /// Ends the process by `SIGTERM` and waits until it has drained. Its VMs go on.
    ///
    /// # Panics
    ///
    /// Panics when the process does not end.
    pub async fn stop(&mut self) {
        if let Some(mut process) = self.process.take() {
            let pid = process.id().and_then(|pid| Pid::from_raw(pid as i32));
            kill_process(pid.expect("the daemon runs"), Signal::TERM).expect("a signal is sent");
            process.wait().await.expect("the daemon ends");
        }
    }

    /// Kills the process and starts another on the same files.
    pub async fn restart(&mut self) {
        self.kill().await;
        self.launch().await;
    }

    /// Builds a parent whose file `/mark` holds the line `parent`.
    pub async fn parent(&self, tag: &str) -> Result<SnapshotInfo, Error> {
        let line = "echo parent > /mark";
        let warmup = ["sh", "-c", line].map(str::to_owned).to_vec();
        let file = |name: &str| {
            let path = self.data().join("images/parent").join(name);
            Some(path.to_string_lossy().into_owned())
        };
        let request = match self.vmms {
            Vmms::Fake => CreateSnapshot {
                kernel: file("vmlinux"),
                initramfs: file("initramfs.cpio"),
                rootfs: file("root.ext4"),
                mem_size_mib: Some(MEMORY_MIB),
                ..CreateSnapshot::default()
            },
            Vmms::Real => CreateSnapshot {
                image: Some(std::env::var(IMAGE).unwrap_or_else(|_| "python".to_owned())),
                ..CreateSnapshot::default()
            },
        };
        let request = CreateSnapshot {
            tag: tag.to_owned(),
            warmup,
            ..request
        };
        self.client.create_snapshot(&request).await
    }

    /// Starts children of a tag and waits until they are ready. Those that failed are left out.
    pub async fn spawn(&self, tag: &str, n: u32) -> Result<Vec<Sandbox>, Error> {
        let request = CreateSandboxes {
            snapshot_tag: tag.to_owned(),
            n,
            ..CreateSandboxes::default()
        };
        let made = self.client.spawn(&request).await?;
        Ok(Sandbox::running(&self.client, &made))
    }

    /// One child of a tag.
    ///
    /// # Panics
    ///
    /// Panics when it does not start.
    pub async fn child(&self, tag: &str) -> Sandbox {
        let mut made = self.spawn(tag, 1).await.expect("a child starts");
        made.pop().expect("one child")
    }

    /// The sandboxes the daemon knows.
    ///
    /// # Panics
    ///
    /// Panics when the daemon does not answer.
    pub async fn sandboxes(&self) -> Vec<SandboxInfo> {
        self.client.sandboxes().await.expect("sandboxes are listed")
    }

    /// The tags the daemon knows.
    ///
    /// # Panics
    ///
    /// Panics when the daemon does not answer.
    pub async fn tags(&self) -> Vec<String> {
        let all = self.client.snapshots().await.expect("snapshots are listed");
        all.into_iter().map(|info| info.tag).collect()
    }

    /// The processes of the network engine.
    pub fn engines(&self) -> Vec<u32> {
        leftovers::processes(&self.programs.path().join("forkd-net"))
    }

    /// The processes of the broker of secrets.
    pub fn brokers(&self) -> Vec<u32> {
        leftovers::processes(&self.programs.path().join("forkd-broker"))
    }

    /// The processes that the daemon starts beside VMMs.
    pub fn helpers(&self) -> Vec<u32> {
        let bin = self.programs.path();
        let names = ["forkd-spawn", "forkd-net", "forkd-broker"];
        let found = names.map(|name| leftovers::processes(&bin.join(name)));
        found.concat()
    }

    /// Ends the network engine by `SIGKILL`.
    pub fn kill_engine(&self) {
        for pid in self.engines() {
            if let Some(pid) = Pid::from_raw(pid as i32) {
                // It may have ended by itself.
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }

    /// The sandboxes that the network engine serves.
    ///
    /// # Panics
    ///
    /// Panics when the daemon does not answer.
    pub async fn engine_sandboxes(&self) -> u32 {
        let status = self.client.status().await.expect("the daemon has a status");
        status.network.expect("the status of the network").sandboxes
    }

    /// Files and processes of sandboxes.
    pub fn leftovers(&self) -> Leftovers {
        Leftovers::find(&self.data(), &self.run(), self.programs.path())
    }

    /// How many descriptors the daemon has open.
    pub fn open_files(&self) -> usize {
        let processes = leftovers::processes(&self.programs.path().join("forkd-controller"));
        let open = processes.iter().map(|pid| format!("/proc/{pid}/fd"));
        open.map(|dir| leftovers::entries(Path::new(&dir)).len())
            .sum()
    }

    /// Ends a process of this daemon by `SIGKILL`.
    ///
    /// # Panics
    ///
    /// Panics when there is no such process.
    pub fn kill_process(pid: u32) {
        let pid = Pid::from_raw(pid as i32).expect("a process ID");
        kill_process(pid, Signal::KILL).expect("a signal is sent");
    }

    /// Deletes every sandbox and every snapshot and checks that nothing stays: no file, no process, no content.
    ///
    /// # Panics
    ///
    /// Panics with what is left.
    pub async fn ends_clean(&self) {
        for sandbox in self.sandboxes().await {
            // Another request may delete it at the same time.
            let _ = self.client.kill(&sandbox.id).await;
        }
        let what = "no file or process of a sandbox is left";
        let none = Leftovers::default();
        let mut last = Leftovers::default();
        let clean = tokio::time::timeout(
            std::time::Duration::from_secs(60),
            until(what, async || {
                last = self.leftovers();
                (last == none).then_some(())
            }),
        );
        if clean.await.is_err() {
            panic!("{what}: {last:?}\n{}", self.log_tail());
        }
        for tag in self.tags().await {
            let _ = self.client.delete_snapshot(&tag, false, true).await;
        }
        until("no content is left", async || {
            let usage = self.client.store().await.expect("the store answers");
            (usage.blobs == 0 && usage.snapshots == 0).then_some(())
        })
        .await;
        let report = self.client.fsck(true).await.expect("the store is checked");
        assert!(report.problems.is_empty(), "{:?}", report.problems);
    }

    /// Waits until no staged file is left. The daemon removes staged files after it has answered.
    ///
    /// # Panics
    ///
    /// Panics if a file stays.
    pub async fn stages_nothing(&self) {
        until("nothing is staged", async || {
            let staged =
                std::fs::read_dir(self.data().join("staging")).expect("the staging directory");
            (staged.count() == 0).then_some(())
        })
        .await;
    }

    /// The end of the daemon's log.
    pub fn log_tail(&self) -> String {
        let bytes = std::fs::read(self.log()).unwrap_or_default();
        let from = bytes.len().saturating_sub(LOG_TAIL);
        String::from_utf8_lossy(bytes.get(from..).unwrap_or_default()).into_owned()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- the end of the daemon's log\n{}", self.log_tail());
        }
        // Held VMMs look whether the directory of faults is there, all others end with forkd-spawn.
        for name in [
            "forkd-controller",
            "forkd-spawn",
            "forkd-vmm",
            "forkd-net",
            "forkd-broker",
        ] {
            for pid in leftovers::processes(&self.programs.path().join(name)) {
                if let Some(pid) = Pid::from_raw(pid as i32) {
                    let _ = kill_process(pid, Signal::KILL);
                }
            }
        }
    }
}

fn token(name: &str) -> String {
    format!("{name}-0123456789abcdef")
}

fn socket(home: &Path) -> PathBuf {
    home.join("run/api.sock")
}

fn client(home: &Path, token: Option<String>) -> Client {
    Client::new(&Target::Unix(socket(home)), token).expect("a client")
}
