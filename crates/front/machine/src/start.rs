//! Starts a machine, or confirms that it runs.
//!
//! A start holds the lock, prepares image, disks and token, launches QEMU, waits for the agent, copies the
//! programs and starts the daemon. The record gets its `boot_ms` last: a record without it marks an
//! interrupted start, which the next start completes.

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use forkd_types::MiB;
use serde::Serialize;

use crate::accel::{self, AccelChoice};
use crate::clock::Clock;
use crate::error::{MachineError, file};
use crate::image::Image;
use crate::machine::{Machine, kill};
use crate::progress::{Progress, Step};
use crate::qemu::{self, AGENT_PORT, API_PORT, Launch, Qemu};
use crate::qmp::{Forward, Qmp};
use crate::record::Record;
use crate::session::Session;
use crate::{disk, seed, transfer};

/// Size of a new data disk. The file is sparse.
const DEFAULT_DISK: MiB = MiB(20 * 1024);
const MIN_MEMORY: MiB = MiB(2 * 1024);
const MAX_DEFAULT_MEMORY: MiB = MiB(8 * 1024);
const MAX_DEFAULT_CPUS: u32 = 8;
/// Default port of the host for the daemon in the machine.
pub const DEFAULT_API_PORT: u16 = 8889;
/// Timeout for the first answer. An idle host needs seconds; an emulated machine on a loaded host is slow.
const BOOT_LIMIT: Duration = Duration::from_secs(600);
/// Interval of progress reports during a long boot.
const PATIENCE: Duration = Duration::from_secs(20);
/// Timeout for a machine that has answered before.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
/// How long a killed QEMU may take to give its memory back.
const ENDING_LIMIT: Duration = Duration::from_secs(5);

/// Parameters of a start. Missing values have defaults.
#[derive(Debug, Clone, Default)]
pub struct StartOptions {
    pub cpus: Option<u32>,
    pub memory: Option<MiB>,
    pub disk: Option<MiB>,
    pub accel: AccelChoice,
    /// `None` is the host's clock for a new machine, and any clock for a running one.
    pub clock: Option<Clock>,
    /// Port of 127.0.0.1 for the daemon in the machine; 0 lets QEMU choose one.
    pub api_port: Option<u16>,
}

/// A machine that runs and answers.
#[derive(Debug, Clone, Serialize)]
pub struct Started {
    /// The machine ran before this start.
    pub already_running: bool,
    /// Port of 127.0.0.1 for the daemon in the machine.
    pub api_port: u16,
    /// Milliseconds from the start of QEMU to the first answer.
    pub boot_ms: Option<u64>,
    /// Names of the programs that were copied.
    pub programs: Vec<String>,
    /// Whether the daemon in the machine runs.
    pub daemon: bool,
    /// Requested settings that need a restart of the machine.
    pub ignored: Vec<String>,
}

impl Machine {
    /// Starts the machine and returns when it answers. Leaves a running machine as it is.
    ///
    /// Dropping the future ends a machine that has not answered yet.
    pub async fn start(
        &self,
        options: &StartOptions,
        progress: &dyn Progress,
    ) -> Result<Started, MachineError> {
        self.layout.create()?;
        let _lock = self.lock(progress).await?;
        let live = self.live_record()?;
        let mut started = match live {
            Some(record) if !self.is_ending(&record)? => {
                self.find_running(record, options, progress).await?
            }
            _ => {
                self.clear_remains()?;
                self.boot(options, progress).await?
            }
        };
        let renewed = started
            .programs
            .iter()
            .any(|name| name == "forkd-controller");
        started.daemon = self.ensure_daemon(renewed, progress).await?;
        Ok(started)
    }

    /// Whether QEMU was killed and is not gone yet: it does not answer, and its process ends shortly after.
    fn is_ending(&self, record: &Record) -> Result<bool, MachineError> {
        if Qmp::connect(&self.layout.qmp()).is_ok() {
            return Ok(false);
        }
        let ended = record.qemu.handle().and_then(|handle| match handle {
            Some(handle) => handle.wait(ENDING_LIMIT),
            None => Ok(true),
        });
        ended.map_err(file("wait for the process of", &self.layout.pid_file()))
    }

    async fn find_running(
        &self,
        mut record: Record,
        options: &StartOptions,
        progress: &dyn Progress,
    ) -> Result<Started, MachineError> {
        self.resume_if_paused(progress)?;
        let limit = if record.boot_ms.is_some() {
            ANSWER_LIMIT
        } else {
            BOOT_LIMIT
        };
        self.await_agent(&record, limit, progress).await?;
        let programs = if record.boot_ms.is_some() {
            self.sync(progress).await?
        } else {
            let took = unix_ms().saturating_sub(record.started_unix_ms);
            self.prepare(&mut record, Duration::from_millis(took), progress)
                .await?
        };
        Ok(Started {
            already_running: true,
            api_port: record.api_port,
            boot_ms: record.boot_ms,
            programs,
            daemon: false,
            ignored: differences(&record, options),
        })
    }

