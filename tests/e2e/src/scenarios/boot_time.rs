//! The duration of a boot, beside QEMU's `microvm` with the same kernel and initramfs. Prints the numbers and
//! asserts nothing about them.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use forkd_testkit::{Assets, BootOptions, Root};
use forkd_types::MiB;
use forkd_vmm_proto::{LINUX_CMDLINE, READY_PORT};

use crate::scenario::{Registered, Run, soak, times};

pub const SCENARIOS: &[Registered] = &[soak!(against_qemu)];

const MEMORY: u32 = 256;

/// Waits for the agent's connection to the ready port and prints the peer.
const LISTEN: &str = r"
import socket, sys
listener = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
listener.bind((socket.VMADDR_CID_ANY, int(sys.argv[1])))
listener.listen()
listener.settimeout(240)
print('listening', flush=True)
print(listener.accept()[1][0], flush=True)
";

pub async fn against_qemu(run: Run) -> anyhow::Result<()> {
    let rounds = times(2, 10);
    let mut ours = Vec::new();
    for _ in 0..rounds {
        let options = BootOptions {
            memory: MiB(MEMORY),
            root: Root::None,
            ..Default::default()
        };
        let begin = Instant::now();
        let vm = run.kit.boot(options).await?;
        ours.push(begin.elapsed());
        vm.stop().await?;
    }
    if let Some(missing) = qemu_lacks() {
        eprintln!(
            "boot to ready: ours {}; QEMU is left out: {missing}",
            show(&ours)
        );
        return Ok(());
    }
    let mut theirs = Vec::new();
    for _ in 0..rounds {
        let assets = run.kit.assets.clone();
        theirs.push(tokio::task::spawn_blocking(move || qemu(&assets)).await??);
    }
    eprintln!(
        "boot to ready, {MEMORY} MiB, 1 vCPU, the same kernel and initramfs: ours {}, QEMU microvm {}",
        show(&ours),
        show(&theirs)
    );
    Ok(())
}

fn show(times: &[Duration]) -> String {
    let all: Vec<String> = times
        .iter()
        .map(|time| format!("{:.2}", time.as_secs_f64()))
        .collect();
    format!("{} s", all.join(" "))
}

/// The missing requirement for the comparison, if there is one.
fn qemu_lacks() -> Option<String> {
    if find("qemu-system-x86_64").is_none() {
        return Some("qemu-system-x86_64 is not installed".to_owned());
    }
    // Opening the device loads the module.
    let device = "/dev/vhost-vsock";
    if let Err(error) = std::fs::File::open(device) {
        return Some(format!("{device}: {error}"));
    }
    find("python3")
        .is_none()
        .then(|| "python3 is not installed".to_owned())
}

fn find(program: &str) -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?)
        .map(|folder| folder.join(program))
        .find(|path| path.is_file())
}

/// A child process that is killed when the value is dropped.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        // Both calls fail only if the process has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// From the start of the process to the agent's ready signal.
fn qemu(assets: &Assets) -> anyhow::Result<Duration> {
    let mut listener = Ends(
        Command::new("python3")
            .args(["-c", LISTEN, &READY_PORT.to_string()])
            .stdout(Stdio::piped())
            .spawn()?,
    );
    let mut said = std::io::BufRead::lines(std::io::BufReader::new(
        listener.0.stdout.take().context("no output")?,
    ));
    ensure!(
        said.next().transpose()?.as_deref() == Some("listening"),
        "the listener did not start"
    );
    let cid = rand::random_range(1000..1_000_000u32).to_string();
    let begin = Instant::now();
    let _qemu = Ends(
        Command::new("qemu-system-x86_64")
            .args(qemu_arguments(&assets.vmlinux, &assets.initramfs, &cid))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()?,
    );
    let came = said.next().transpose()?.context("no guest came")?;
    let took = begin.elapsed();
    ensure!(came == cid, "guest {came} came, not {cid}");
    Ok(took)
}

fn qemu_arguments(kernel: &Path, initramfs: &Path, cid: &str) -> Vec<String> {
    let text = |path: &Path| path.display().to_string();
    vec![
        "-M".into(),
        "microvm,acpi=on,pit=off,pic=off,rtc=off,usb=off,auto-kernel-cmdline=off".into(),
        // The default firmware keeps the ACPI tables where QEMU loads the end of an initramfs. Whether they
        // survive depends on the size of the file.
        "-bios".into(),
        "qboot.rom".into(),
        "-accel".into(),
        "kvm".into(),
        "-cpu".into(),
        "host".into(),
        "-smp".into(),
        "1".into(),
        "-m".into(),
        MEMORY.to_string(),
        "-kernel".into(),
        text(kernel),
        "-initrd".into(),
        text(initramfs),
        "-append".into(),
        LINUX_CMDLINE.into(),
        "-nodefaults".into(),
        "-no-user-config".into(),
        "-no-reboot".into(),
        "-display".into(),
        "none".into(),
        "-serial".into(),
        "null".into(),
        "-device".into(),
        "virtio-rng-device".into(),
        "-device".into(),
        format!("vhost-vsock-device,guest-cid={cid}"),
    ]
}
