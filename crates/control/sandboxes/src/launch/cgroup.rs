//! Limits on the host memory of single VMs, by cgroup v2.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use forkd_types::SandboxId;

const MOUNT: &str = "/sys/fs/cgroup";
/// Where the unit puts the daemon (`DelegateSubgroup=`): a group with limits for others holds no process.
const OWN: &str = "daemon";
/// Where the groups of VMs are.
const VMS: &str = "vm";

/// How long the kernel may take to empty a group.
const GONE: Duration = Duration::from_secs(5);
/// How long to wait between two attempts.
const AGAIN: Duration = Duration::from_millis(5);

/// The groups of VMs. Nothing is made before a limit is asked for.
#[derive(Debug, Default)]
pub struct Cgroups {
    root: OnceLock<Option<PathBuf>>,
}

impl Cgroups {
    /// Puts a VMM under a limit and says which one holds: `None` where limits cannot be set.
    pub fn limit(&self, id: &SandboxId, pid: u32, mib: Option<u64>) -> Option<u64> {
        let mib = mib?;
        let root = self.root.get_or_init(|| match prepare() {
            Ok(root) => Some(root),
            Err(error) => {
                tracing::warn!(%error, "limits on the memory of sandboxes cannot be set here and are not kept");
                None
            }
        });
        let leaf = root.as_ref()?.join(id.as_str());
        match confine(&leaf, pid, mib) {
            Ok(()) => Some(mib),
            Err(error) => {
                tracing::warn!(sandbox = %id, %error, "no limit on its memory");
                let _ = fs::remove_dir(&leaf);
                None
            }
        }
    }

    /// Removes the group of a VM that has ended.
    pub fn remove(&self, id: &SandboxId) {
        let Some(Some(root)) = self.root.get() else {
            return;
        };
        let leaf = root.join(id.as_str());
        // Most have none. A process that was killed stays in its group until the kernel has taken its memory back.
        let end = Instant::now() + GONE;
        while let Err(error) = fs::remove_dir(&leaf) {
            if error.raw_os_error() != Some(rustix::io::Errno::BUSY.raw_os_error()) {
                return;
            }
            if Instant::now() > end {
                tracing::warn!(sandbox = %id, %error, "its group stays");
                return;
            }
            std::thread::sleep(AGAIN);
        }
    }

    /// Removes what an earlier daemon left for VMs that are gone.
    pub fn sweep(&self, live: &HashSet<String>) {
        let Ok(home) = home() else { return };
        let root = home.join(VMS);
        let Ok(entries) = fs::read_dir(&root) else {
            return;
        };
        let _ = self.root.set(Some(root));
        for entry in entries.filter_map(Result::ok) {
            let known = entry
                .file_name()
                .to_str()
                .is_some_and(|name| live.contains(name));
            if !known && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                let _ = fs::remove_dir(entry.path());
            }
        }
    }
}

/// The group below which ours are: the one that the unit delegates, else one at the top.
fn home() -> io::Result<PathBuf> {
    let text = fs::read_to_string("/proc/self/cgroup")?;
    home_of(&text).ok_or_else(|| io::Error::other("this host has no cgroup v2"))
}

fn home_of(text: &str) -> Option<PathBuf> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let own = Path::new(MOUNT).join(path);
    Some(match own.parent() {
        Some(unit) if own.ends_with(OWN) => unit.to_path_buf(),
        _ => Path::new(MOUNT).join("forkd"),
    })
}

fn prepare() -> io::Result<PathBuf> {
    let home = home()?;
    let root = home.join(VMS);
    fs::create_dir_all(&root)?;
    for group in [home.parent().unwrap_or(&home), &home, &root] {
        let control = group.join("cgroup.subtree_control");
        if !fs::read_to_string(&control)?.contains("memory") {
            fs::write(&control, "+memory")?;
        }
    }
    Ok(root)
}

fn confine(leaf: &Path, pid: u32, mib: u64) -> io::Result<()> {
    fs::create_dir(leaf)?;
    let bytes = mib.saturating_mul(1024 * 1024);
    fs::write(leaf.join("memory.max"), bytes.to_string())?;
    // A limit that swap gets around is none. Hosts without swap have no such file.
    let _ = fs::write(leaf.join("memory.swap.max"), "0");
    fs::write(leaf.join("cgroup.procs"), pid.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn home_is_what_was_delegated_and_never_a_group_with_processes() {
        let found = |text| home_of(text).unwrap().display().to_string();
        assert_eq!(found("0::/\n"), "/sys/fs/cgroup/forkd");
        assert_eq!(
            found("1:name=x:/\n0::/user.slice/session-1.scope\n"),
            "/sys/fs/cgroup/forkd"
        );
        assert_eq!(
            found("0::/system.slice/forkd.service/daemon"),
            "/sys/fs/cgroup/system.slice/forkd.service"
        );
        assert_eq!(home_of("1:name=systemd:/x\n"), None);
    }

    #[test]
    fn without_a_limit_nothing_is_made() {
        let groups = Cgroups::default();
        assert_eq!(groups.limit(&SandboxId::from_parts(1, 2), 1, None), None);
        assert!(groups.root.get().is_none());
    }
}