    /// QEMU pauses a VM if the host's disk is full. The VM can resume when there is space again.
    fn resume_if_paused(&self, progress: &dyn Progress) -> Result<(), MachineError> {
        let path = self.layout.qmp();
        let qmp_error = |source| MachineError::Qmp {
            path: path.clone(),
            source,
        };
        let mut qmp = Qmp::connect(&path)?;
        if qmp.status().map_err(qmp_error)? == "running" {
            return Ok(());
        }
        disk::check_room(&self.layout.data_disk())?;
        qmp.resume().map_err(qmp_error)?;
        progress.step(&Step::Resumed);
        Ok(())
    }

    async fn boot(
        &self,
        options: &StartOptions,
        progress: &dyn Progress,
    ) -> Result<Started, MachineError> {
        let clock = options.clock.unwrap_or_default();
        let accel_choice = clock.check(options.accel, options.cpus)?;
        let qemu = Qemu::find(&self.dirs)?;
        let wanted_port = options.api_port.unwrap_or(DEFAULT_API_PORT);
        check_port(wanted_port)?;
        let (accel, accel_reason) = accel::choose(accel_choice, forkd_probe::probe)?;
        progress.step(&Step::Image);
        let image = Image::ensure(progress).await?;
        progress.step(&Step::Disk);
        let disk = disk::ensure(&self.layout.data_disk(), options.disk, DEFAULT_DISK)?;
        transfer::create_disk(&self.layout.transfer_disk())?;
        let token = seed::new_token();
        seed::write_token(&self.layout.token(), &token)?;
        seed::write_initrd(&image.initramfs, &token, &self.layout.initrd())?;

        let launch = Launch {
            name: &self.name,
            layout: &self.layout,
            image: &image,
            accel,
            clock,
            cpus: options.cpus.unwrap_or_else(|| default_cpus(accel)),
            memory: options.memory.unwrap_or_else(default_memory),
            api_port: wanted_port,
        };
        progress.step(&Step::Booting {
            expectation: accel.expectation(),
        });
        let guard = BootGuard {
            machine: self,
            armed: true,
        };
        let begin = Instant::now();
        let started_unix_ms = unix_ms();
        let process = qemu::launch(&qemu, &launch)?;
        let (api_port, agent_port) = self.ports()?;
        let mut record = Record {
            schema: Record::SCHEMA,
            instance: seed::new_token(),
            qemu: process,
            qemu_version: qemu.version,
            accel,
            accel_reason,
            clock,
            cpus: launch.cpus,
            memory: launch.memory,
            disk,
            api_port,
            agent_port,
            image: image.version.clone(),
            started_unix_ms,
            boot_ms: None,
        };
        record.write(&self.layout.record())?;
        self.await_agent(&record, BOOT_LIMIT, progress).await?;
        let took = begin.elapsed();
        progress.step(&Step::Answered { after: took });
        let programs = self.prepare(&mut record, took, progress).await?;
        guard.disarm();
        Ok(Started {
            already_running: false,
            api_port,
            boot_ms: record.boot_ms,
            programs,
            daemon: false,
            ignored: Vec::new(),
        })
    }

    /// Prepares a machine after its first answer. Stores `boot_ms` at the end, so that the next start repeats
    /// an interrupted preparation.
    async fn prepare(
        &self,
        record: &mut Record,
        took: Duration,
        progress: &dyn Progress,
    ) -> Result<Vec<String>, MachineError> {
        let ((), programs) = tokio::try_join!(self.open_port(), self.sync(progress))?;
        record.boot_ms = Some(u64::try_from(took.as_millis()).unwrap_or(u64::MAX));
        record.write(&self.layout.record())?;
        Ok(programs)
    }

    /// The host ports that QEMU has bound: daemon, then agent.
    fn ports(&self) -> Result<(u16, u16), MachineError> {
        let path = self.layout.qmp();
        let forwards = Qmp::connect(&path)?
            .forwards()
            .map_err(|source| MachineError::Qmp {
                path: path.clone(),
                source,
            })?;
        let host_port = |guest: u16| {
            forwards
                .iter()
                .find(|Forward { guest_port, .. }| *guest_port == guest)
                .map(|forward| forward.host_port)
                .ok_or_else(|| MachineError::QemuFailed {
                    message: format!("no host port leads to port {guest}"),
                })
        };
        Ok((host_port(API_PORT)?, host_port(AGENT_PORT)?))
    }

