//! A cgroup for every VM, by cgroup v2.
//!
//! ```text
//!   home            the group that the unit delegates, else `forkd` at the top
//!     vm
//!       3f0a…       one per `forkd-spawn`, named after its socket
//!         1, 2 …    one leaf per VM: the VMM and the writers it forks
//! ```
//!
//! A leaf is made with its shell, so that nothing of it is on the path of a fork. It is killed and removed with its VM.
//! Leaves that an earlier `forkd-spawn` of the same socket left are killed at start: nothing of it may live on.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use forkd_vmm_proto::spawn::{Limits, MAX_CPU_WEIGHT, MAX_IO_LIMITS, SpawnError, Wall, Walls};
use rustix::io::Errno;

/// Where cgroup v2 is mounted, alone or beside cgroup v1.
const MOUNTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
/// Where the unit puts the daemon (`DelegateSubgroup=`): a group with limits for others holds no process.
const OWN: &str = "daemon";
/// The group below which the groups of VMs are.
const VMS: &str = "vm";
/// The period over which CPU time is limited, in microseconds.
const CPU_PERIOD: u64 = 100_000;

/// The groups of VMs.
#[derive(Debug)]
pub struct Cgroups {
    root: PathBuf,
    walls: Walls,
    next: u64,
}

/// The group of one VM.
#[derive(Debug)]
pub struct Leaf {
    path: PathBuf,
}

impl Cgroups {
    /// Makes the group of the `forkd-spawn` that listens on `socket`, and the leaves that an earlier one left.
    pub fn open(socket: &Path) -> io::Result<(Self, Vec<Leaf>)> {
        let own = fs::read_to_string("/proc/self/cgroup")?;
        let mount = MOUNTS
            .iter()
            .map(Path::new)
            .find(|mount| mount.join("cgroup.controllers").exists())
            .ok_or_else(|| io::Error::other("cgroup v2 is not mounted"))?;
        let home = home_of(mount, &own)
            .ok_or_else(|| io::Error::other("this process has no cgroup v2"))?;
        Self::below(&home, &group_name(socket))
    }

    fn below(home: &Path, name: &str) -> io::Result<(Self, Vec<Leaf>)> {
        let root = home.join(VMS).join(name);
        fs::create_dir_all(&root)?;
        let mut walls = Walls::empty();
        walls.insert(Wall::Cgroup);
        let above = home.parent().unwrap_or(home);
        for (controller, wall) in [
            ("memory", Wall::Memory),
            ("cpu", Wall::Cpu),
            ("io", Wall::Io),
            ("pids", Wall::Pids),
        ] {
            let groups = [above, home, &home.join(VMS), &root];
            if groups.iter().all(|group| enable(group, controller).is_ok()) {
                walls.insert(wall);
            }
        }
        let cgroups = Self {
            root,
            walls,
            next: 1,
        };
        let left = cgroups.left()?;
        Ok((cgroups, left))
    }

