//! Fuzz target for layer files, and for a disk on top of them.
//!
//! A layer file that opens must behave like plain bytes: every operation is repeated on a byte array and
//! compared.

use std::fs::File;
use std::os::unix::fs::FileExt;

use forkd_devices::disk::{self, BLOCK, Disk, Layer, SECTOR};

use crate::devices::memory_file;
use crate::input::Input;

/// Small enough to compare the whole disk.
const SIZE: u64 = 20 * BLOCK + 3 * SECTOR;
/// Larger files are opened but not filled.
const MAX_FILE: u64 = 1 << 42;

/// Opens a layer file that is valid, damaged or forged. A disk on a valid layer behaves like plain bytes.
pub(crate) fn layer(data: &[u8]) {
    let mut input = Input::new(data);
    let file = match input.u8() % 4 {
        0 => made_up(&mut input),
        1 => damaged(&mut input),
        _ => whole(),
    };
    let base = memory_file();
    let _ = base.write_all_at(&[5; 9 * 512], BLOCK);
    let Ok(mut disk) = disk::open(base, vec![file], false) else {
        return;
    };
    let size = disk.size();
    if size > SIZE {
        // Only the ends of a large disk are compared.
        let mut sector = [0; 512];
        let _ = disk.read(size - SECTOR, &mut sector);
        let _ = disk.write(size - SECTOR, &sector);
        let _ = disk.discard(0, size.min(1 << 31));
        return;
    }
    let mut plain = vec![0; usize::try_from(size).unwrap_or(0)];
    if disk.read(0, &mut plain).is_ok() {
        work(disk.as_mut(), &mut plain, &mut input);
    }
}

fn made_up(input: &mut Input<'_>) -> File {
    let file = memory_file();
    let len = input.u64() % MAX_FILE;
    let _ = file.write_all_at(input.rest(), 0);
    let _ = file.set_len(len);
    file
}

fn whole() -> File {
    let file = memory_file();
    let copy = file.try_clone().expect("descriptors are not short");
    drop(Layer::create(copy, SIZE, 0).expect("the size is one of a disk"));
    file
}

fn damaged(input: &mut Input<'_>) -> File {
    let file = whole();
    for _ in 0..input.u8() % 8 {
        let at = u64::from(input.u16() % 8300);
        let byte = [input.u8()];
        let _ = file.write_all_at(&byte, at);
    }
    file
}

/// Runs the operations of the input on the disk and on plain bytes, and compares the results.
fn work(disk: &mut dyn Disk, plain: &mut [u8], input: &mut Input<'_>) {
    let sectors = plain.len() as u64 / SECTOR;
    for _ in 0..64 {
        if input.is_empty() {
            break;
        }
        let action = input.u8();
        let first = u64::from(input.u8()) % sectors;
        let count = u64::from(input.u8()) % (sectors - first) + 1;
        let (offset, len) = (first * SECTOR, count * SECTOR);
        let range = offset as usize..(offset + len) as usize;
        match action % 6 {
            0 | 1 => {
                let data = vec![action; range.len()];
                disk.write(offset, &data).expect("there is room");
                plain[range].copy_from_slice(&data);
            }
            2 => {
                disk.write_zeroes(offset, len).expect("there is room");
                plain[range].fill(0);
            }
            3 => {
                disk.discard(offset, len).expect("a file has holes");
                let start = offset.next_multiple_of(BLOCK).min(offset + len);
                let stop = ((offset + len) / BLOCK * BLOCK).max(start);
                plain[start as usize..stop as usize].fill(0);
            }
            4 => drop(disk.push_layer(whole())),
            _ => disk.flush().expect("a memory file can be synced"),
        }
    }
    let mut seen = vec![0; plain.len()];
    disk.read(0, &mut seen).expect("a memory file can be read");
    assert!(seen == plain, "the disk differs from plain bytes");
}