    /// Waits until the agent answers. QEMU accepts connections before the machine does, so each attempt has a
    /// timeout of its own.
    async fn await_agent(
        &self,
        record: &Record,
        limit: Duration,
        progress: &dyn Progress,
    ) -> Result<Session, MachineError> {
        const FIRST_ATTEMPT: Duration = Duration::from_secs(1);
        const LAST_ATTEMPT: Duration = Duration::from_secs(10);
        let token = seed::read_token(&self.layout.token())?;
        let begin = Instant::now();
        let mut told = begin;
        let mut pace = tokio::time::interval(Duration::from_millis(100));
        pace.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            pace.tick().await;
            if !record.qemu.is_alive() {
                return Err(MachineError::DiedBooting {
                    console: self.layout.console(),
                });
            }
            // A connection made too early hangs, and an answer takes long on a loaded host.
            let attempt = (FIRST_ATTEMPT + begin.elapsed() / 10).min(LAST_ATTEMPT);
            match Session::open(record.agent_port, &token, attempt).await {
                Ok(session) => return Ok(session),
                Err(_) if begin.elapsed() < limit => {
                    if told.elapsed() >= PATIENCE {
                        told = Instant::now();
                        progress.step(&Step::StillBooting {
                            after: begin.elapsed(),
                        });
                    }
                }
                Err(_) => {
                    return Err(MachineError::NoAnswer {
                        waited: limit,
                        console: self.layout.console(),
                    });
                }
            }
        }
    }
}

/// Ends a machine whose start was abandoned.
struct BootGuard<'a> {
    machine: &'a Machine,
    armed: bool,
}

impl BootGuard<'_> {
    fn disarm(mut self) {
        self.armed = false;
    }
}

impl Drop for BootGuard<'_> {
    fn drop(&mut self) {
        if self.armed {
            if let Some(process) = qemu::running(&self.machine.layout) {
                let _ = kill(&process);
            }
            let _ = self.machine.clear_remains();
        }
    }
}

/// Requested settings that differ from those of the running machine.
fn differences(record: &Record, options: &StartOptions) -> Vec<String> {
    let mut found = Vec::new();
    let mut note = |differs: bool, text: String| {
        if differs {
            found.push(text);
        }
    };
    if let Some(cpus) = options.cpus {
        note(
            cpus != record.cpus,
            format!("--cpus {cpus} (it has {})", record.cpus),
        );
    }
    if let Some(memory) = options.memory {
        note(
            memory != record.memory,
            format!("--memory {memory} (it has {})", record.memory),
        );
    }
    if let Some(disk) = options.disk {
        note(
            disk != record.disk,
            format!("--disk {disk} (it has {})", record.disk),
        );
    }
    if let Some(port) = options.api_port.filter(|port| *port != 0) {
        note(
            port != record.api_port,
            format!("--port {port} (it has {})", record.api_port),
        );
    }
    if let Some(clock) = options.clock {
        note(
            clock != record.clock,
            format!("--clock {clock} (it has {})", record.clock),
        );
    }
    let wanted = match options.accel {
        AccelChoice::Auto => None,
        AccelChoice::Kvm => Some(accel::Accel::Kvm),
        AccelChoice::Tcg => Some(accel::Accel::Tcg),
    };
    if let Some(wanted) = wanted {
        note(
            wanted != record.accel,
            format!("--accel {wanted} (it has {})", record.accel),
        );
    }
    found
}

/// Reports a busy port before the image is built; QEMU would report it afterwards.
fn check_port(port: u16) -> Result<(), MachineError> {
    match TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            Err(MachineError::PortInUse { port })
        }
        _ => Ok(()),
    }
}

/// An emulated machine has one CPU: with two, QEMU's nested SVM mixes up the registers of host and guest
/// every few minutes, and the machine or a guest in it dies.
fn default_cpus(accel: accel::Accel) -> u32 {
    if accel == accel::Accel::Tcg {
        return 1;
    }
    let host = std::thread::available_parallelism().map_or(2, |count| count.get() as u32);
    host.clamp(2, MAX_DEFAULT_CPUS)
}

/// Half of the host's memory, within limits.
fn default_memory() -> MiB {
    let half = rustix::system::sysinfo().totalram / (2 * 1024 * 1024);
    MiB(u32::try_from(half).unwrap_or(u32::MAX)).clamp(MIN_MEMORY, MAX_DEFAULT_MEMORY)
}

pub(crate) fn unix_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| {
            u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_port_is_seen_before_anything_is_built() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(matches!(
            check_port(port),
            Err(MachineError::PortInUse { .. })
        ));
        drop(listener);
        assert!(check_port(port).is_ok());
        assert!(check_port(0).is_ok());
    }
}
