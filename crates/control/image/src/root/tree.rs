//! A file system in memory: names and metadata here, contents where they already are.
//!
//! Paths are text without a leading slash; the root is the empty path. Nothing here touches the
//! file system of the host, so that no link in a tree leads anywhere.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use thiserror::Error;

/// Why a tree cannot be what was asked for.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum TreeError {
    /// A path that leads out of the tree or has odd parts.
    #[error("{path:?} is not a path inside a root")]
    BadPath {
        /// The path.
        path: String,
    },
    /// Something lies below a path that is not a folder.
    #[error("{path} lies below something that is not a folder")]
    NotAFolder {
        /// The path.
        path: String,
    },
    /// A hard link to something that is not there.
    #[error("{path} is a hard link to {target}, which is not a file in the root")]
    DanglingLink {
        /// The link.
        path: String,
        /// Target of the link.
        target: String,
    },
}

/// Owner, permissions, time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Meta {
    /// Permissions, with the set-id and sticky bits.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Modification time, seconds since 1970.
    pub mtime: i64,
}

impl Meta {
    /// Something of root's.
    pub fn root(mode: u16) -> Self {
        Self {
            mode,
            uid: 0,
            gid: 0,
            mtime: 0,
        }
    }
}

/// Location of the content of a file.
#[derive(Debug, Clone)]
pub enum Content {
    /// Here.
    Inline(Arc<[u8]>),
    /// In a part of another file, such as a tar archive.
    Part {
        /// The other file.
        file: Arc<File>,
        /// Offset of the part.
        offset: u64,
        /// How long it is.
        length: u64,
    },
}

impl Content {
    /// How many bytes.
    pub fn len(&self) -> u64 {
        match self {
            Self::Inline(bytes) => bytes.len() as u64,
            Self::Part { length, .. } => *length,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads them.
    pub fn reader(&self) -> ContentReader<'_> {
        ContentReader {
            content: self,
            at: 0,
        }
    }
}

/// Reads a [`Content`] from its start.
#[derive(Debug)]
pub struct ContentReader<'a> {
    content: &'a Content,
    at: u64,
}

impl Read for ContentReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.content.len() - self.at;
        let want = buffer
            .len()
            .min(usize::try_from(left).unwrap_or(usize::MAX));
        let Some(buffer) = buffer.get_mut(..want) else {
            return Ok(0);
        };
        let read = match self.content {
            Content::Inline(bytes) => {
                let mut rest = bytes.get(self.at as usize..).unwrap_or_default();
                rest.read(buffer)?
            }
            Content::Part { file, offset, .. } => file.read_at(buffer, offset + self.at)?,
        };
        self.at += read as u64;
        Ok(read)
    }
}

/// A file's inode: hard links share one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Inode(usize);

/// The entry that a name refers to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Node {
    /// A folder.
    Directory(Meta),
    /// A file, by its inode.
    File(Inode),
    /// A symbolic link.
    Symlink(Meta, String),
    /// A character device: major and minor number.
    Character(Meta, u32, u32),
    /// A block device: major and minor number.
    Block(Meta, u32, u32),
    /// A named pipe.
    Fifo(Meta),
}

/// Content of an inode.
#[derive(Debug, Clone)]
pub struct FileNode {
    /// Owner, permissions, time.
    pub meta: Meta,
    /// The bytes.
    pub content: Content,
}

/// A file system in memory.
#[derive(Debug, Clone)]
pub struct Tree {
    nodes: BTreeMap<String, Node>,
    files: Vec<FileNode>,
    xattrs: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
}

impl Default for Tree {
    fn default() -> Self {
        Self {
            nodes: BTreeMap::from([(String::new(), Node::Directory(Meta::root(0o755)))]),
            files: Vec::new(),
            xattrs: BTreeMap::new(),
        }
    }
}

/// The tree's form of a path: `./usr//bin/` is `usr/bin`, and nothing leads out.
pub fn normalise(path: &str) -> Result<String, TreeError> {
    let bad = || TreeError::BadPath {
        path: path.chars().take(200).collect(),
    };
    let mut parts = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => return Err(bad()),
            part if part.len() > 255 || part.contains('\0') => return Err(bad()),
            part => parts.push(part),
        }
    }
    Ok(parts.join("/"))
}

fn parent(path: &str) -> Option<&str> {
    if path.is_empty() {
        return None;
    }
    Some(path.rsplit_once('/').map_or("", |(parent, _)| parent))
}

