//! What goes wrong on a host, made to happen.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::ensure;
use rustix::process::{Pid, Signal, kill_process};

use crate::procfs;

/// Kills what a VMM starts.
pub struct Killer {
    done: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<()>,
}

impl Killer {
    /// Waits for the next process of that VMM, lets it live for `delay`, and kills it.
    pub fn start(vmm: u32, delay: Duration) -> Self {
        let done = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&done);
        let thread = std::thread::spawn(move || {
            while !seen.load(Ordering::Relaxed) {
                if let Some(writer) = procfs::started_by(vmm).first() {
                    std::thread::sleep(delay);
                    // It may have ended by itself.
                    let _ = Pid::from_raw(writer.cast_signed())
                        .map(|pid| kill_process(pid, Signal::KILL));
                    return;
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        Self { done, thread }
    }

    /// Ends the wait.
    pub fn stop(self) -> anyhow::Result<()> {
        self.done.store(true, Ordering::Relaxed);
        self.thread
            .join()
            .map_err(|_| anyhow::anyhow!("the killer panicked"))
    }
}

/// A file system of a few MiB.
pub struct SmallDisk {
    /// Where it is mounted.
    pub folder: PathBuf,
}

impl SmallDisk {
    /// Mounts a new one.
    pub fn mount(folder: PathBuf, mib: u32) -> anyhow::Result<Self> {
        let size = format!("size={mib}M");
        run("mount", &["-t", "tmpfs", "-o", &size, "tmpfs"], &folder)?;
        Ok(Self { folder })
    }

    /// Makes it larger, or smaller.
    pub fn resize(&self, mib: u32) -> anyhow::Result<()> {
        let size = format!("remount,size={mib}M");
        run("mount", &["-o", &size], &self.folder)
    }

    /// Removes it. Fails if somebody still has a file of it open.
    pub fn remove(self) -> anyhow::Result<()> {
        run("umount", &[], &self.folder)?;
        std::fs::remove_dir(&self.folder)?;
        Ok(())
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        if self.folder.exists() {
            // An error is on its way already.
            let _ = run("umount", &["--lazy"], &self.folder);
        }
    }
}

fn run(program: &str, args: &[&str], folder: &Path) -> anyhow::Result<()> {
    let status = Command::new(program).args(args).arg(folder).status()?;
    ensure!(status.success(), "`{program}` ended with {status}");
    Ok(())
}
