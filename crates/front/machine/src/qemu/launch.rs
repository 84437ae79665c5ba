//! QEMU's command line and its start.
//!
//! [`launch`] returns when QEMU has opened its files, sockets and ports and runs in the background.
//! [`running`] finds that process again by the pid file.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use forkd_types::MiB;
use serde_json::json;

use super::Qemu;
use crate::accel::Accel;
use crate::clock::Clock;
use crate::error::MachineError;
use crate::image::Image;
use crate::layout::Layout;
use crate::name::MachineName;
use crate::process::ProcessIdentity;

/// Port of the agent inside the machine.
pub(crate) const AGENT_PORT: u16 = 1024;
/// Port of the daemon inside the machine.
pub(crate) const API_PORT: u16 = 8889;

/// `panic=-1` with `-no-reboot` ends QEMU when the kernel panics. A kernel whose CPUs stand still for a
/// minute panics: emulated CPUs were seen to take an interrupt with interrupts off and then to wait for a
/// lock that they hold.
const KERNEL_COMMAND_LINE: &str = "console=ttyS0 quiet panic=-1 softlockup_panic=1 \
    watchdog_thresh=30 forkd.role=machine tsc=reliable no_timer_check";

/// Added with the instruction clock. QEMU remembers the vector of an interrupt that it injected into a nested guest until
/// the next exit or exception of that guest. If a timer of the machine expires before, QEMU delivers the vector a second
/// time, whether or not the guest has interrupts off, and the guest hangs on a lock that it holds. Without
/// high-resolution timers the machine's timers expire at its ticks only. An injected timer interrupt follows a tick, and
/// the next tick is 4 ms later.
const COUNTING_COMMAND_LINE: &str = "highres=off";

/// The emulated CPU. A fifth level of page tables makes every walk longer, and a walk of a guest in the machine many
/// times longer, for nothing. Without `erms` and `fsrm` programs copy 8 bytes and more with each instruction: QEMU
/// emulates and counts every repetition of a string instruction, so that clearing a page with `rep stosb` takes 4,096.
const EMULATED_CPU: &str = "max,la57=off,erms=off,fsrm=off";

/// Everything that QEMU's command line depends on.
#[derive(Debug)]
pub struct Launch<'a> {
    pub name: &'a MachineName,
    pub layout: &'a Layout,
    pub image: &'a Image,
    pub accel: Accel,
    pub clock: Clock,
    pub cpus: u32,
    pub memory: MiB,
    /// Port of 127.0.0.1 for the daemon in the machine; 0 lets QEMU choose one.
    pub api_port: u16,
}

/// Starts QEMU in the background. Returns when QEMU has opened its files, sockets and ports.
pub fn launch(qemu: &Qemu, launch: &Launch<'_>) -> Result<ProcessIdentity, MachineError> {
    let log = launch.layout.qemu_log();
    let _ = fs::remove_file(&log);
    let output = Command::new(&qemu.program)
        .args(arguments(launch))
        // Sockets are named relative to it: an absolute path may be too long for an address.
        .current_dir(launch.layout.root())
        .stdin(Stdio::null())
        .output()
        .map_err(|error| MachineError::QemuFailed {
            message: error.to_string(),
        })?;
    if !output.status.success() {
        // Which of the two it complains to depends on how far it got.
        let mut said = String::from_utf8_lossy(&output.stderr).into_owned();
        said.push_str(&fs::read_to_string(&log).unwrap_or_default());
        return Err(explain(&said, launch.api_port));
    }
    running(launch.layout).ok_or_else(|| MachineError::DiedBooting {
        console: launch.layout.console(),
    })
}

/// The process in the pid file, if it is the QEMU of this machine.
pub fn running(layout: &Layout) -> Option<ProcessIdentity> {
    let pid = fs::read_to_string(layout.pid_file())
        .ok()?
        .trim()
        .parse()
        .ok()?;
    let identity = ProcessIdentity::of(pid)?;
    let marker = pid_file_marker(layout);
    identity
        .command_line()
        .contains(&marker)
        .then_some(identity)
}

/// The one argument that no other process has.
fn pid_file_marker(layout: &Layout) -> String {
    layout.pid_file().to_string_lossy().into_owned()
}