impl Tree {
    /// Puts a node at a path, over what is there. Folders on the way are made. A folder put over a
    /// folder keeps what is in it.
    pub fn put(&mut self, path: &str, node: Node) -> Result<(), TreeError> {
        let path = normalise(path)?;
        self.make_parents(&path)?;
        let replaces_folder = matches!(self.nodes.get(&path), Some(Node::Directory(_)));
        if replaces_folder && !matches!(node, Node::Directory(_)) {
            self.remove(&path);
        }
        self.xattrs.remove(&path);
        self.nodes.insert(path, node);
        Ok(())
    }

    /// Puts a file.
    pub fn put_file(&mut self, path: &str, meta: Meta, content: Content) -> Result<(), TreeError> {
        let inode = Inode(self.files.len());
        self.files.push(FileNode { meta, content });
        self.put(path, Node::File(inode))
    }

    /// Puts a file whose content is at hand.
    pub fn put_text(&mut self, path: &str, mode: u16, text: &str) -> Result<(), TreeError> {
        let content = Content::Inline(text.as_bytes().into());
        self.put_file(path, Meta::root(mode), content)
    }

    /// Gives a file a second name.
    pub fn link(&mut self, path: &str, target: &str) -> Result<(), TreeError> {
        let known = normalise(target)?;
        match self.nodes.get(&known) {
            Some(node @ (Node::File(_) | Node::Symlink(..))) => {
                let node = node.clone();
                self.put(path, node)
            }
            _ => Err(TreeError::DanglingLink {
                path: path.to_owned(),
                target: target.to_owned(),
            }),
        }
    }

    /// Gives a node an extended attribute.
    pub fn set_xattr(&mut self, path: &str, name: &str, value: &[u8]) -> Result<(), TreeError> {
        self.xattrs
            .entry(normalise(path)?)
            .or_default()
            .insert(name.to_owned(), value.to_owned());
        Ok(())
    }

    fn make_parents(&mut self, path: &str) -> Result<(), TreeError> {
        let Some(parent) = parent(path) else {
            return Ok(());
        };
        match self.nodes.get(parent) {
            Some(Node::Directory(_)) => Ok(()),
            Some(_) => Err(TreeError::NotAFolder {
                path: path.to_owned(),
            }),
            None => self.put(parent, Node::Directory(Meta::root(0o755))),
        }
    }

    /// Removes a path and everything below it. The root itself stays.
    pub fn remove(&mut self, path: &str) {
        if path.is_empty() {
            return;
        }
        self.clear(path);
        self.nodes.remove(path);
        self.xattrs.remove(path);
    }

    /// Removes everything below a path.
    pub fn clear(&mut self, path: &str) {
        self.retain_below(path, |_| false);
    }

    /// Keeps of everything below a path only what `keep` wants; it sees full paths.
    pub fn retain_below(&mut self, path: &str, keep: impl Fn(&str) -> bool) {
        let below: Vec<String> = self.below(path).map(|(path, _)| path.to_owned()).collect();
        for path in below.iter().filter(|path| !keep(path)) {
            self.nodes.remove(path);
            self.xattrs.remove(path);
        }
    }

    fn below(&self, path: &str) -> impl Iterator<Item = (&str, &Node)> {
        let prefix = if path.is_empty() {
            String::new()
        } else {
            format!("{path}/")
        };
        self.nodes
            .range(prefix.clone()..)
            .take_while(move |(path, _)| path.starts_with(&prefix))
            .filter(|(path, _)| !path.is_empty())
            .map(|(path, node)| (path.as_str(), node))
    }

