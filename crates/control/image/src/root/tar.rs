//! Reads a tar archive into a [`Tree`].
//!
//! The contents of files stay in the archive: the tree refers to offsets in it. Entries that a root cannot
//! contain are errors.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tar::{Archive, Entry, EntryType};
use thiserror::Error;

use super::tree::{Content, Meta, Node, Tree, TreeError};

/// The prefix of extended attributes in tar archives.
const XATTR: &str = "SCHILY.xattr.";

/// An archive that is rejected as a root.
#[derive(Debug, Error)]
#[error("the archive {} is not a root file system", path.display())]
pub struct TarError {
    pub path: PathBuf,
    #[source]
    pub source: Problem,
}

/// Why an archive is rejected.
#[derive(Debug, Error)]
pub enum Problem {
    #[error("it cannot be read")]
    Read(#[from] io::Error),
    #[error("it has a name that is not UTF-8: {name}")]
    NotText {
        /// The name, with invalid characters replaced.
        name: String,
    },
    /// An entry of a kind that a root does not contain.
    #[error("{name} has kind {kind:?}, which is not allowed in a root")]
    OddEntry { name: String, kind: EntryType },
    #[error("an entry is out of place")]
    Tree(#[from] TreeError),
}

/// Reads an uncompressed archive.
pub fn read(path: &Path) -> Result<Tree, TarError> {
    let mut tree = Tree::default();
    read_into(&mut tree, path)?;
    Ok(tree)
}

/// Reads an uncompressed archive over what is in a tree.
pub fn read_into(tree: &mut Tree, path: &Path) -> Result<(), TarError> {
    read_entries(tree, path).map_err(|source| TarError {
        path: path.to_owned(),
        source,
    })
}

fn read_entries(tree: &mut Tree, path: &Path) -> Result<(), Problem> {
    let file = Arc::new(File::open(path)?);
    let mut archive = Archive::new(&*file);
    for entry in archive.entries_with_seek()? {
        add(tree, &file, entry?)?;
    }
    Ok(())
}

fn add(tree: &mut Tree, file: &Arc<File>, entry: Entry<'_, &File>) -> Result<(), Problem> {
    let name = text(&entry.path_bytes())?;
    put(tree, file, &name, entry, None)
}

/// Puts an entry at `name`. `content` stands for the bytes of a file that do not lie in the archive as they are.
pub(super) fn put(
    tree: &mut Tree,
    file: &Arc<File>,
    name: &str,
    mut entry: Entry<'_, &File>,
    content: Option<Content>,
) -> Result<(), Problem> {
    let xattrs = xattrs(&mut entry)?;
    let header = entry.header();
    let meta = Meta {
        mode: (header.mode()? & 0o7777) as u16,
        uid: id(header.uid()?)?,
        gid: id(header.gid()?)?,
        mtime: i64::try_from(header.mtime()?).unwrap_or(0),
    };
    match (header.entry_type(), content) {
        (_, Some(content)) => tree.put_file(name, meta, content)?,
        (EntryType::Regular | EntryType::Continuous, None) => {
            let content = Content::Part {
                file: file.clone(),
                offset: entry.raw_file_position(),
                length: entry.size(),
            };
            tree.put_file(name, meta, content)?;
        }
        (EntryType::Link, None) => {
            let target = tree.through_links(&super::tree::normalise(&link_target(&entry)?)?)?;
            tree.link(name, &target)?;
        }
        (EntryType::Symlink, None) => tree.put(name, Node::Symlink(meta, link_target(&entry)?))?,
        (EntryType::Directory, None) => tree.put(name, Node::Directory(meta))?,
        (EntryType::Fifo, None) => tree.put(name, Node::Fifo(meta))?,
        (EntryType::Char, None) => {
            let (major, minor) = device(&entry)?;
            tree.put(name, Node::Character(meta, major, minor))?;
        }
        (EntryType::Block, None) => {
            let (major, minor) = device(&entry)?;
            tree.put(name, Node::Block(meta, major, minor))?;
        }
        // Settings for the whole archive, which say nothing about a file.
        (EntryType::XGlobalHeader, None) => return Ok(()),
        (kind, None) => {
            let name = name.to_owned();
            return Err(Problem::OddEntry { name, kind });
        }
    }
    for (attribute, value) in xattrs {
        tree.set_xattr(name, &attribute, &value)?;
    }
    Ok(())
}

pub(super) fn text(bytes: &[u8]) -> Result<String, Problem> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok(text.to_owned()),
        Err(_) => Err(Problem::NotText {
            name: String::from_utf8_lossy(bytes).chars().take(200).collect(),
        }),
    }
}

fn id(number: u64) -> io::Result<u32> {
    u32::try_from(number).map_err(|_| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("{number} is not a user or group"),
        )
    })
}

