//! Writes a [`Tree`] as an ext4 file system into a plain file.
//!
//! The writer mounts nothing. e2fsck checks the result; an image with faults is never used.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use forkd_types::MiB;
use mkext4::sink::FileSink;
use mkext4::{FsBuilder, InodeCount, InodeHandle, Options, ROOT, SpecialKind};
use thiserror::Error;

use super::tree::{Inode, Meta, Node, Tree};
use crate::tools::{self, ToolError};

const BLOCK: u64 = 4096;
/// Lower bound on free inodes for the guest.
const SPARE_INODES: u32 = 16_384;

/// Why a disk could not be written.
#[derive(Debug, Error)]
pub enum Ext4Error {
    #[error("the image needs at least {needed} MiB, and disk_mib is {given}")]
    TooSmall {
        /// Bytes that the content needs.
        needed: u64,
        /// MiB that the recipe allows.
        given: u32,
    },
    /// The file cannot be written, or the tree does not fit the format.
    #[error("the file system {} cannot be written", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: mkext4::Error,
    },
    #[error("e2fsck found faults in the file system {}", path.display())]
    Unsound {
        path: PathBuf,
        #[source]
        source: ToolError,
    },
}

/// Parameters of the file system.
#[derive(Debug, Clone)]
pub struct Disk {
    pub size: MiB,
    pub uuid: [u8; 16],
    /// The label. At most 16 bytes are used.
    pub label: String,
    /// Time of all files without one of their own, in seconds since 1970.
    pub epoch: i64,
}

/// Writes the tree to a new file and checks it with e2fsck.
pub fn write(tree: &Tree, disk: &Disk, path: &Path) -> Result<(), Ext4Error> {
    check_size(tree, disk)?;
    write_image(tree, disk, path).map_err(|source| Ext4Error::Write {
        path: path.to_owned(),
        source,
    })?;
    let mut check = Command::new("e2fsck");
    check.arg("-fn").arg(path);
    // Debian keeps it where the path of ordinary users does not lead.
    check.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    tools::output(&mut check).map_err(|source| Ext4Error::Unsound {
        path: path.to_owned(),
        source,
    })?;
    Ok(())
}

/// Upper bound on the blocks and inodes of the tree.
fn check_size(tree: &Tree, disk: &Disk) -> Result<(), Ext4Error> {
    let mut blocks: u64 = 0;
    for (_, node) in tree.iter() {
        blocks += match node {
            Node::File(inode) => tree
                .file(*inode)
                .map_or(0, |file| file.content.len().div_ceil(BLOCK)),
            _ => 1,
        };
    }
    let metadata = u64::from(inodes(tree, disk)) * 256 / BLOCK;
    let total = disk.size.bytes() / BLOCK;
    let journal = (total / 32).clamp(1024, 262_144);
    let needed = (blocks + metadata + journal) * BLOCK;
    if needed > disk.size.bytes() {
        return Err(Ext4Error::TooSmall {
            needed: needed.div_ceil(1 << 20),
            given: disk.size.0,
        });
    }
    Ok(())
}

fn inodes(tree: &Tree, disk: &Disk) -> u32 {
    let by_size = disk.size.bytes() / 16_384;
    let by_content = tree.iter().count() as u64 + u64::from(SPARE_INODES);
    u32::try_from(by_size.max(by_content)).unwrap_or(u32::MAX)
}

fn write_image(tree: &Tree, disk: &Disk, path: &Path) -> Result<(), mkext4::Error> {
    let mut options = Options::new(disk.size.bytes(), disk.uuid, disk.epoch);
    options.label = Some(label(&disk.label));
    options.inodes = InodeCount::Exact(inodes(tree, disk));
    // Reserved blocks protect root from users who fill a disk. In a guest, programs usually run as root.
    options.reserved_percent = 0;
    let mut declared = Declared {
        builder: FsBuilder::new(options)?,
        folders: BTreeMap::from([(String::new(), ROOT)]),
        files: BTreeMap::new(),
        order: Vec::new(),
        tree,
    };
    for (path, node) in tree.iter() {
        declared.add(path, node)?;
    }
    let order = declared.order;
    let layout = declared.builder.seal()?;
    let sink = FileSink::create(path, disk.size.bytes())?;
    let mut writer = layout.writer(sink)?;
    for (inode, handle) in order {
        if let Some(file) = tree.file(inode).filter(|file| !file.content.is_empty()) {
            writer.fill(handle, &mut file.content.reader())?;
        }
    }
    writer.finish()?;
    Ok(())
}

fn label(text: &str) -> String {
    let mut label = String::new();
    for c in text.chars() {
        if label.len() + c.len_utf8() > 16 {
            break;
        }
        label.push(c);
    }
    label
}

struct Declared<'a> {
    builder: FsBuilder,
    folders: BTreeMap<String, InodeHandle>,
    files: BTreeMap<Inode, InodeHandle>,
    order: Vec<(Inode, InodeHandle)>,
    tree: &'a Tree,
}