    /// Every path and node, folders before what is in them.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Node)> {
        self.nodes.iter().map(|(path, node)| (path.as_str(), node))
    }

    /// The entry at a path. Links are not followed.
    pub fn get(&self, path: &str) -> Option<&Node> {
        self.nodes.get(path)
    }

    /// The file behind an inode.
    pub fn file(&self, inode: Inode) -> Option<&FileNode> {
        self.files.get(inode.0)
    }

    /// The content of the file at a path.
    pub fn read(&self, path: &str) -> io::Result<Vec<u8>> {
        let missing = || io::Error::new(io::ErrorKind::NotFound, format!("{path} is not a file"));
        let Some(Node::File(inode)) = self.nodes.get(path) else {
            return Err(missing());
        };
        let file = self.file(*inode).ok_or_else(missing)?;
        let mut bytes = Vec::new();
        file.content.reader().read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// The extended attributes of a path, sorted by name.
    pub fn xattrs(&self, path: &str) -> impl Iterator<Item = (&str, &[u8])> {
        let attributes = self.xattrs.get(path).into_iter().flatten();
        attributes.map(|(name, value)| (name.as_str(), value.as_slice()))
    }

    /// Takes times after `start` back to the newest one before it: what a build writes itself
    /// then looks the same whenever it was built.
    pub fn clamp_times(&mut self, start: i64) -> i64 {
        let mut newest = 0;
        self.for_each_meta(|meta| {
            if meta.mtime < start {
                newest = newest.max(meta.mtime);
            }
        });
        self.for_each_meta(|meta| {
            if meta.mtime >= start || meta.mtime <= 0 {
                meta.mtime = newest;
            }
        });
        newest
    }

    fn for_each_meta(&mut self, mut visit: impl FnMut(&mut Meta)) {
        for node in self.nodes.values_mut() {
            match node {
                Node::Directory(meta)
                | Node::Symlink(meta, _)
                | Node::Character(meta, ..)
                | Node::Block(meta, ..)
                | Node::Fifo(meta) => visit(meta),
                Node::File(_) => {}
            }
        }
        for file in &mut self.files {
            visit(&mut file.meta);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(tree: &Tree) -> Vec<&str> {
        tree.iter().map(|(path, _)| path).collect()
    }

    #[test]
    fn folders_on_the_way_are_made_and_come_first() {
        let mut tree = Tree::default();
        tree.put_text("/usr/lib/x", 0o644, "x").unwrap();
        tree.put_text("usr-y", 0o644, "y").unwrap();
        assert_eq!(paths(&tree), ["", "usr", "usr-y", "usr/lib", "usr/lib/x"]);
        assert_eq!(tree.read("usr/lib/x").unwrap(), b"x");
    }

    #[test]
    fn nothing_leads_out() {
        let mut tree = Tree::default();
        for path in ["../x", "a/../../x", "a\0b", &"n".repeat(256)] {
            assert!(tree.put_text(path, 0o644, "").is_err(), "{path:?}");
        }
        assert_eq!(normalise("./usr//bin/"), Ok("usr/bin".into()));
        tree.put("lib", Node::Symlink(Meta::root(0o777), "/etc".into()))
            .unwrap();
        assert_eq!(
            tree.put_text("lib/passwd", 0o644, ""),
            Err(TreeError::NotAFolder {
                path: "lib/passwd".into()
            })
        );
    }

    #[test]
    fn removing_takes_what_is_below_and_links_survive() {
        let mut tree = Tree::default();
        tree.put_text("doc/a", 0o644, "a").unwrap();
        tree.put_text("doc-b", 0o644, "b").unwrap();
        tree.link("keep", "./doc/a").unwrap();
        tree.remove("doc");
        assert_eq!(paths(&tree), ["", "doc-b", "keep"]);
        assert_eq!(tree.read("keep").unwrap(), b"a");
        assert!(tree.link("x", "gone").is_err());
        tree.remove("");
        assert_eq!(paths(&tree)[0], "");
    }

    #[test]
    fn a_file_over_a_folder_removes_it_and_a_folder_over_a_folder_does_not() {
        let mut tree = Tree::default();
        tree.put_text("a/b", 0o644, "").unwrap();
        tree.put("a", Node::Directory(Meta::root(0o700))).unwrap();
        assert_eq!(paths(&tree), ["", "a", "a/b"]);
        tree.put_text("a", 0o644, "").unwrap();
        assert_eq!(paths(&tree), ["", "a"]);
    }

    #[test]
    fn what_a_build_wrote_gets_the_time_of_the_newest_package() {
        let mut tree = Tree::default();
        for (name, mtime) in [("old", 100), ("newer", 200), ("built", 5000)] {
            let meta = Meta {
                mtime,
                ..Meta::root(0o644)
            };
            tree.put_file(name, meta, Content::Inline([].into()))
                .unwrap();
        }
        assert_eq!(tree.clamp_times(1000), 200);
        let time = |name: &str| match tree.get(name) {
            Some(Node::File(inode)) => tree.file(*inode).unwrap().meta.mtime,
            other => panic!("{other:?}"),
        };
        assert_eq!([time("old"), time("newer"), time("built")], [100, 200, 200]);
    }
}
