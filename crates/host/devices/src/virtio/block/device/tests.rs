use super::*;
use crate::disk::{self, Layer, RawDisk};
use crate::testing::Rig;
use forkd_vmm_proto::DeviceSlot;

const SIZE: u64 = 1 << 20;
const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

fn raw(read_only: bool) -> Box<dyn Disk> {
    let file = tempfile::tempfile().unwrap();
    file.set_len(SIZE).unwrap();
    Box::new(RawDisk::open(file, read_only).unwrap())
}

fn rig_with(disk: Box<dyn Disk>, rate: RateLimit) -> Rig {
    let mut rig = Rig::new(DeviceSlot::Disk(0));
    rig.start(Box::new(Block::new(disk, "serial-0123", rate).unwrap()));
    assert_eq!(rig.status(), 15);
    rig
}

fn rig() -> Rig {
    rig_with(raw(false), RateLimit::default())
}

fn header(kind: u32, sector: u64) -> Vec<u8> {
    let mut header = kind.to_le_bytes().to_vec();
    header.extend([0; 4]);
    header.extend(sector.to_le_bytes());
    header
}

/// Sends one request; returns its status and what was read.
fn request(rig: &mut Rig, kind: u32, sector: u64, out: &[u8], room: usize) -> (u8, Vec<u8>) {
    let header = header(kind, sector);
    let mut parts: Vec<&[u8]> = vec![&header];
    if !out.is_empty() {
        parts.push(out);
    }
    let rooms: &[usize] = if room == 0 { &[1] } else { &[room, 1] };
    let (head, addrs) = rig.add(0, &parts, rooms);
    rig.kick(0);
    assert_eq!(rig.used(0).unwrap().0, u32::from(head));
    let status = rig.read(*addrs.last().unwrap(), 1)[0];
    let data = if room == 0 {
        Vec::new()
    } else {
        rig.read(addrs[0], room)
    };
    (status, data)
}

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    let mut range = sector.to_le_bytes().to_vec();
    range.extend(sectors.to_le_bytes());
    range.extend(flags.to_le_bytes());
    range
}

#[test]
fn written_sectors_are_read_back() {
    let mut rig = rig();
    let data: Vec<u8> = (0..8192u32).map(|n| (n % 251) as u8).collect();
    assert_eq!(request(&mut rig, 1, 10, &data, 0).0, OK);
    assert_eq!(request(&mut rig, 4, 0, &[], 0).0, OK);
    let (status, read) = request(&mut rig, 0, 10, &[], 8192);
    assert_eq!((status, read), (OK, data));
    assert_eq!(rig.counter("reads"), 1);
    assert_eq!(rig.counter("write_bytes"), 8192);
    assert_eq!(rig.counter("flushes"), 1);
}

#[test]
fn a_transfer_larger_than_the_bounce_buffer_is_whole() {
    let mut rig = rig();
    let data: Vec<u8> = (0..700_416u32).map(|n| (n / 512 % 255) as u8).collect();
    assert_eq!(request(&mut rig, 1, 3, &data, 0).0, OK);
    let (status, read) = request(&mut rig, 0, 3, &[], data.len());
    assert_eq!(status, OK);
    assert!(read == data);
}

#[test]
fn the_serial_number_and_the_size_are_shown() {
    let mut rig = rig();
    let (status, serial) = request(&mut rig, 8, 0, &[], 20);
    assert_eq!(status, OK);
    assert_eq!(&serial, b"serial-0123\0\0\0\0\0\0\0\0\0");
    assert_eq!(rig.get(0x100), (SIZE / 512) as u32);
    assert_eq!(rig.get(0x104), 0);
    assert_eq!(request(&mut rig, 8, 0, &[], 19).0, IOERR);
}

#[test]
fn discarded_and_zeroed_ranges_read_zero() {
    let mut rig = rig();
    assert_eq!(request(&mut rig, 1, 0, &[9; 16384], 0).0, OK);
    assert_eq!(request(&mut rig, 11, 0, &range(0, 8, 0), 0).0, OK);
    let two = [range(8, 8, 1), range(24, 8, 0)].concat();
    assert_eq!(request(&mut rig, 13, 0, &two, 0).0, OK);
    let (_, read) = request(&mut rig, 0, 0, &[], 16384);
    assert!(read[..8192].iter().all(|b| *b == 0));
    assert!(read[8192..12288].iter().all(|b| *b == 9));
    assert!(read[12288..].iter().all(|b| *b == 0));
}

