//! The files that a client sends along: an index of a tar archive that lies in a file.
//!
//! The archive is read once, to its end, when it has arrived. Names, kinds, sizes and digests stay in memory; contents stay
//! in the file. Names are relative, without `.` and `..`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use forkd_api::{BuildImage, ErrorCode};
use forkd_sandboxes::error::Error;
use tar::EntryType;

/// Files and folders of a context.
const MAX_ENTRIES: usize = 500_000;
/// Bytes of all names together.
const MAX_NAMES: usize = 64 << 20;
/// Bytes of the first entry.
const MAX_REQUEST: u64 = 8 << 20;
/// Name of the first entry.
pub const REQUEST: &str = "build.json";
/// The folder of all other entries.
pub const FILES: &str = "context/";

/// The context of a build.
#[derive(Debug, Clone)]
pub struct Context {
    file: Arc<File>,
    nodes: Arc<BTreeMap<String, Node>>,
}

/// A file, folder or link of the context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    pub kind: NodeKind,
    pub mode: u32,
    pub mtime: u64,
}

/// The kind of a [`Node`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeKind {
    File {
        /// Where the content begins in the archive.
        at: u64,
        size: u64,
        digest: [u8; 32],
    },
    Folder,
    Link(String),
}

fn bad(message: impl Into<String>) -> Error {
    Error::refused(ErrorCode::InvalidRequest, message)
}

impl Context {
    /// Reads an archive: the request, then the files.
    pub fn read(file: File) -> Result<(BuildImage, Self), Error> {
        let malformed = |error: io::Error| bad(format!("the archive is malformed: {error}"));
        let mut nodes = BTreeMap::new();
        let mut request = None;
        let mut names = 0;
        let mut archive = tar::Archive::new(io::BufReader::with_capacity(256 << 10, &file));
        for entry in archive.entries().map_err(malformed)? {
            let mut entry = entry.map_err(malformed)?;
            let name = entry.path_bytes().into_owned();
            let name = String::from_utf8(name).map_err(|_| bad("a name is not UTF-8"))?;
            if request.is_none() {
                if name != REQUEST || entry.size() > MAX_REQUEST {
                    return Err(bad(format!("the first entry of the archive is {REQUEST}")));
                }
                let parsed: BuildImage = serde_json::from_reader(&mut entry)
                    .map_err(|error| bad(format!("{REQUEST} is malformed: {error}")))?;
                request = Some(parsed);
                continue;
            }
            let Some(name) = inside(&name)? else { continue };
            names += name.len();
            if nodes.len() >= MAX_ENTRIES || names > MAX_NAMES {
                return Err(Error::refused(
                    ErrorCode::TooLarge,
                    format!("the context has more than {MAX_ENTRIES} files"),
                ));
            }
            let node = node(&mut entry, &name)?;
            nodes.insert(name, node);
        }
        drop(archive);
        let request = request.ok_or_else(|| bad("the archive is empty"))?;
        add_folders(&mut nodes)?;
        Ok((request, Self::of(Arc::new(file), nodes)))
    }

    pub(crate) fn of(file: Arc<File>, nodes: BTreeMap<String, Node>) -> Self {
        Self {
            file,
            nodes: Arc::new(nodes),
        }
    }

    pub fn get(&self, path: &str) -> Option<&Node> {
        self.nodes.get(path)
    }

    /// Every name that a pattern could match.
    pub fn names(&self) -> impl Iterator<Item = &String> {
        self.nodes.keys()
    }

    /// Everything below a folder, as names relative to it. The empty name is the whole context.
    pub fn below(&self, folder: &str) -> impl Iterator<Item = (&str, &Node)> {
        let prefix = match folder.is_empty() {
            true => String::new(),
            false => format!("{folder}/"),
        };
        let start = prefix.clone();
        self.nodes
            .range(start..)
            .map_while(move |(name, node)| Some((name.strip_prefix(prefix.as_str())?, node)))
    }

    /// Copies the content of a file.
    pub fn copy(&self, at: u64, size: u64, out: &mut dyn Write) -> io::Result<()> {
        let mut buffer = vec![0; 128 << 10];
        let mut done = 0;
        while done < size {
            let want = usize::try_from(size - done)
                .unwrap_or(usize::MAX)
                .min(buffer.len());
            let part = buffer.get_mut(..want).unwrap_or_default();
            self.file.read_exact_at(part, at + done)?;
            out.write_all(part)?;
            done += want as u64;
        }
        Ok(())
    }

    /// The first bytes of a file.
    pub fn start(&self, at: u64, size: u64) -> io::Result<Vec<u8>> {
        let mut start = vec![0; usize::try_from(size.min(512)).unwrap_or(0)];
        self.file.read_exact_at(&mut start, at)?;
        Ok(start)
    }
}