fn arguments(launch: &Launch<'_>) -> Vec<OsString> {
    let layout = launch.layout;
    let mut args: Vec<OsString> = Vec::new();
    let mut add = |words: &[&str]| args.extend(words.iter().map(OsString::from));
    add(&["-name", &format!("forkd-machine-{}", launch.name)]);
    add(&[
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-no-reboot",
        "-daemonize",
    ]);
    add(&[
        "-machine",
        "q35,vmport=off,smbus=off,sata=off,usb=off,graphics=off,hpet=off",
    ]);
    match (launch.accel, launch.clock) {
        (Accel::Kvm, _) => add(&["-accel", "kvm", "-cpu", "host"]),
        // One instruction counts 2 ns. `sleep=on` lets an idle machine wait in the host's time: without it the
        // clock jumps to the next timer, and every timeout of a waiting program expires at once.
        (Accel::Tcg, Clock::Instructions) => add(&[
            "-accel",
            "tcg,thread=single,tb-size=1024",
            "-cpu",
            EMULATED_CPU,
            "-icount",
            "shift=1,sleep=on",
        ]),
        // Room for translated code: with the default it is thrown away again and again.
        (Accel::Tcg, Clock::Host) => add(&[
            "-accel",
            "tcg,thread=multi,tb-size=1024",
            "-cpu",
            EMULATED_CPU,
        ]),
    }
    add(&[
        "-smp",
        &launch.cpus.to_string(),
        "-m",
        &format!("{}M", launch.memory.0),
    ]);
    add(&["-pidfile", &pid_file_marker(layout)]);
    add(&["-qmp", "unix:qmp.sock,server=on,wait=off"]);
    add(&["-serial", "file:console.log", "-D", "qemu.log"]);
    // Programs in the machine read the name of their clock from /proc/cmdline.
    let clock = launch.clock;
    let counting = match clock {
        Clock::Instructions => COUNTING_COMMAND_LINE,
        Clock::Host => "",
    };
    add(&[
        "-append",
        &format!("{KERNEL_COMMAND_LINE} {counting} forkd.clock={clock}"),
    ]);
    add(&["-netdev", &network(launch.api_port)]);
    add(&["-device", "virtio-net-pci,netdev=net,romfile="]);
    // Many machines may have the image open at once: no machine writes to it.
    add(&[
        "-blockdev",
        &disk("root", &launch.image.root, DiskUse::ReadOnly),
    ]);
    add(&["-device", "virtio-blk-pci,drive=root,serial=forkd-root"]);
    add(&[
        "-blockdev",
        &disk("data", &layout.data_disk(), DiskUse::ReadWrite),
    ]);
    add(&["-device", "virtio-blk-pci,drive=data,serial=forkd-data"]);
    add(&[
        "-blockdev",
        &disk("transfer", &layout.transfer_disk(), DiskUse::ReadOnly),
    ]);
    add(&[
        "-device",
        "virtio-blk-pci,drive=transfer,serial=forkd-transfer",
    ]);
    args.extend([
        OsString::from("-kernel"),
        launch.image.kernel.clone().into_os_string(),
    ]);
    args.extend([OsString::from("-initrd"), layout.initrd().into_os_string()]);
    args
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum DiskUse {
    ReadOnly,
    ReadWrite,
}

/// A disk as JSON: paths in JSON need no QEMU quoting.
fn disk(name: &str, path: &Path, usage: DiskUse) -> String {
    let read_only = usage == DiskUse::ReadOnly;
    json!({
        "driver": "raw",
        "node-name": name,
        "read-only": read_only,
        "discard": if read_only { "ignore" } else { "unmap" },
        "file": {
            "driver": "file",
            "filename": path,
            "read-only": read_only,
            "discard": if read_only { "ignore" } else { "unmap" },
        },
    })
    .to_string()
}

fn network(api_port: u16) -> String {
    format!(
        "user,id=net,hostfwd=tcp:127.0.0.1:0-:{AGENT_PORT},hostfwd=tcp:127.0.0.1:{api_port}-:{API_PORT}"
    )
}

/// Turns QEMU's error text into an error. Recognises the two cases that a user can fix.
fn explain(stderr: &str, api_port: u16) -> MachineError {
    if api_port != 0 && stderr.contains("host forwarding rule") {
        return MachineError::PortInUse { port: api_port };
    }
    let message = stderr
        .lines()
        .map(|line| line.trim_start_matches("qemu-system-x86_64: ").trim())
        .filter(|line| !line.is_empty())
        .collect::<Vec<_>>()
        .join("; ");
    MachineError::QemuFailed { message }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dirs::Dirs;

    fn words(accel: Accel) -> Vec<String> {
        words_with(accel, Clock::Host)
    }

    fn words_with(accel: Accel, clock: Clock) -> Vec<String> {
        let dirs = Dirs {
            data: "/d".into(),
            cache: "/c".into(),
            state: "/s, with a comma".into(),
        };
        let name = MachineName::default();
        let image = Image {
            kernel: "/i/vmlinuz".into(),
            initramfs: "/i/initramfs".into(),
            root: "/i, too/root.ext4".into(),
            version: "v".into(),
        };
        let launch = Launch {
            name: &name,
            layout: &Layout::new(&dirs, &name),
            image: &image,
            accel,
            clock,
            cpus: 3,
            memory: MiB(2048),
            api_port: 8889,
        };
        arguments(&launch)
            .into_iter()
            .map(|word| word.into_string().unwrap())
            .collect()
    }

    fn value<'a>(words: &'a [String], option: &str) -> &'a str {
        let at = words.iter().position(|word| word == option).unwrap();
        &words[at + 1]
    }

    #[test]
    fn the_two_accelerations() {
        assert_eq!(value(&words(Accel::Kvm), "-cpu"), "host");
        let emulated = words(Accel::Tcg);
        assert_eq!(value(&emulated, "-cpu"), EMULATED_CPU);
        assert!(value(&emulated, "-accel").starts_with("tcg,thread=multi"));
    }

    #[test]
    fn the_instruction_clock_counts_in_one_thread_and_is_told_to_programs() {
        let counting = words_with(Accel::Tcg, Clock::Instructions);
        assert_eq!(value(&counting, "-icount"), "shift=1,sleep=on");
        assert!(value(&counting, "-accel").starts_with("tcg,thread=single"));
        assert!(value(&counting, "-append").ends_with(" highres=off forkd.clock=instructions"));
        let ordinary = words(Accel::Tcg);
        assert!(!ordinary.iter().any(|word| word == "-icount"));
        let append = value(&ordinary, "-append");
        assert!(append.ends_with(" forkd.clock=host") && !append.contains("highres"));
    }

    #[test]
    fn ports_are_bound_to_the_loopback_only() {
        let words = words(Accel::Tcg);
        let network = value(&words, "-netdev");
        assert_eq!(network.matches("hostfwd=tcp:127.0.0.1:").count(), 2);
        assert!(network.ends_with("127.0.0.1:8889-:8889"));
    }

    #[test]
    fn paths_with_commas_stay_one_path() {
        let words = words(Accel::Tcg);
        let root: serde_json::Value = serde_json::from_str(value(&words, "-blockdev")).unwrap();
        assert_eq!(root["file"]["filename"], "/i, too/root.ext4");
        assert_eq!(root["read-only"], true);
    }

    #[test]
    fn the_disks_have_names_to_find_them_by() {
        let all = words(Accel::Tcg).join(" ");
        for name in ["forkd-root", "forkd-data", "forkd-transfer"] {
            assert!(all.contains(&format!("serial={name}")), "no {name}");
        }
    }

    #[test]
    fn the_secret_is_not_on_the_command_line() {
        assert!(words(Accel::Tcg).iter().all(|word| !word.contains("token")));
    }

    #[test]
    fn a_taken_port_is_recognised() {
        let said =
            "qemu-system-x86_64: -netdev user,id=net: Could not set up host forwarding rule 'x'";
        assert!(matches!(
            explain(said, 8889),
            MachineError::PortInUse { port: 8889 }
        ));
        let other = explain("qemu-system-x86_64: could not load kernel 'x'\n", 8889);
        assert_eq!(
            other.to_string(),
            "qemu could not start the machine: could not load kernel 'x'"
        );
    }
}
