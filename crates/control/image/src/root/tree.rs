//! A file system in memory: names and metadata in the tree, contents where they already are.
//!
//! Paths are text without a leading slash, and the root is the empty path. The tree never touches the file
//! system of the host, so a link in it leads nowhere.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use thiserror::Error;

/// Why a change of the tree is rejected.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum TreeError {
    #[error("{path:?} is not a path inside a root")]
    BadPath { path: String },
    #[error("{path} lies below something that is not a folder")]
    NotAFolder { path: String },
    #[error("{path} is a hard link to {target}, which is not a file in the root")]
    DanglingLink { path: String, target: String },
    #[error("{path} leads through too many symbolic links")]
    LinkLoop { path: String },
}

/// Symbolic links that are followed on the way to one path.
const MAX_LINKS: usize = 40;

/// Owner, permissions and time of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Meta {
    /// Permissions, with the set-id and sticky bits.
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    /// Modification time, seconds since 1970.
    pub mtime: i64,
}

impl Meta {
    /// Metadata of a node that belongs to root.
    pub fn root(mode: u16) -> Self {
        Self {
            mode,
            uid: 0,
            gid: 0,
            mtime: 0,
        }
    }
}

/// The bytes of a file.
#[derive(Debug, Clone)]
pub enum Content {
    /// Bytes in memory.
    Inline(Arc<[u8]>),
    /// A part of another file, such as a tar archive.
    Part {
        file: Arc<File>,
        offset: u64,
        length: u64,
    },
}

impl Content {
    pub fn len(&self) -> u64 {
        match self {
            Self::Inline(bytes) => bytes.len() as u64,
            Self::Part { length, .. } => *length,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A reader from the start.
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

/// The target of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Node {
    Directory(Meta),
    File(Inode),
    Symlink(Meta, String),
    /// A character device: major and minor number.
    Character(Meta, u32, u32),
    /// A block device: major and minor number.
    Block(Meta, u32, u32),
    Fifo(Meta),
}

/// The content of an inode.
#[derive(Debug, Clone)]
pub struct FileNode {
    pub meta: Meta,
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

/// Normalises a path: `./usr//bin/` becomes `usr/bin`. A path that leads out of the tree is an error.
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
    /// Puts a node at a path and replaces the existing one. Creates missing folders. A folder put over a
    /// folder keeps its content.
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

    /// Puts a file at a path.
    pub fn put_file(&mut self, path: &str, meta: Meta, content: Content) -> Result<(), TreeError> {
        let inode = Inode(self.files.len());
        self.files.push(FileNode { meta, content });
        self.put(path, Node::File(inode))
    }

    /// Puts a text file, owned by root.
    pub fn put_text(&mut self, path: &str, mode: u16, text: &str) -> Result<(), TreeError> {
        let content = Content::Inline(text.as_bytes().into());
        self.put_file(path, Meta::root(mode), content)
    }

    /// Adds a hard link.
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

    /// Sets an extended attribute.
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

    /// The path with every symbolic link on the way replaced by its target; the last part is taken as it is. Links lead
    /// only inside the tree: `..` at the root stays at the root, as in a guest.
    pub fn through_links(&self, path: &str) -> Result<String, TreeError> {
        let mut links = 0;
        let mut done: Vec<String> = Vec::new();
        let mut todo: Vec<String> = path.rsplit('/').map(str::to_owned).collect();
        while let Some(part) = todo.pop() {
            match part.as_str() {
                "" | "." => continue,
                ".." => {
                    done.pop();
                    continue;
                }
                _ => done.push(part),
            }
            if todo.is_empty() {
                break;
            }
            if let Some(Node::Symlink(_, target)) = self.nodes.get(&done.join("/")) {
                links += 1;
                if links > MAX_LINKS {
                    return Err(TreeError::LinkLoop {
                        path: path.to_owned(),
                    });
                }
                done.pop();
                if target.starts_with('/') {
                    done.clear();
                }
                todo.extend(target.rsplit('/').map(str::to_owned));
            }
        }
        Ok(done.join("/"))
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

    /// Removes the paths below `path` that `keep` rejects. `keep` gets full paths.
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

    /// Every path and node; a folder comes before its content.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Node)> {
        self.nodes.iter().map(|(path, node)| (path.as_str(), node))
    }

    /// The node at a path. Links are not followed.
    pub fn get(&self, path: &str) -> Option<&Node> {
        self.nodes.get(path)
    }

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

    /// Sets times after `start` to the newest time before it. Files that the build itself writes then look
    /// the same in every build.
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
