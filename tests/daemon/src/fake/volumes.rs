//! Volumes of a fake guest.
//!
//! Files below the mount of a volume lie in its top layer, so they outlive the guest. A layer holds all files of the
//! volume as of the last write: one JSON document in its first blocks, marked in the map as a real layer has it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;

use forkd_formats::layer::{BLOCK, HEADER_LEN, LayerHeader};
use serde::{Deserialize, Serialize};

use super::guest::Guest;
use super::vm::lock;

/// Prefix of the serial number of every volume.
const SERIAL: &str = "forkd-volume-";
/// Where ext4 has its superblock: the document lies behind it, so that the superblock reads as a clean one.
const BEGIN: u64 = 4096;

/// The disks that volumes are on, by slot.
#[derive(Debug, Default)]
pub(super) struct Volumes(Mutex<BTreeMap<u8, Attached>>);

#[derive(Debug)]
struct Attached {
    serial: String,
    /// The oldest first; the last is written.
    layers: Vec<File>,
    content: Content,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Content {
    /// Where it is mounted.
    path: Option<String>,
    /// By path below the mount.
    files: BTreeMap<String, Vec<u8>>,
}

impl Volumes {
    /// Puts a disk in, which the guest has mounted already if its memory comes from a cut. A disk that is not a volume is
    /// left out.
    pub fn attach(
        &self,
        slot: u8,
        serial: &str,
        layers: Vec<File>,
        mounted: bool,
    ) -> io::Result<()> {
        if !serial.starts_with(SERIAL) {
            return Ok(());
        }
        let mut content = newest(&layers)?;
        if !mounted {
            content.path = None;
        }
        let attached = Attached {
            serial: serial.to_owned(),
            layers,
            content,
        };
        lock(&self.0).insert(slot, attached);
        Ok(())
    }

    /// Mounts a disk: its files appear in the guest.
    pub fn mount(&self, serial: &str, path: &str, guest: &mut Guest) -> io::Result<bool> {
        let mut all = lock(&self.0);
        let Some(disk) = all.values_mut().find(|disk| disk.serial == serial) else {
            return Ok(false);
        };
        disk.content.path = Some(path.to_owned());
        for (name, content) in &disk.content.files {
            guest
                .files
                .insert(format!("{path}/{name}"), content.clone());
        }
        Ok(true)
    }

    /// Writes the files below the mounts to their disks.
    pub fn store(&self, guest: &Guest) -> io::Result<()> {
        for disk in lock(&self.0).values_mut() {
            let Some(path) = &disk.content.path else {
                continue;
            };
            let prefix = format!("{path}/");
            let below = guest.files.iter().filter_map(|(name, content)| {
                let name = name.strip_prefix(&prefix)?;
                Some((name.to_owned(), content.clone()))
            });
            let files: BTreeMap<String, Vec<u8>> = below.collect();
            if files != disk.content.files {
                disk.content.files = files;
                let top = disk.layers.last().ok_or(io::ErrorKind::NotFound)?;
                write(top, &disk.content)?;
            }
        }
        Ok(())
    }

    /// How many layers each volume has, by slot.
    pub fn depths(&self) -> BTreeMap<u8, usize> {
        let all = lock(&self.0);
        all.iter()
            .map(|(slot, disk)| (*slot, disk.layers.len()))
            .collect()
    }

    /// Goes back to an earlier [`Self::depths`]. New layers come next.
    pub fn rewind(&self, depths: &BTreeMap<u8, usize>) -> io::Result<()> {
        for (slot, disk) in lock(&self.0).iter_mut() {
            disk.layers.truncate(depths.get(slot).copied().unwrap_or(0));
            disk.content = newest(&disk.layers)?;
        }
        Ok(())
    }

    /// Goes on in new layers, one for each volume in the order of the slots.
    pub fn push_layers(&self, mut layers: Vec<File>) {
        let mut all = lock(&self.0);
        let first = layers.len().saturating_sub(all.len());
        for (disk, layer) in all.values_mut().zip(layers.drain(first..)) {
            disk.layers.push(layer);
        }
    }
}

/// The content of the newest layer that has any.
fn newest(layers: &[File]) -> io::Result<Content> {
    for layer in layers.iter().rev() {
        if let Some(found) = read(layer)? {
            return Ok(found);
        }
    }
    Ok(Content::default())
}

fn header(layer: &File) -> io::Result<LayerHeader> {
    let mut page = [0; HEADER_LEN];
    layer.read_exact_at(&mut page, 0)?;
    LayerHeader::decode(&page).map_err(io::Error::other)
}

fn read(layer: &File) -> io::Result<Option<Content>> {
    let header = header(layer)?;
    let mut length = [0; 8];
    layer.read_exact_at(&mut length, header.data_offset() + BEGIN)?;
    let length = u64::from_le_bytes(length);
    if length == 0 {
        return Ok(None);
    }
    let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    layer.read_exact_at(&mut bytes, header.data_offset() + BEGIN + 8)?;
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(io::Error::other)
}

fn write(layer: &File, content: &Content) -> io::Result<()> {
    let header = header(layer)?;
    let text = serde_json::to_vec(content).map_err(io::Error::other)?;
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text);
    layer.write_all_at(&bytes, header.data_offset() + BEGIN)?;
    let blocks = (BEGIN + bytes.len() as u64).div_ceil(BLOCK);
    // Two bits for each block, 1 for data; the blocks are few.
    let map: Vec<u8> = (0..blocks.div_ceil(4)).map(|_| 0b0101_0101).collect();
    layer.write_all_at(&map, header.map_offset())?;
    layer.sync_all()
}
