//! Disks keep data: read-only, read-write and limited disks, and a full file system on the host.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use anyhow::{Context, bail, ensure};
use forkd_guest_proto::{ShutdownMode, ShutdownRequest};
use forkd_testkit::{BootOptions, Disk, Kit, Root, SmallDisk, Vm};
use forkd_vmm_proto::StopCause;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rustix::fs::OFlags;

use crate::guest_half::GuestHalf;
use crate::scenario::{Registered, Run, everyday, times};

pub const SCENARIOS: &[Registered] = &[everyday!(three_more_disks), everyday!(full_host)];

pub const GUEST_HALF: GuestHalf = GuestHalf {
    name: "disk-mix",
    run: mix,
};

const SIZE: u64 = 128 << 20;
const LIMIT: u64 = 32 << 20;
const HOST_MIB: u32 = 32;
const BLOCK: usize = 4096;

/// `/dev/vdb` is writable, `/dev/vdc` is read-only, `/dev/vdd` is limited to 32 MiB.
pub async fn three_more_disks(run: Run) -> anyhow::Result<()> {
    let folder = run.kit.folder("disks")?;
    let data = Disk::empty(&folder, "data", SIZE)?;
    let mut fixed = Disk::over(folder.join("fixed.img"), "fixed");
    fixed.read_only = true;
    std::fs::write(&fixed.base, vec![0x5a; 8 << 20])?;
    let mut small = Disk::over(folder.join("small.img"), "small");
    small.limit = LIMIT;
    File::create_new(&small.base)?.set_len(SIZE)?;
    let small = small.with_new_layer(&folder)?;
    let disks = vec![data.clone(), fixed.clone(), small.clone()];

    let vm = boot(&run.kit, Root::Fresh, disks.clone()).await?;
    let serials = vm
        .sh("for disk in b c d; do cat /sys/block/vd$disk/serial; echo; done")
        .await?;
    ensure!(serials == "data\nfixed\nsmall", "{serials:?}");
    mixed_io(&vm, "/dev/vdb").await?;
    file_system(&vm, &data).await?;
    refuses_writes(&vm, &fixed.base).await?;
    has_a_limit(&vm, &small).await?;
    let root = reboot(vm).await?;

    let vm = boot(&run.kit, Root::Disk(root), disks).await?;
    vm.sh("e2fsck -fn /dev/vdb").await?;
    vm.sh("mount /dev/vdb /mnt && sha256sum -c /mnt/sums")
        .await?;
    let kept = vm.sh("cat /root/kept").await?;
    ensure!(kept == "on the root disk", "{kept:?}");
    Ok(())
}

/// The host's file system becomes full. The guest sees an error, goes on, and can write again when there is
/// space.
pub async fn full_host(run: Run) -> anyhow::Result<()> {
    let kit = &run.kit;
    let small = SmallDisk::mount(kit.folder("small")?, HOST_MIB)?;
    let data = Disk::empty(&small.folder, "data", SIZE)?;
    let vm = boot(kit, Root::Fresh, vec![data]).await?;
    // Direct I/O: a failed write is an error at once.
    let fill = "dd if=/dev/urandom of=/dev/vdb bs=64k count=1024 oflag=direct 2>&1; echo $?";
    let said = vm.sh(fill).await?;
    ensure!(
        said.contains("error") && said.ends_with('1'),
        "64 MiB fitted into {HOST_MIB}: {said}"
    );
    let back = "dd if=/dev/vdb of=/dev/null bs=64k count=64 iflag=direct 2>&1; echo $?";
    let said = vm.sh(back).await?;
    ensure!(
        said.ends_with('0'),
        "what was written before cannot be read: {said}"
    );
    small.resize(4 * HOST_MIB)?;
    let said = vm.sh(fill).await?;
    ensure!(said.ends_with('0'), "there is space again: {said}");
    vm.stop().await?;
    drop(vm);
    small.remove()
}

async fn boot(kit: &Kit, root: Root, disks: Vec<Disk>) -> anyhow::Result<Vm> {
    let options = BootOptions {
        root,
        disks,
        ..Default::default()
    };
    kit.boot(options).await
}

async fn mixed_io(vm: &Vm, device: &str) -> anyhow::Result<()> {
    vm.put_self().await?;
    let steps = times(1_500, 50_000).to_string();
    let seed: u64 = rand::random();
    vm.output(vm.guest_half("disk-mix", &[device, &steps, &seed.to_string()]))
        .await
        .with_context(|| format!("seed {seed}"))?;
    Ok(())
}

async fn file_system(vm: &Vm, data: &Disk) -> anyhow::Result<()> {
    vm.sh("mkfs.ext4 -q -F /dev/vdb && mount /dev/vdb /mnt")
        .await?;
    vm.sh(
        "cd /mnt && for n in 1 2 3 4; do head -c 3000000 /dev/urandom > file$n; done && \
         cp -r /usr/lib/python3 . && \
         find . -type f -name 'file*' | xargs sha256sum | sed 's|\\./|/mnt/|' > sums && sync",
    )
    .await?;
    vm.sh("head -c 60000000 /dev/urandom > /mnt/large && sync")
        .await?;
    let full = data.allocated()?;
    ensure!(full > 60_000_000, "{full} bytes are taken");
    vm.sh("rm /mnt/large && sync && fstrim /mnt").await?;
    let trimmed = data.allocated()?;
    ensure!(
        trimmed + 50_000_000 < full,
        "{full} bytes before the trim, {trimmed} after it"
    );
    let said = vm
        .sh("dd if=/dev/zero of=/mnt/fill bs=1M 2>&1 | tr '\\n' ' '; rm /mnt/fill")
        .await?;
    ensure!(said.contains("No space left"), "{said}");
    vm.sh("umount /mnt && e2fsck -fn /dev/vdb && echo on the root disk > /root/kept")
        .await?;
    Ok(())
}