    /// The leaves of VMs that an earlier `forkd-spawn` of this socket started, all killed.
    fn left(&self) -> io::Result<Vec<Leaf>> {
        let mut left = Vec::new();
        for entry in fs::read_dir(&self.root)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                let leaf = Leaf { path: entry.path() };
                leaf.kill();
                left.push(leaf);
            }
        }
        Ok(left)
    }

    /// The folder that holds the leaves.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The walls that stand here.
    pub fn walls(&self) -> Walls {
        self.walls
    }

    /// Why a wall that these groups could be does not stand.
    pub fn why_missing(&self, wall: Wall) -> String {
        let controller = wall.name();
        format!(
            "the cgroup v2 controller {controller} cannot be used in {}: delegate it to forkd (systemd: Delegate={controller}), or mount it as cgroup v2",
            self.root.display()
        )
    }

    /// Makes a leaf and puts a new VMM into it. `threads` is the number of threads and processes that the VMM needs.
    pub fn leaf(&mut self, pid: u32, threads: u32) -> io::Result<Leaf> {
        let path = loop {
            let path = self.root.join(self.next.to_string());
            self.next += 1;
            match fs::create_dir(&path) {
                Ok(()) => break path,
                // One that an earlier process left and the kernel has not emptied yet.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        };
        let leaf = Leaf { path };
        let filled = self.fill(&leaf, pid, threads);
        if let Err(error) = filled {
            leaf.remove();
            return Err(error);
        }
        Ok(leaf)
    }

    fn fill(&self, leaf: &Leaf, pid: u32, threads: u32) -> io::Result<()> {
        if self.walls.contains(Wall::Memory) {
            // A VMM without its writer, or the other way round, is of no use.
            leaf.write("memory.oom.group", "1")?;
        }
        if self.walls.contains(Wall::Pids) {
            leaf.write("pids.max", &threads.to_string())?;
        }
        leaf.write("cgroup.procs", &pid.to_string())
    }
}

impl Leaf {
    /// Sets limits that [`Limits::walls`] and [`check`] allow. A limit that is missing is lifted.
    pub fn set(&self, limits: &Limits, walls: Walls, threads: u32) -> Result<(), SpawnError> {
        for (wall, file, value) in self.values(limits, threads) {
            if !walls.contains(wall) {
                continue;
            }
            self.write(file, &value)
                .map_err(|error| SpawnError::NoWall {
                    wall: wall.to_string(),
                    reason: format!("{file}: {error}"),
                })?;
        }
        Ok(())
    }

    /// Each file and what it has to hold.
    fn values(&self, limits: &Limits, threads: u32) -> Vec<(Wall, &'static str, String)> {
        let or_max = |value: Option<u64>| value.map_or("max".to_owned(), |value| value.to_string());
        let memory = or_max(limits.memory_bytes);
        // A maximum below the use of the group may kill it. Reaching `memory.high` only makes the kernel reclaim, so it
        // comes first and gives caches back.
        let mut values = vec![
            (Wall::Memory, "memory.high", memory.clone()),
            (Wall::Memory, "memory.max", memory),
            (Wall::Memory, "memory.high", "max".to_owned()),
        ];
        // Swap would get around the limit. A kernel without swap has no such file.
        if self.path.join("memory.swap.max").exists() {
            let swap = limits.memory_bytes.map(|_| 0);
            values.push((Wall::Memory, "memory.swap.max", or_max(swap)));
        }
        let quota = limits
            .cpu_millis
            .map(|millis| u64::from(millis) * CPU_PERIOD / 1000);
        let quota = format!("{} {CPU_PERIOD}", or_max(quota));
        values.push((Wall::Cpu, "cpu.max", quota));
        let weight = limits.cpu_weight.unwrap_or(100);
        values.push((Wall::Cpu, "cpu.weight", weight.to_string()));
        for io in &limits.io {
            let line = format!(
                "{}:{} rbps={} wbps={} riops={} wiops={}",
                io.major,
                io.minor,
                or_max(io.read_bytes),
                or_max(io.write_bytes),
                or_max(io.read_ops),
                or_max(io.write_ops)
            );
            values.push((Wall::Io, "io.max", line));
        }
        for device in self.limited_devices(limits) {
            let line = format!("{device} rbps=max wbps=max riops=max wiops=max");
            values.push((Wall::Io, "io.max", line));
        }
        let pids = limits.pids.unwrap_or(threads);
        values.push((Wall::Pids, "pids.max", pids.to_string()));
        values
    }

    /// Devices that have a limit now and none in `limits`.
    fn limited_devices(&self, limits: &Limits) -> Vec<String> {
        let text = fs::read_to_string(self.path.join("io.max")).unwrap_or_default();
        text.lines()
            .filter_map(|line| line.split_whitespace().next())
            .filter(|device| {
                !limits
                    .io
                    .iter()
                    .any(|io| format!("{}:{}", io.major, io.minor) == **device)
            })
            .map(str::to_owned)
            .collect()
    }

    /// Kills every process in it. Kernels before 5.14 cannot; there the VMM alone is killed, by its pidfd.
    pub fn kill(&self) {
        let _ = self.write("cgroup.kill", "1");
    }

    /// Removes it; false while the kernel still has a process in it.
    pub fn remove(&self) -> bool {
        match fs::remove_dir(&self.path) {
            Err(error) => error.raw_os_error() != Some(Errno::BUSY.raw_os_error()),
            Ok(()) => true,
        }
    }

    fn write(&self, file: &str, value: &str) -> io::Result<()> {
        // Not created: on anything but a cgroup file system this must fail.
        let mut opened = fs::OpenOptions::new()
            .write(true)
            .open(self.path.join(file))?;
        io::Write::write_all(&mut opened, value.as_bytes())
    }
}

/// Refuses limits that are out of range.
pub fn check(limits: &Limits) -> Result<(), SpawnError> {
    let out_of_range = |what: &str, value: u64, limit: u64| {
        Err(SpawnError::OutOfRange {
            what: what.to_owned(),
            value,
            limit,
        })
    };
    match limits.cpu_weight {
        Some(weight) if weight == 0 || weight > MAX_CPU_WEIGHT => {
            return out_of_range("the CPU weight", weight.into(), MAX_CPU_WEIGHT.into());
        }
        _ => {}
    }
    if limits.io.len() > MAX_IO_LIMITS {
        return out_of_range(
            "the number of limited devices",
            limits.io.len() as u64,
            MAX_IO_LIMITS as u64,
        );
    }
    Ok(())
}

/// Lets the groups below `group` use a controller.
fn enable(group: &Path, controller: &str) -> io::Result<()> {
    let file = group.join("cgroup.subtree_control");
    let enabled = fs::read_to_string(&file)?;
    if enabled.split_whitespace().any(|name| name == controller) {
        return Ok(());
    }
    fs::write(&file, format!("+{controller}"))
}

/// The group below which ours are: the one that the unit delegates, else one at the top.
fn home_of(mount: &Path, own: &str) -> Option<PathBuf> {
    let path = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let own = mount.join(path);
    Some(match own.parent() {
        Some(unit) if own.ends_with(OWN) => unit.to_path_buf(),
        _ => mount.join("forkd"),
    })
}

/// A name that another `forkd-spawn` on this host does not have.
fn group_name(socket: &Path) -> String {
    format!("{:016x}", group_number(socket))
}

/// A number that another `forkd-spawn` on this host does not have: FNV-1a of the socket's path.
pub fn group_number(socket: &Path) -> u64 {
    socket
        .as_os_str()
        .as_encoded_bytes()
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        })
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use forkd_vmm_proto::spawn::IoLimit;

    use super::*;

    #[test]
    fn home_is_what_was_delegated_and_never_a_group_with_processes() {
        let mount = Path::new("/sys/fs/cgroup");
        let found = |text| home_of(mount, text).unwrap().display().to_string();
        assert_eq!(found("0::/\n"), "/sys/fs/cgroup/forkd");
        assert_eq!(
            found("1:name=x:/\n0::/user.slice/session-1.scope\n"),
            "/sys/fs/cgroup/forkd"
        );
        assert_eq!(
            found("0::/system.slice/forkd.service/daemon"),
            "/sys/fs/cgroup/system.slice/forkd.service"
        );
        assert_eq!(home_of(mount, "1:name=systemd:/x\n"), None);
    }

    /// A directory with the files that a leaf has, in place of a kernel.
    fn pretended_leaf(dir: &Path) -> Leaf {
        for file in [
            "memory.high",
            "memory.max",
            "memory.swap.max",
            "cpu.max",
            "cpu.weight",
            "pids.max",
        ] {
            fs::write(dir.join(file), "").unwrap();
        }
        fs::write(dir.join("io.max"), "8:16 rbps=1\n").unwrap();
        Leaf {
            path: dir.to_owned(),
        }
    }

    #[test]
    fn limits_become_the_kernels_words_and_are_lifted_again() {
        let dir = tempfile::tempdir().unwrap();
        let leaf = pretended_leaf(dir.path());
        let has = |file: &str| fs::read_to_string(dir.path().join(file)).unwrap();
        let limits = Limits {
            memory_bytes: Some(1 << 30),
            cpu_millis: Some(1500),
            cpu_weight: Some(7),
            io: vec![],
            pids: None,
        };
        leaf.set(&limits, Walls::all(), 20).unwrap();
        assert_eq!(has("memory.max"), "1073741824");
        let high: Vec<String> = leaf
            .values(&limits, 20)
            .into_iter()
            .filter(|(_, file, _)| *file == "memory.high")
            .map(|(_, _, value)| value)
            .collect();
        assert_eq!(high, ["1073741824", "max"], "reclaimed first, then lifted");
        assert_eq!(has("memory.swap.max"), "0");
        assert_eq!(has("cpu.max"), "150000 100000");
        assert_eq!(has("cpu.weight"), "7");
        assert_eq!(has("pids.max"), "20");
    }

    #[test]
    fn a_device_whose_limit_is_gone_is_set_free() {
        let dir = tempfile::tempdir().unwrap();
        let leaf = pretended_leaf(dir.path());
        let limits = Limits {
            io: vec![IoLimit {
                major: 8,
                minor: 0,
                write_bytes: Some(5),
                ..IoLimit::default()
            }],
            ..Limits::default()
        };
        let lines: Vec<String> = leaf
            .values(&limits, 1)
            .into_iter()
            .filter(|(_, file, _)| *file == "io.max")
            .map(|(_, _, line)| line)
            .collect();
        assert_eq!(
            lines,
            [
                "8:0 rbps=max wbps=5 riops=max wiops=max",
                "8:16 rbps=max wbps=max riops=max wiops=max"
            ]
        );
    }

    #[test]
    fn a_limit_that_the_kernel_does_not_take_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let leaf = Leaf {
            path: dir.path().to_owned(),
        };
        let limits = Limits {
            memory_bytes: Some(1),
            ..Limits::default()
        };
        let refused = leaf.set(&limits, limits.walls(), 1);
        assert!(
            matches!(refused, Err(SpawnError::NoWall { .. })),
            "{refused:?}"
        );
        // Nothing is created in place of a kernel's file.
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn nonsense_is_refused() {
        for weight in [0, MAX_CPU_WEIGHT + 1] {
            let limits = Limits {
                cpu_weight: Some(weight),
                ..Limits::default()
            };
            assert!(check(&limits).is_err());
        }
        let limits = Limits {
            io: vec![IoLimit::default(); MAX_IO_LIMITS + 1],
            ..Limits::default()
        };
        assert!(check(&limits).is_err());
        assert!(check(&Limits::default()).is_ok());
    }

    /// On a host whose cgroups this process may change; elsewhere there is no leaf to test.
    #[test]
    fn a_leaf_is_killed_as_a_whole_and_a_later_start_kills_what_is_left() {
        let socket = PathBuf::from(format!("/test/{}", std::process::id()));
        let Ok((mut cgroups, left)) = Cgroups::open(&socket) else {
            return;
        };
        assert!(left.is_empty());
        assert!(cgroups.walls().contains(Wall::Cgroup));
        let start = || {
            // A child of the process in the group: it has to go as well.
            let mut child = std::process::Command::new("/bin/sh")
                .args(["-c", "read go; sleep 1000 & echo; wait"])
                .stdin(std::process::Stdio::piped())
                .stdout(std::process::Stdio::piped())
                .spawn()
                .unwrap();
            (
                child.stdin.take().unwrap(),
                child.stdout.take().unwrap(),
                child,
            )
        };
        let run = |cgroups: &mut Cgroups| {
            let (mut input, mut output, child) = start();
            let leaf = cgroups.leaf(child.id(), 64).unwrap();
            io::Write::write_all(&mut input, b"go\n").unwrap();
            io::Read::read_exact(&mut output, &mut [0]).unwrap();
            (leaf, child, output)
        };
        let ended = |mut child: std::process::Child, mut output: std::process::ChildStdout| {
            assert_eq!(child.wait().unwrap().signal(), Some(9));
            // The pipe ends once the other process is gone, too.
            io::Read::read_to_end(&mut output, &mut Vec::new()).unwrap();
        };
        let (leaf, child, output) = run(&mut cgroups);
        assert!(!leaf.remove());
        leaf.kill();
        ended(child, output);
        while !leaf.remove() {
            std::thread::yield_now();
        }
        let (kept, child, output) = run(&mut cgroups);
        let (again, left) = Cgroups::open(&socket).unwrap();
        assert_eq!(left.len(), 1);
        ended(child, output);
        while !kept.remove() {
            std::thread::yield_now();
        }
        fs::remove_dir(again.root).unwrap();
    }
}