/// The name of an entry in the context; none for the folder itself.
fn inside(name: &str) -> Result<Option<String>, Error> {
    let outside = || {
        let shown: String = name.chars().take(80).collect();
        bad(format!("{shown:?} is not a file of the context"))
    };
    let rest = name.strip_prefix(FILES).ok_or_else(outside)?;
    let mut parts = Vec::new();
    for part in rest.split('/') {
        match part {
            "" | "." => {}
            ".." => return Err(outside()),
            part if part.contains('\0') => return Err(outside()),
            part => parts.push(part),
        }
    }
    Ok((!parts.is_empty()).then(|| parts.join("/")))
}

fn node<R: Read>(entry: &mut tar::Entry<'_, R>, name: &str) -> Result<Node, Error> {
    let malformed = |error: io::Error| bad(format!("{name:.80} is malformed: {error}"));
    let header = entry.header();
    let mode = header.mode().map_err(malformed)? & 0o7777;
    let mtime = header.mtime().unwrap_or(0);
    let kind = match header.entry_type() {
        EntryType::Directory => NodeKind::Folder,
        EntryType::Symlink => {
            let target = entry.link_name_bytes().unwrap_or_default();
            let target = String::from_utf8(target.into_owned());
            NodeKind::Link(target.map_err(|_| bad(format!("the link {name:.80} is not UTF-8")))?)
        }
        EntryType::Regular | EntryType::Continuous => {
            let (at, size) = (entry.raw_file_position(), entry.size());
            let mut hasher = blake3::Hasher::new();
            io::copy(entry, &mut hasher).map_err(malformed)?;
            NodeKind::File {
                at,
                size,
                digest: *hasher.finalize().as_bytes(),
            }
        }
        _ => {
            return Err(bad(format!(
                "{name:.80} is neither a file, a folder nor a link"
            )));
        }
    };
    Ok(Node { kind, mode, mtime })
}

/// Adds folders that the archive does not name, and refuses files below files.
fn add_folders(nodes: &mut BTreeMap<String, Node>) -> Result<(), Error> {
    let mut missing = Vec::new();
    for name in nodes.keys() {
        let mut rest = name.as_str();
        while let Some((folder, _)) = rest.rsplit_once('/') {
            match nodes.get(folder).map(|node| &node.kind) {
                Some(NodeKind::Folder) => break,
                Some(_) => return Err(bad(format!("{folder:.80} is no folder"))),
                None => missing.push(folder.to_owned()),
            }
            rest = folder;
        }
    }
    for folder in missing {
        nodes.entry(folder).or_insert(Node {
            kind: NodeKind::Folder,
            mode: 0o755,
            mtime: 0,
        });
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// An archive with these files.
    pub fn archive(files: &[(&str, &str)]) -> Vec<u8> {
        let mut archive = tar::Builder::new(Vec::new());
        let mut add = |name: &str, content: &[u8]| {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            archive.append_data(&mut header, name, content).unwrap();
        };
        let request = BuildImage {
            name: "x".into(),
            ..BuildImage::default()
        };
        add(REQUEST, &serde_json::to_vec(&request).unwrap());
        for (name, content) in files {
            add(&format!("{FILES}{name}"), content.as_bytes());
        }
        archive.into_inner().unwrap()
    }

    fn read(bytes: &[u8]) -> Result<(BuildImage, Context), Error> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        io::Seek::rewind(&mut file).unwrap();
        Context::read(file)
    }

    pub fn context(files: &[(&str, &str)]) -> Context {
        read(&archive(files)).unwrap().1
    }

    #[test]
    fn files_are_found_with_their_folders() {
        let context = context(&[("a/b/c", "text"), ("d", "")]);
        let names: Vec<_> = context.names().collect();
        assert_eq!(names, ["a", "a/b", "a/b/c", "d"]);
        let below: Vec<_> = context.below("a").map(|(name, _)| name).collect();
        assert_eq!(below, ["b", "b/c"]);
        let Some(Node {
            kind: NodeKind::File { at, size, digest },
            ..
        }) = context.get("a/b/c")
        else {
            panic!()
        };
        assert_eq!(digest, blake3::hash(b"text").as_bytes());
        let mut out = Vec::new();
        context.copy(*at, *size, &mut out).unwrap();
        assert_eq!(out, b"text");
    }

    #[test]
    fn hostile_archives_are_refused() {
        assert!(read(&[]).is_err());
        assert!(read(&archive(&[("a", ""), ("a/b", "")])).is_err());
        let good = archive(&[("a", "x")]);
        assert!(read(&good[..good.len() - 1200]).is_err());
        let mut link = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_size(0);
        link.append_data(&mut header, "context/a", io::empty())
            .unwrap();
        assert!(read(&link.into_inner().unwrap()).is_err());
        for name in ["context/../x", "x", "/context/a", "context/a/../../b"] {
            assert!(inside(name).is_err(), "{name}");
        }
        assert_eq!(inside("context/./a//b/").unwrap().as_deref(), Some("a/b"));
        assert_eq!(inside("context/").unwrap(), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(at in 0usize..2000, byte: u8) {
            let mut bytes = archive(&[("a", "text"), ("b/c", "more")]);
            let at = at % bytes.len();
            bytes[at] = byte;
            let _ = read(&bytes);
        }
    }
}