impl Declared<'_> {
    fn add(&mut self, path: &str, node: &Node) -> Result<(), mkext4::Error> {
        if path.is_empty() {
            if let Node::Directory(meta) = node {
                self.builder.set_meta(ROOT, convert(*meta))?;
            }
            return Ok(());
        }
        // e2fsck makes one where there is none; the writer brings its own.
        if path == "lost+found" {
            return Ok(());
        }
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        let parent = *self.folders.get(folder).ok_or_else(|| {
            let message = format!("{path} has no folder");
            mkext4::Error::Io(io::Error::new(io::ErrorKind::NotFound, message))
        })?;
        let handle = match node {
            Node::Directory(meta) => {
                let handle = self.builder.mkdir(parent, name, convert(*meta))?;
                self.folders.insert(path.to_owned(), handle);
                handle
            }
            Node::File(inode) => match self.add_file(parent, name, *inode)? {
                Some(handle) => handle,
                None => return Ok(()),
            },
            Node::Symlink(meta, target) => {
                self.builder.symlink(parent, name, target, convert(*meta))?
            }
            Node::Character(meta, major, minor) => {
                let (major, minor) = (*major, *minor);
                let kind = SpecialKind::Char { major, minor };
                self.builder.mknod(parent, name, convert(*meta), kind)?
            }
            Node::Block(meta, major, minor) => {
                let (major, minor) = (*major, *minor);
                let kind = SpecialKind::Block { major, minor };
                self.builder.mknod(parent, name, convert(*meta), kind)?
            }
            Node::Fifo(meta) => {
                let kind = SpecialKind::Fifo;
                self.builder.mknod(parent, name, convert(*meta), kind)?
            }
        };
        for (attribute, value) in self.tree.xattrs(path) {
            self.builder.set_xattr(handle, attribute, value)?;
        }
        Ok(())
    }

    /// Adds a file, or another name of a file that was added before.
    fn add_file(
        &mut self,
        parent: InodeHandle,
        name: &str,
        inode: Inode,
    ) -> Result<Option<InodeHandle>, mkext4::Error> {
        if let Some(handle) = self.files.get(&inode) {
            self.builder.hardlink(parent, name, *handle)?;
            return Ok(None);
        }
        let Some(file) = self.tree.file(inode) else {
            return Ok(None);
        };
        let meta = convert(file.meta);
        let handle = self.builder.file(parent, name, meta, file.content.len())?;
        self.files.insert(inode, handle);
        self.order.push((inode, handle));
        Ok(Some(handle))
    }
}

fn convert(meta: Meta) -> mkext4::Meta {
    mkext4::Meta::new(meta.mode, meta.uid, meta.gid, (meta.mtime, 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::root::tree::Content;

    fn disk() -> Disk {
        Disk {
            size: MiB(64),
            uuid: [7; 16],
            label: "a label that is too long".into(),
            epoch: 1_700_000_000,
        }
    }

    fn tree() -> Tree {
        let mut tree = Tree::default();
        tree.put_text("etc/hostname", 0o644, "forkd\n").unwrap();
        tree.link("etc/name", "etc/hostname").unwrap();
        tree.put_text("etc/empty", 0o600, "").unwrap();
        tree.put("bin", Node::Symlink(Meta::root(0o777), "usr/bin".into()))
            .unwrap();
        tree.put("dev/null", Node::Character(Meta::root(0o666), 1, 3))
            .unwrap();
        tree.put("lost+found", Node::Directory(Meta::root(0o700)))
            .unwrap();
        let large: Vec<u8> = (0..3_000_000_u32).map(|n| n as u8).collect();
        tree.put_file("large", Meta::root(0o644), Content::Inline(large.into()))
            .unwrap();
        tree.set_xattr("etc/hostname", "user.note", b"x").unwrap();
        tree
    }

    #[test]
    fn what_is_written_is_sound_and_can_be_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("root.ext4");
        write(&tree(), &disk(), &path).unwrap();
        let image = std::fs::read(&path).unwrap();
        let fs = mkext4::reader::Fs::open(&image[..]).unwrap();
        let read = |path: &str| fs.read_file(fs.resolve(path).unwrap()).unwrap();
        assert_eq!(read("/etc/hostname"), b"forkd\n");
        assert_eq!(read("/etc/empty"), b"");
        assert_eq!(read("/large").len(), 3_000_000);
        assert_eq!(
            fs.resolve("/etc/name").unwrap(),
            fs.resolve("/etc/hostname").unwrap()
        );
        assert_eq!(
            fs.xattrs(fs.resolve("/etc/hostname").unwrap())
                .unwrap()
                .len(),
            1
        );
    }

    #[test]
    fn the_same_tree_gives_the_same_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let files = ["a", "b"].map(|name| {
            let path = folder.path().join(name);
            write(&tree(), &disk(), &path).unwrap();
            crate::digest::of_file(&path).unwrap()
        });
        assert_eq!(files[0], files[1]);
    }

    #[test]
    fn a_disk_that_is_too_small_says_what_it_takes() {
        let mut tree = tree();
        let zeros: Vec<u8> = vec![0; 80 << 20];
        tree.put_file("huge", Meta::root(0o644), Content::Inline(zeros.into()))
            .unwrap();
        let error = write(&tree, &disk(), Path::new("/dev/null/x")).unwrap_err();
        assert!(
            matches!(error, Ext4Error::TooSmall { needed, given: 64 } if needed > 80),
            "{error}"
        );
    }
}
