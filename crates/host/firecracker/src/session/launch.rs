//! Filling the VM: a cold boot or a restore.
//!
//! The jail is entered first: every file of the VM belongs to its user, and every thread is born inside. The files have
//! names until Firecracker has opened them; then they are removed, so that a VM that is killed leaves no content.

use std::fs::{File, Permissions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use forkd_os::sparse;
use forkd_sys::jail::{Cell, NAMESPACES, Openings, enter_with};
use forkd_vmm_proto::{
    BootSpec, ConsoleSpec, DiskSpec, FdIndex, Fds, MAX_DISKS, NetSpec, PageIndex, READY_PORT,
    RateLimit, Reply, RestoreSpec, Shape,
};
use rustix::io::FdFlags;
use serde_json::json;

use super::error::OperationError;
use super::{Answer, Jail, PLAIN, SNAPSHOT, Session, State, Vm};
use crate::console::Console;
use crate::disk::FlatDisk;
use crate::process::Firecracker;
use crate::relay::Relay;

/// The socket on which Firecracker takes connections to the guest. Connections of the guest to a host port come to the
/// same name with `_` and the port.
const VSOCK: &str = "v.sock";
const KERNEL: &str = "kernel";
const INITRAMFS: &str = "initramfs";
const STATE: &str = "state";

/// Folders of libraries, for a Firecracker that is not linked statically.
const LIBRARIES: [&str; 5] = [
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/etc/ld.so.cache",
];

impl Session {
    pub(super) fn boot(&mut self, spec: &BootSpec, fds: Fds) -> Answer {
        self.fill(|session, jail, shape| session.try_boot(jail, shape, spec, fds))
    }

    pub(super) fn restore(&mut self, spec: &RestoreSpec, fds: Fds) -> Answer {
        self.fill(|session, jail, _| session.try_restore(jail, spec, fds))
    }

    fn fill(
        &mut self,
        work: impl FnOnce(&mut Self, Option<Jail>, Shape) -> Result<Vm, OperationError>,
    ) -> Answer {
        let (State::Prepared(jail), Some(shape)) = (&mut self.state, self.shape) else {
            return Err(super::wrong_phase("there is no empty VM"));
        };
        let jail = jail.take();
        self.state = State::UsedUp;
        let vm = work(self, jail, shape).map_err(|error| error.wire())?;
        self.state = State::Live(Box::new(vm));
        Ok(Reply::Done)
    }

    fn try_boot(
        &mut self,
        jail: Option<Jail>,
        shape: Shape,
        spec: &BootSpec,
        mut fds: Fds,
    ) -> Result<Vm, OperationError> {
        check_parts(&spec.disks, &spec.net)?;
        if !spec.run {
            return Err(OperationError::Unsupported("a boot that stays paused"));
        }
        self.settle_in(jail, None)?;
        keep_as(KERNEL, &fds.file(spec.kernel)?)?;
        if let Some(index) = spec.initramfs {
            keep_as(INITRAMFS, &fds.file(index)?)?;
        }
        let disks = flatten(&spec.disks, &mut fds)?;
        let relay = self.relay(spec.vsock.listener, &mut fds)?;
        let process = self.start(&spec.console, &mut fds)?;
        configure(&process, shape, spec).map_err(OperationError::Kernel)?;
        remove_names(disks.len());
        relay
            .start()
            .map_err(OperationError::io("start the relay"))?;
        Ok(Vm {
            process,
            disks,
            paused: false,
            cuts: 0,
        })
    }

    fn try_restore(
        &mut self,
        jail: Option<Jail>,
        spec: &RestoreSpec,
        mut fds: Fds,
    ) -> Result<Vm, OperationError> {
        check_parts(&spec.disks, &spec.net)?;
        let ([memory], PageIndex::Identity) = (spec.memory.layers.as_slice(), &spec.memory.index)
        else {
            return Err(OperationError::Unsupported("layered memory"));
        };
        let memory = fds.file(*memory)?;
        // Firecracker opens the file by the number that it inherits.
        rustix::io::fcntl_setfd(&memory, FdFlags::empty())
            .map_err(|error| OperationError::io("pass the memory on")(error.into()))?;
        let path = PathBuf::from(format!("/proc/self/fd/{}", memory.as_raw_fd()));
        self.settle_in(jail, Some((&memory, &path)))?;
        keep_as(STATE, &fds.file(spec.state)?)?;
        let disks = flatten(&spec.disks, &mut fds)?;
        let relay = self.relay(spec.vsock.listener, &mut fds)?;
        let process = self.start(&spec.console, &mut fds)?;
        let load = json!({
            "snapshot_path": STATE,
            "mem_backend": { "backend_type": "File", "backend_path": path },
            "resume_vm": spec.run,
        });
        process
            .api()
            .put("/snapshot/load", &load, SNAPSHOT)
            .map_err(OperationError::Snapshot)?;
        remove_names(disks.len());
        relay
            .start()
            .map_err(OperationError::io("start the relay"))?;
        Ok(Vm {
            process,
            disks,
            paused: !spec.run,
            cuts: 0,
        })
    }

    /// Enters the folder of the VM and its jail.
    ///
    /// The mount namespace of the void is not entered: Firecracker opens paths. Landlock limits them to the folder, the
    /// KVM device, the program and the memory of the snapshot.
    fn settle_in(
        &self,
        jail: Option<Jail>,
        memory: Option<(&File, &Path)>,
    ) -> Result<(), OperationError> {
        rustix::process::chdir(&self.dir)
            .map_err(|error| OperationError::io("enter the folder of the VM")(error.into()))?;
        let Some(jail) = jail else {
            return Ok(());
        };
        if let (Some((file, _)), Some(_)) = (memory, jail.user) {
            // Below a folder that only the daemon enters. A file that is readable already, or of another owner, stays.
            let _ = file.set_permissions(Permissions::from_mode(0o444));
        }
        let kvm = Path::new("/dev/kvm");
        // The group of root is no group for a VM.
        let groups = kvm.metadata().map(|kvm| kvm.gid());
        let groups: Vec<u32> = groups.into_iter().filter(|group| *group != 0).collect();
        let mut readable: Vec<&Path> = LIBRARIES.iter().map(Path::new).collect();
        readable.push(&self.firecracker);
        readable.extend(memory.map(|(_, path)| path));
        let writable = [Path::new("."), kvm, Path::new("/dev/null")];
        let cell = Cell {
            namespaces: without_mounts(jail.namespaces),
            user: jail.user,
            landlock: jail.landlock,
        };
        let openings = Openings {
            groups: &groups,
            readable: &readable,
            writable: &writable,
        };
        enter_with(cell, openings)?;
        // Firecracker would name neither the user nor a remedy.
        rustix::fs::access(
            kvm,
            rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK,
        )
        .map_err(|error| OperationError::Kvm(error.into()))
    }

    /// The sockets of the guest. The ready port must listen before the guest runs.
    fn relay(&self, listener: FdIndex, fds: &mut Fds) -> Result<Relay, OperationError> {
        let listen = || OperationError::io("listen for the guest");
        Ok(Relay {
            listener: UnixListener::from(fds.take(listener)?),
            ready: UnixListener::bind(format!("{VSOCK}_{READY_PORT}")).map_err(listen())?,
            guest: PathBuf::from(VSOCK),
            notices: self.tell.try_clone().map_err(listen())?,
        })
    }

    fn start(&self, console: &ConsoleSpec, fds: &mut Fds) -> Result<Firecracker, OperationError> {
        let output = fds.file(console.output)?;
        let mut process = Firecracker::start(&self.firecracker)?;
        let console = Console {
            output,
            bytes_per_second: console.bytes_per_second,
            max_bytes: console.max_bytes,
        };
        if let Some(pipe) = process.take_console() {
            console
                .follow(pipe)
                .map_err(OperationError::io("follow the console"))?;
        }
        Ok(process)
    }
}

/// Describes the VM and starts it.
fn configure(
    process: &Firecracker,
    shape: Shape,
    spec: &BootSpec,
) -> Result<(), crate::api::ApiError> {
    let api = process.api();
    let machine = json!({ "vcpu_count": shape.vcpus, "mem_size_mib": shape.memory.0 });
    api.put("/machine-config", &machine, PLAIN)?;
    let mut source = json!({ "kernel_image_path": KERNEL, "boot_args": boot_args(&spec.cmdline) });
    if spec.initramfs.is_some() {
        source["initrd_path"] = INITRAMFS.into();
    }
    api.put("/boot-source", &source, PLAIN)?;
    for (slot, disk) in spec.disks.iter().enumerate() {
        let name = disk_name(slot);
        // The flat file ends with the VM, so there is nothing to make durable.
        let drive = json!({
            "drive_id": name,
            "path_on_host": name,
            "is_root_device": false,
            "is_read_only": disk.read_only,
            "cache_type": "Unsafe",
        });
        api.put(&format!("/drives/{name}"), &drive, PLAIN)?;
    }
    let vsock = json!({ "guest_cid": spec.vsock.cid, "uds_path": VSOCK });
    api.put("/vsock", &vsock, PLAIN)?;
    api.put("/entropy", &json!({}), PLAIN)?;
    let start = json!({ "action_type": "InstanceStart" });
    api.put("/actions", &start, PLAIN)
}

/// Firecracker has no reset register. A guest reboots through the keyboard controller.
fn boot_args(cmdline: &str) -> String {
    let words = cmdline.split(' ').map(|word| match word {
        "reboot=a" => "reboot=k",
        word => word,
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Refuses parts that Firecracker cannot give a VM.
fn check_parts(disks: &[DiskSpec], net: &NetSpec) -> Result<(), OperationError> {
    if disks.len() > MAX_DISKS {
        return Err(OperationError::Request("a VM has at most four disks"));
    }
    if net.backend.is_some() {
        return Err(OperationError::Unsupported("a network device"));
    }
    if disks.iter().any(|disk| disk.rate != RateLimit::default()) {
        return Err(OperationError::Unsupported("rate limits of disks"));
    }
    Ok(())
}

/// All namespaces of the void but the one of its mounts.
fn without_mounts(namespaces: Vec<OwnedFd>) -> Vec<OwnedFd> {
    let named = NAMESPACES.iter().zip(namespaces);
    let kept = named.filter(|(name, _)| **name != "mnt");
    kept.map(|(_, namespace)| namespace).collect()
}

fn disk_name(slot: usize) -> String {
    format!("disk{slot}")
}

fn flatten(specs: &[DiskSpec], fds: &mut Fds) -> Result<Vec<FlatDisk>, OperationError> {
    let mut disks = Vec::with_capacity(specs.len());
    for (slot, spec) in specs.iter().enumerate() {
        let flat = create(&disk_name(slot)).map_err(OperationError::io("create a disk"))?;
        let base = fds.file(spec.base)?;
        let layers: Result<Vec<File>, _> =
            spec.layers.iter().map(|index| fds.file(*index)).collect();
        disks.push(FlatDisk::make(flat, base, layers?, spec.read_only)?);
    }
    Ok(disks)
}

/// Copies a file that came as a descriptor into the folder of the VM.
fn keep_as(name: &str, file: &File) -> Result<(), OperationError> {
    create(name)
        .and_then(|copy| sparse::copy(file, &copy))
        .map_err(OperationError::io("copy a file of the VM"))
}

fn create(name: &str) -> io::Result<File> {
    File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(name)
}

/// Removes the names of files that Firecracker has open.
fn remove_names(disks: usize) {
    let names = [KERNEL, INITRAMFS, STATE].map(str::to_owned);
    for name in names.into_iter().chain((0..disks).map(disk_name)) {
        // Not every VM has every file.
        let _ = std::fs::remove_file(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_of_firecracker_reboots_through_the_keyboard_controller() {
        let args = boot_args(forkd_vmm_proto::LINUX_CMDLINE);
        assert!(args.contains(" reboot=k "), "{args}");
        assert!(!args.contains("reboot=a"), "{args}");
        assert_eq!(
            args.len(),
            forkd_vmm_proto::LINUX_CMDLINE.len(),
            "nothing else changes"
        );
    }
}
