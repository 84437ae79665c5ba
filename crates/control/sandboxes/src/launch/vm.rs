//! Commands that fill a shell: a cold boot from a kernel, or a restore from a snapshot.
//!
//! [`boot`] and [`restore`] return when the VM runs; neither waits for the agent.

use std::fs::File;
use std::os::fd::OwnedFd;

use forkd_net_proto::{GATEWAY_ADDRESS, GUEST_ADDRESS, GUEST_PREFIX};
use forkd_store::{BlobRef, Cpu, Manifest, volatile_file};
use forkd_types::{Engine, MiB};
use forkd_vmm_link::Vmm;
use forkd_vmm_proto::{
    BootSpec, Capability, Command, ConsoleSpec, CpuModel, DiskSpec, NetAttachment, NetBackend,
    NetSpec, RateLimit, RestoreSpec, Shape, VsockSpec,
};

use super::dirs::VmFiles;
use super::fds::{FdList, SnapshotFiles};
use crate::app::App;
use crate::error::Error;
use crate::state::DiskStack;

/// The context id of every guest: each VM has a socket device of its own, so they do not meet.
const GUEST_CID: u32 = 3;
/// The first word about the network on a kernel command line.
const NETWORK_WORD: &str = "forkd.ip=";
/// Rate at which a guest may print, after a burst.
const CONSOLE_BYTES_PER_SECOND: u64 = 256 * 1024;
/// The console file is cut off at this size.
const CONSOLE_MAX_BYTES: u64 = 16 << 20;

/// Empty disk slots of a new parent. Its children attach volumes to them.
pub const SPARE_DISKS: u8 = 3;

/// The shell that a snapshot needs.
pub fn shape(engine: Engine, memory_mib: u32, vcpus: u8, cpu: Cpu) -> Shape {
    Shape {
        engine,
        memory: MiB(memory_mib),
        vcpus,
        cpu: match cpu {
            Cpu::Host => CpuModel::Host,
            Cpu::Baseline => CpuModel::Baseline,
        },
    }
}

/// Files and settings of a cold boot.
#[derive(Debug)]
pub struct BootInput {
    /// ELF or bzImage.
    pub kernel: File,
    /// Initial RAM disk.
    pub initramfs: Option<File>,
    /// Kernel command line.
    pub cmdline: String,
    /// The root disk.
    pub base: File,
    /// The guest may not write.
    pub read_only: bool,
    /// The serial number that the guest sees.
    pub serial: String,
    /// Empty disk slots behind the root disk.
    pub spare_disks: u8,
}

/// Boots a kernel in a shell. Answers when the VM runs.
pub async fn boot(vmm: &Vmm, input: &BootInput, files: &VmFiles) -> Result<(), Error> {
    let nothing = no_disk()?;
    let mut fds = FdList::default();
    let root = DiskSpec {
        base: fds.push(&input.base),
        layers: files
            .layers
            .iter()
            .map(|layer| fds.push(&layer.file))
            .collect(),
        read_only: input.read_only,
        serial: input.serial.clone(),
        rate: RateLimit::default(),
    };
    let spares = spare_slots(&mut fds, &nothing, input.spare_disks);
    let spec = BootSpec {
        kernel: fds.push(&input.kernel),
        initramfs: input.initramfs.as_ref().map(|file| fds.push(file)),
        cmdline: input.cmdline.clone(),
        disks: std::iter::once(root).chain(spares).collect(),
        net: NetSpec::default(),
        mac: random_mac(),
        vsock: VsockSpec {
            cid: GUEST_CID,
            listener: fds.push(&files.vsock),
        },
        console: console(&mut fds, &files.console),
        generation: rand::random(),
        run: true,
    };
    vmm.run(Command::Boot(Box::new(spec)), &fds.finish()?)
        .await
        .map_err(Error::vmm("the parent could not be booted"))
}