#[test]
fn requests_that_make_no_sense_are_answered_with_errors() {
    let mut rig = rig();
    let end = SIZE / 512;
    assert_eq!(request(&mut rig, 0, end, &[], 512).0, IOERR);
    assert_eq!(request(&mut rig, 0, end - 1, &[], 1024).0, IOERR);
    assert_eq!(request(&mut rig, 0, u64::MAX, &[], 512).0, IOERR);
    assert_eq!(request(&mut rig, 0, u64::MAX / 512 + 1, &[], 512).0, IOERR);
    assert_eq!(request(&mut rig, 1, 0, &[0; 513], 0).0, IOERR);
    assert_eq!(request(&mut rig, 77, 0, &[], 0).0, UNSUPP);
    assert_eq!(request(&mut rig, 11, 0, &range(0, 8, 1), 0).0, UNSUPP);
    assert_eq!(request(&mut rig, 11, 0, &range(end, 1, 0), 0).0, IOERR);
    assert_eq!(request(&mut rig, 11, 0, &[0; 15], 0).0, IOERR);
    assert_eq!(request(&mut rig, 11, 0, &[0; 16 * 33], 0).0, IOERR);
    assert!(!rig.needs_reset());
    assert!(rig.counter("errors") >= 8);
}

#[test]
fn a_request_without_room_for_its_status_stops_the_device() {
    for parts in [&[0u8; 16][..], &[0; 3]] {
        let mut rig = rig();
        rig.add(0, &[parts], &[]);
        rig.kick(0);
        assert!(rig.needs_reset());
    }
    let mut rig = rig();
    rig.add(0, &[&[0; 3]], &[1]);
    rig.kick(0);
    assert!(rig.needs_reset());
}

#[test]
fn buffers_outside_memory_stop_the_device() {
    let mut rig = rig();
    let header = header(0, 0);
    let head = rig.buffer(&header);
    rig.add_at(0, &[(head, 16)], &[(u64::MAX - 100, 512), (0x5_0000, 1)]);
    rig.kick(0);
    assert!(rig.needs_reset());
}

#[test]
fn a_read_only_disk_refuses_writes_and_says_so() {
    let mut rig = rig_with(raw(true), RateLimit::default());
    rig.set(0x14, 0);
    assert_eq!(rig.get(0x10) & (1 << 5), 1 << 5);
    assert_eq!(rig.get(0x10) & (1 << 13), 0);
    assert_eq!(request(&mut rig, 1, 0, &[1; 512], 0).0, IOERR);
    assert_eq!(request(&mut rig, 13, 0, &range(0, 8, 0), 0).0, UNSUPP);
    assert_eq!(request(&mut rig, 0, 0, &[], 512), (OK, vec![0; 512]));
}

#[test]
fn operations_over_the_rate_wait() {
    let rate = RateLimit {
        ops_per_second: 1,
        burst_ops: 2,
        ..RateLimit::default()
    };
    let mut rig = rig_with(raw(false), rate);
    for _ in 0..4 {
        rig.add(0, &[&header(0, 0)], &[512, 1]);
    }
    rig.kick(0);
    assert!(rig.used(0).is_some());
    assert!(rig.used(0).is_some());
    assert!(rig.used(0).is_none());
    assert_eq!(rig.counter("throttled"), 1);
}

#[test]
fn no_space_is_an_error_for_the_guest_and_a_count() {
    let base = tempfile::tempfile().unwrap();
    base.set_len(SIZE).unwrap();
    let file = tempfile::tempfile().unwrap();
    drop(Layer::create(file.try_clone().unwrap(), SIZE, 4096).unwrap());
    let disk = disk::open(base, vec![file], false).unwrap();
    let mut rig = rig_with(disk, RateLimit::default());
    assert_eq!(request(&mut rig, 1, 0, &[1; 4096], 0).0, OK);
    assert_eq!(request(&mut rig, 1, 8, &[1; 4096], 0).0, IOERR);
    assert_eq!(rig.counter("no_space"), 1);
    assert_eq!(rig.counter("layer_bytes"), 4096);
    assert!(!rig.needs_reset());
}

#[test]
fn a_branch_gives_both_sides_the_disk_of_that_instant() {
    let base = tempfile::tempfile().unwrap();
    base.set_len(SIZE).unwrap();
    let new_layer = || {
        let file = tempfile::tempfile().unwrap();
        drop(Layer::create(file.try_clone().unwrap(), SIZE, 0).unwrap());
        file
    };
    let first = new_layer();
    let copy = |file: &File| file.try_clone().unwrap();
    let disk = disk::open(copy(&base), vec![copy(&first)], false).unwrap();
    let mut source = rig_with(disk, RateLimit::default());
    assert_eq!(request(&mut source, 1, 0, &[1; 512], 0).0, OK);
    source
        .transport
        .with(|block: &mut Block| block.push_layer(new_layer()))
        .unwrap()
        .unwrap();
    let disk = disk::open(copy(&base), vec![copy(&first), new_layer()], false).unwrap();
    let block = Block::new(disk, "", RateLimit::default()).unwrap();
    let mut child = source.restore_into(Box::new(block)).unwrap();
    // Both go on with the rings in the same memory, so one after the other.
    assert_eq!(request(&mut child, 0, 0, &[], 512), (OK, vec![1; 512]));
    assert_eq!(request(&mut child, 1, 0, &[2; 512], 0).0, OK);
    assert_eq!(request(&mut child, 0, 0, &[], 512).1, vec![2; 512]);
    let mut seen = vec![0; 512];
    source
        .transport
        .with(|block: &mut Block| block.disk.read(0, &mut seen))
        .unwrap()
        .unwrap();
    assert_eq!(seen, vec![1; 512]);
    assert_eq!(source.counter("layers"), 2);
}

