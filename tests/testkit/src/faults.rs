//! Injects faults of a host: killed writers, and a full disk.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::ensure;
use rustix::process::{Pid, Signal, kill_process};

use crate::procfs;

/// Kills processes that a VMM starts.
pub struct Killer {
    done: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<()>,
}

impl Killer {
    /// Waits for the next child process of the VMM, waits for `delay`, and kills the process.
    pub fn start(vmm: u32, delay: Duration) -> Self {
        let done = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&done);
        let thread = std::thread::spawn(move || {
            while !seen.load(Ordering::Relaxed) {
                if let Some(writer) = procfs::started_by(vmm).first() {
                    std::thread::sleep(delay);
                    // The process may have ended by itself.
                    let _ = Pid::from_raw(writer.cast_signed())
                        .map(|pid| kill_process(pid, Signal::KILL));
                    return;
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        Self { done, thread }
    }

    /// Stops waiting for a child process.
    pub fn stop(self) -> anyhow::Result<()> {
        self.done.store(true, Ordering::Relaxed);
        self.thread
            .join()
            .map_err(|_| anyhow::anyhow!("the killer panicked"))
    }
}

/// A file system of a few MiB.
pub struct SmallDisk {
    /// The mount point.
    pub folder: PathBuf,
}

impl SmallDisk {
    /// Mounts a new file system.
    pub fn mount(folder: PathBuf, mib: u32) -> anyhow::Result<Self> {
        let size = format!("size={mib}M");
        run("mount", &["-t", "tmpfs", "-o", &size, "tmpfs"], &folder)?;
        Ok(Self { folder })
    }

    /// Changes the size of the file system.
    pub fn resize(&self, mib: u32) -> anyhow::Result<()> {
        let size = format!("remount,size={mib}M");
        run("mount", &["-o", &size], &self.folder)
    }

    /// Unmounts the file system. Fails if a process has a file of it open.
    pub fn remove(self) -> anyhow::Result<()> {
        run("umount", &[], &self.folder)?;
        std::fs::remove_dir(&self.folder)?;
        Ok(())
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        if self.folder.exists() {
            // The test fails already with the first error.
            let _ = run("umount", &["--lazy"], &self.folder);
        }
    }
}

fn run(program: &str, args: &[&str], folder: &Path) -> anyhow::Result<()> {
    let status = Command::new(program).args(args).arg(folder).status()?;
    ensure!(status.success(), "`{program}` ended with {status}");
    Ok(())
}