/// Starts a shell from a snapshot. Answers when the VM runs; its agent is not asked. Without `frames` the network device
/// drops the frames of the guest.
pub async fn restore(
    vmm: &Vmm,
    manifest: &Manifest,
    snapshot: &SnapshotFiles,
    files: &VmFiles,
    frames: Option<&OwnedFd>,
    run: bool,
) -> Result<(), Error> {
    let nothing = no_disk()?;
    let mut fds = FdList::default();
    let state = fds.push(&snapshot.state);
    let memory = snapshot.memory_image(&mut fds);
    let mut disks = Vec::with_capacity(manifest.disks.len());
    for (slot, (disk, opened)) in manifest.disks.iter().zip(&snapshot.disks).enumerate() {
        let base = fds.push(&opened.base);
        let mut layers: Vec<_> = opened.layers.iter().map(|file| fds.push(file)).collect();
        let own = files.layers.iter().find(|layer| layer.slot == slot);
        layers.extend(own.map(|layer| fds.push(&layer.file)));
        disks.push(DiskSpec {
            base,
            layers,
            read_only: disk.read_only,
            serial: disk.serial.clone(),
            rate: RateLimit::default(),
        });
    }
    disks.extend(spare_slots(&mut fds, &nothing, manifest.spare_disks));
    let spec = RestoreSpec {
        state,
        memory,
        disks,
        net: NetSpec {
            backend: frames.map(|frames| NetAttachment {
                fd: fds.push(frames),
                kind: NetBackend::Socket,
            }),
            rate: RateLimit::default(),
        },
        vsock: VsockSpec {
            cid: GUEST_CID,
            listener: fds.push(&files.vsock),
        },
        console: console(&mut fds, &files.console),
        generation: rand::random(),
        prefault: snapshot
            .touched
            .as_ref()
            .filter(|_| vmm.capabilities().contains(Capability::Prefault))
            .map(|file| fds.push(file)),
        run,
    };
    vmm.run(Command::Restore(Box::new(spec)), &fds.finish()?)
        .await
        .map_err(Error::vmm("the snapshot could not be restored"))
}

/// The files of a disk that is attached to a running VM.
#[derive(Debug)]
pub struct OpenedDisk {
    base: File,
    layers: Vec<File>,
    serial: String,
}

/// Opens the content of a disk.
pub fn open_disk(app: &App, disk: &DiskStack) -> Result<OpenedDisk, Error> {
    let open = |blob: &BlobRef| {
        let file = app.store.open_blob(&blob.digest);
        file.map_err(Error::store("the content of a volume cannot be opened"))
    };
    Ok(OpenedDisk {
        base: open(&disk.base)?,
        layers: disk.frozen().iter().map(open).collect::<Result<_, _>>()?,
        serial: disk.serial.clone(),
    })
}

/// Gives an empty slot its disk, with the new layer that the VM writes.
pub async fn attach(
    vmm: &Vmm,
    slot: usize,
    opened: &OpenedDisk,
    files: &VmFiles,
) -> Result<(), Error> {
    let mut fds = FdList::default();
    let base = fds.push(&opened.base);
    let mut layers: Vec<_> = opened.layers.iter().map(|file| fds.push(file)).collect();
    let own = files.layers.iter().find(|layer| layer.slot == slot);
    layers.extend(own.map(|layer| fds.push(&layer.file)));
    let command = Command::AttachDisk {
        slot: u8::try_from(slot).map_err(|_| Error::Task)?,
        disk: DiskSpec {
            base,
            layers,
            read_only: false,
            serial: opened.serial.clone(),
            rate: RateLimit::default(),
        },
    };
    vmm.run(command, &fds.finish()?)
        .await
        .map_err(Error::vmm("the volume could not be attached"))
}

/// The file of a slot without a disk.
fn no_disk() -> Result<File, Error> {
    volatile_file("no-disk").map_err(Error::io("create", "a file in memory"))
}

/// Slots without a disk.
fn spare_slots<'a>(fds: &mut FdList<'a>, nothing: &'a File, count: u8) -> Vec<DiskSpec> {
    let spare = |_| DiskSpec {
        base: fds.push(nothing),
        layers: Vec::new(),
        read_only: false,
        serial: String::new(),
        rate: RateLimit::default(),
    };
    (0..count).map(spare).collect()
}

/// The words of a kernel command line that give a guest its address, route and name server. They are the same for every
/// guest, so a parent is cut with them and a fork costs nothing.
pub fn network_words() -> String {
    let address = |octets: [u8; 4]| std::net::Ipv4Addr::from(octets);
    let (own, gateway) = (address(GUEST_ADDRESS), address(GATEWAY_ADDRESS));
    format!("{NETWORK_WORD}{own}/{GUEST_PREFIX} forkd.gw={gateway} forkd.dns={gateway}")
}

/// A guest that was booted with this command line has its address already.
pub fn has_network_words(cmdline: &str) -> bool {
    cmdline.contains(NETWORK_WORD)
}

/// A hardware address of the locally administered range.
pub fn random_mac() -> [u8; 6] {
    let mut mac: [u8; 6] = rand::random();
    mac[0] = 0x02;
    mac
}

fn console<'a>(fds: &mut FdList<'a>, file: &'a File) -> ConsoleSpec {
    ConsoleSpec {
        output: fds.push(file),
        bytes_per_second: CONSOLE_BYTES_PER_SECOND,
        max_bytes: CONSOLE_MAX_BYTES,
    }
}