#[test]
fn state_of_a_disk_with_another_size_is_refused() {
    let rig = rig();
    let file = tempfile::tempfile().unwrap();
    file.set_len(SIZE * 2).unwrap();
    let other = Box::new(RawDisk::open(file, false).unwrap());
    let block = Block::new(other, "", RateLimit::default()).unwrap();
    assert!(rig.restore_into(Box::new(block)).is_err());
}

/// Asks the loop to pause with the first discard.
struct PauseAtFirst {
    disk: Box<dyn Disk>,
    handle: Option<crate::LoopHandle>,
    discards: Arc<std::sync::atomic::AtomicU64>,
}

impl Disk for PauseAtFirst {
    fn size(&self) -> u64 {
        self.disk.size()
    }

    fn read_only(&self) -> bool {
        false
    }

    fn read(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.disk.read(offset, data)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.disk.write(offset, data)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.disk.flush()
    }

    fn discard(&mut self, offset: u64, len: u64) -> io::Result<()> {
        if let Some(handle) = self.handle.take() {
            handle.ask_pause()?;
        }
        self.discards
            .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        self.disk.discard(offset, len)
    }

    fn write_zeroes(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.disk.write_zeroes(offset, len)
    }

    fn push_layer(&mut self, layer: File) -> Result<(), DiskError> {
        self.disk.push_layer(layer)
    }

    fn stats(&self) -> disk::DiskStats {
        self.disk.stats()
    }
}

#[test]
fn a_pause_does_not_wait_for_all_ranges_of_a_discard() {
    let discards = Arc::default();
    let mut rig = Rig::new(DeviceSlot::Disk(0));
    let handle = rig.event_loop.handle();
    let disk = PauseAtFirst {
        disk: raw(false),
        handle: Some(handle.clone()),
        discards: Arc::clone(&discards),
    };
    let block = Block::new(Box::new(disk), "", RateLimit::default()).unwrap();
    rig.start(Box::new(block));
    let ranges: Vec<u8> = (0..32).flat_map(|n| range(n * 8, 8, 0)).collect();
    let (_, addrs) = rig.add(0, &[&header(11, 0), &ranges], &[1]);
    let done = || discards.load(std::sync::atomic::Ordering::Relaxed);
    rig.kick(0);
    assert_eq!((done(), rig.used(0)), (1, None));
    handle.resume().unwrap();
    rig.settle();
    assert!(rig.used(0).is_some());
    assert_eq!((done(), rig.read(addrs[0], 1)[0]), (33, OK));
}

#[test]
fn discards_count_for_the_rate_limit() {
    let rate = RateLimit {
        bytes_per_second: 1,
        burst_bytes: 32 << 10,
        ..RateLimit::default()
    };
    let mut rig = rig_with(raw(false), rate);
    assert_eq!(request(&mut rig, 11, 0, &range(0, 8, 0), 0).0, OK);
    rig.add(0, &[&header(4, 0)], &[1]);
    rig.kick(0);
    assert_eq!(rig.used(0), None, "the discard has used up the burst");
}

#[test]
fn an_empty_device_takes_one_disk_later() {
    let nothing = tempfile::tempfile().unwrap();
    let empty = disk::open(nothing, Vec::new(), false).unwrap();
    let mut rig = rig_with(empty, RateLimit::default());
    // The configuration begins with the number of sectors.
    assert_eq!(rig.get(0x100), 0);
    assert_eq!(request(&mut rig, 0, 0, &[], 512).0, IOERR);
    let attach = |rig: &Rig, disk| {
        let done = rig
            .transport
            .with(|block: &mut Block| block.attach(disk, "volume"));
        done.unwrap()
    };
    assert!(attach(&rig, raw(true)).is_err());
    attach(&rig, raw(false)).unwrap();
    assert!(attach(&rig, raw(false)).is_err());
    assert_eq!(u64::from(rig.get(0x100)), SIZE / SECTOR);
    assert_eq!(request(&mut rig, 1, 3, &[7; 512], 0).0, OK);
    assert_eq!(request(&mut rig, 0, 3, &[], 512).1, [7; 512]);
    // The serial number is that of the disk.
    assert_eq!(&request(&mut rig, 8, 0, &[], 20).1[..7], b"volume\0");
}