async fn refuses_writes(vm: &Vm, base: &Path) -> anyhow::Result<()> {
    ensure!(
        vm.sh("cat /sys/block/vdc/ro").await? == "1",
        "vdc is writable"
    );
    let tried = vm
        .sh("dd if=/dev/zero of=/dev/vdc bs=4096 count=4 oflag=direct 2>/dev/null; echo $?")
        .await?;
    ensure!(tried == "1", "a write to vdc ended with {tried}");
    ensure!(
        std::fs::read(base)?.iter().all(|byte| *byte == 0x5a),
        "the guest has written"
    );
    ensure!(
        vm.sh("head -c 8388608 /dev/vdc | tr -d Z | wc -c").await? == "0",
        "vdc reads as something else"
    );
    Ok(())
}

/// The host's file does not exceed its limit. `virtio-blk` has no error code for "no space", so the guest
/// sees an I/O error. A file system knows its size and never reaches the limit.
async fn has_a_limit(vm: &Vm, small: &Disk) -> anyhow::Result<()> {
    let said = vm
        .sh("dd if=/dev/urandom of=/dev/vdd bs=1M oflag=direct 2>&1 | tr '\\n' ' '")
        .await?;
    ensure!(said.contains("Input/output error"), "{said}");
    let taken = small.allocated()?;
    ensure!(taken <= LIMIT + (1 << 20), "{taken} bytes are taken");
    vm.sh("blkdiscard /dev/vdd && dd if=/dev/urandom of=/dev/vdd bs=1M count=8 oflag=direct")
        .await?;
    Ok(())
}

/// The guest reboots: its VMM ends with the right cause. Returns the root disk for the next VM.
async fn reboot(vm: Vm) -> anyhow::Result<Disk> {
    vm.agent()
        .await?
        .shutdown(ShutdownRequest {
            mode: ShutdownMode::Reboot,
            ..Default::default()
        })
        .await?;
    let (cause, _) = vm.wait_stopped().await?;
    ensure!(cause == StopCause::Reset, "{cause:?}");
    vm.disks().await.into_iter().next().context("no root disk")
}

/// The guest part: random writes, reads and flushes with direct I/O. Each read is compared with the last
/// write.
pub fn mix(args: &[String]) -> anyhow::Result<()> {
    let [device, steps, seed] = args else {
        bail!("device, steps and seed are wanted");
    };
    let disk = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(OFlags::DIRECT.bits().cast_signed())
        .open(device)?;
    // A small part of the disk, so that blocks are overwritten often.
    let blocks = 2048;
    let mut random = StdRng::seed_from_u64(seed.parse()?);
    let mut versions = vec![0u32; blocks];
    let mut buffer = Aligned::new(32 * BLOCK);
    // Blocks start with the previous content of the disk.
    for first in (0..blocks).step_by(32) {
        write_run(&disk, &mut buffer, &mut versions, first, 32)?;
    }
    for _ in 0..steps.parse::<usize>()? {
        let count = random.random_range(1..=32);
        let first = random.random_range(0..=blocks - count);
        match random.random_range(0..10) {
            0..4 => write_run(&disk, &mut buffer, &mut versions, first, count)?,
            4..9 => check_run(&disk, &mut buffer, &versions, first, count)?,
            _ => disk.sync_data()?,
        }
    }
    for first in (0..blocks).step_by(32) {
        check_run(&disk, &mut buffer, &versions, first, 32)?;
    }
    Ok(())
}

fn write_run(
    disk: &File,
    buffer: &mut Aligned,
    versions: &mut [u32],
    first: usize,
    count: usize,
) -> anyhow::Result<()> {
    let bytes = buffer.first(count * BLOCK);
    for (at, block) in bytes.chunks_mut(BLOCK).enumerate() {
        versions[first + at] += 1;
        fill(block, first + at, versions[first + at]);
    }
    disk.write_all_at(bytes, (first * BLOCK) as u64)?;
    Ok(())
}

fn check_run(
    disk: &File,
    buffer: &mut Aligned,
    versions: &[u32],
    first: usize,
    count: usize,
) -> anyhow::Result<()> {
    let bytes = buffer.first(count * BLOCK);
    disk.read_exact_at(bytes, (first * BLOCK) as u64)?;
    let mut wanted = vec![0; BLOCK];
    for (at, block) in bytes.chunks(BLOCK).enumerate() {
        fill(&mut wanted, first + at, versions[first + at]);
        ensure!(
            block == wanted,
            "block {} does not have version {}",
            first + at,
            versions[first + at]
        );
    }
    Ok(())
}

/// Content that is unique per block and version.
fn fill(block: &mut [u8], number: usize, version: u32) {
    let mut state = (number as u64) << 32 | u64::from(version);
    for word in block.chunks_mut(8) {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        word.copy_from_slice(&state.to_le_bytes());
    }
}

/// Memory at a page boundary, for direct I/O.
struct Aligned {
    bytes: Vec<u8>,
    start: usize,
}

impl Aligned {
    fn new(size: usize) -> Self {
        let bytes = vec![0u8; size + BLOCK];
        let start = bytes.as_ptr().align_offset(BLOCK);
        Self { bytes, start }
    }

    fn first(&mut self, size: usize) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + size]
    }
}