fn link_target(entry: &Entry<'_, &File>) -> Result<String, Problem> {
    match entry.link_name_bytes() {
        Some(bytes) => text(&bytes),
        None => Err(io::Error::new(io::ErrorKind::InvalidData, "a link leads nowhere").into()),
    }
}

fn device(entry: &Entry<'_, &File>) -> Result<(u32, u32), Problem> {
    let header = entry.header();
    Ok((
        header.device_major()?.unwrap_or(0),
        header.device_minor()?.unwrap_or(0),
    ))
}

fn xattrs(entry: &mut Entry<'_, &File>) -> Result<Vec<(String, Vec<u8>)>, Problem> {
    let mut attributes = Vec::new();
    let Some(extensions) = entry.pax_extensions()? else {
        return Ok(attributes);
    };
    for extension in extensions {
        let extension = extension?;
        let name = extension.key().ok().and_then(|key| key.strip_prefix(XATTR));
        if let Some(name) = name {
            attributes.push((name.to_owned(), extension.value_bytes().to_owned()));
        }
    }
    Ok(attributes)
}

#[cfg(test)]
mod tests {
    use tar::{Builder, Header};

    use super::*;

    fn archive(fill: impl FnOnce(&mut Builder<Vec<u8>>)) -> tempfile::NamedTempFile {
        let mut builder = Builder::new(Vec::new());
        fill(&mut builder);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), builder.into_inner().unwrap()).unwrap();
        file
    }

    fn header(kind: EntryType, size: u64) -> Header {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(size);
        header.set_mode(0o104_755);
        header.set_uid(7);
        header.set_gid(8);
        header.set_mtime(1000);
        header
    }

    #[test]
    fn every_kind_of_entry_arrives() {
        let file = archive(|tar| {
            tar.append_data(&mut header(EntryType::Directory, 0), "./usr/", &b""[..])
                .unwrap();
            let attribute = [("SCHILY.xattr.security.capability", &b"\x01\0"[..])];
            tar.append_pax_extensions(attribute).unwrap();
            tar.append_data(&mut header(EntryType::Regular, 5), "./usr/a", &b"hello"[..])
                .unwrap();
            tar.append_link(&mut header(EntryType::Link, 0), "./usr/b", "./usr/a")
                .unwrap();
            tar.append_link(&mut header(EntryType::Symlink, 0), "./bin", "usr/bin")
                .unwrap();
            let mut console = header(EntryType::Char, 0);
            console.set_device_major(5).unwrap();
            console.set_device_minor(1).unwrap();
            tar.append_data(&mut console, "./dev/console", &b""[..])
                .unwrap();
            tar.append_data(&mut header(EntryType::Fifo, 0), "./run/pipe", &b""[..])
                .unwrap();
        });
        let tree = read(file.path()).unwrap();
        assert_eq!(tree.read("usr/a").unwrap(), b"hello");
        assert_eq!(tree.get("usr/b"), tree.get("usr/a"));
        let Some(Node::File(inode)) = tree.get("usr/a") else {
            panic!("usr/a is not a file");
        };
        let meta = tree.file(*inode).unwrap().meta;
        assert_eq!(
            (meta.mode, meta.uid, meta.gid, meta.mtime),
            (0o4755, 7, 8, 1000)
        );
        assert!(matches!(tree.get("bin"), Some(Node::Symlink(_, to)) if to == "usr/bin"));
        assert!(matches!(
            tree.get("dev/console"),
            Some(Node::Character(_, 5, 1))
        ));
        assert!(matches!(tree.get("run/pipe"), Some(Node::Fifo(_))));
        let xattrs: Vec<_> = tree.xattrs("usr/a").collect();
        assert_eq!(xattrs, [("security.capability", &b"\x01\0"[..])]);
    }

    #[test]
    fn entries_that_lead_out_are_refused() {
        let file = archive(|tar| {
            let mut header = header(EntryType::Regular, 1);
            let name = b"../../etc/passwd";
            header.as_old_mut().name[..name.len()].copy_from_slice(name);
            header.set_cksum();
            tar.append(&header, &b"x"[..]).unwrap();
        });
        let error = read(file.path()).unwrap_err();
        assert!(matches!(
            error.source,
            Problem::Tree(TreeError::BadPath { .. })
        ));
    }

    #[test]
    fn a_cut_archive_is_noticed() {
        let file = archive(|tar| {
            tar.append_data(&mut header(EntryType::Regular, 5000), "a", &[1; 5000][..])
                .unwrap();
        });
        let bytes = std::fs::read(file.path()).unwrap();
        std::fs::write(file.path(), &bytes[..300]).unwrap();
        assert!(matches!(
            read(file.path()).unwrap_err().source,
            Problem::Read(_)
        ));
    }
}
