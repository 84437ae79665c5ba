//! `COPY` and `ADD`: which files, and how they reach the guest.
//!
//! Files of the context are selected and digested here, before the guest is asked: the digest is part of the key. Files of
//! another stage go from one guest to the other as they are; the daemon does not look into that stream.

use std::io::{self, Write};
use std::sync::Arc;

use forkd_api::ErrorCode;
use forkd_dockerfile::Pattern;
use forkd_guest_proto::{FileKind, ListRequest, PackItem, PackRequest, UnpackRequest};
use forkd_sandboxes::error::Error;
use tokio::sync::mpsc;

use crate::config::clean;
use crate::context::{Context, Node, NodeKind};
use crate::error::BuildError;
use crate::machine::Machine;
use crate::select::missing;
pub use crate::select::{Source, digest, select};

/// Paths that a pattern may match in a guest.
const MAX_MATCHES: usize = 10_000;
const PIECE: usize = 256 << 10;
const PIECES: usize = 4;

/// Where copied files go.
#[derive(Debug, Clone)]
pub struct Destination {
    /// An absolute path.
    pub path: String,
    /// Whether sources keep their names below the path.
    pub is_folder: bool,
    /// Whether the folder has to be made.
    pub is_new: bool,
    pub owner: Option<String>,
    pub mode: Option<u32>,
}

impl Destination {
    /// A new file or folder of root.
    pub fn new(path: String, is_folder: bool) -> Self {
        Self {
            path,
            is_folder,
            is_new: is_folder,
            owner: None,
            mode: None,
        }
    }

    /// Looks at the guest. Several sources need a folder.
    pub async fn find(
        machine: &Machine,
        path: String,
        asked: &str,
        needs_folder: bool,
        owner: Option<String>,
        mode: Option<u32>,
    ) -> Result<Self, Error> {
        let found = machine.stat(&path).await?;
        let there = found.is_some_and(|info| info.kind == FileKind::Directory);
        let is_folder = there || needs_folder || asked.ends_with('/') || asked.ends_with("/.");
        Ok(Self {
            is_new: is_folder && !there && path != "/",
            path,
            is_folder,
            owner,
            mode,
        })
    }

    fn request(&self) -> UnpackRequest {
        UnpackRequest {
            path: "/".to_owned(),
            owner: self.owner.clone(),
            mode: self.mode,
        }
    }

    /// The name of a file in the archive.
    fn name(&self, name: &str) -> String {
        let path = self.path.trim_start_matches('/');
        match self.is_folder {
            true => format!("{path}/{name}").trim_start_matches('/').to_owned(),
            false => path.to_owned(),
        }
    }
}

/// Sends files of the context to a guest.
pub async fn send(
    machine: &Machine,
    context: &Context,
    sources: Vec<Source>,
    to: &Destination,
) -> Result<(), Error> {
    let (archives, files): (Vec<_>, Vec<_>) = sources
        .into_iter()
        .partition(|source| matches!(source, Source::Archive { .. }));
    if !files.is_empty() || to.is_new {
        let (context, target) = (context.clone(), to.clone());
        stream(machine, to.request(), move |out| {
            write(&context, &files, &target, out)
        })
        .await?;
    }
    for archive in archives {
        if let Source::Archive { at, size, .. } = archive {
            let context = context.clone();
            let request = UnpackRequest {
                path: to.path.clone(),
                ..to.request()
            };
            stream(machine, request, move |out| context.copy(at, size, out)).await?;
        }
    }
    Ok(())
}

/// Writes an archive with the selected files.
fn write(
    context: &Context,
    sources: &[Source],
    to: &Destination,
    out: &mut dyn Write,
) -> io::Result<()> {
    let mut archive = tar::Builder::new(out);
    if to.is_new {
        let folder = Node {
            kind: NodeKind::Folder,
            mode: 0o755,
            mtime: 0,
        };
        entry(
            &mut archive,
            context,
            to.path.trim_start_matches('/'),
            &folder,
        )?;
    }
    for source in sources {
        match source {
            Source::File { name, node } => {
                entry(&mut archive, context, &to.name(name), node)?;
            }
            Source::Folder { entries } => {
                for (name, node) in entries {
                    entry(&mut archive, context, &to.name(name), node)?;
                }
            }
            Source::Inline { name, content } => {
                let mut header = header(content.len() as u64, 0o644, 0);
                archive.append_data(&mut header, to.name(name), content.as_bytes())?;
            }
            Source::Archive { .. } => {}
        }
    }
    archive.into_inner()?.flush()
}

fn header(size: u64, mode: u32, mtime: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(tar::EntryType::Regular);
    header.set_size(size);
    header.set_mode(mode);
    header.set_mtime(mtime);
    header.set_uid(0);
    header.set_gid(0);
    header
}

fn entry(
    archive: &mut tar::Builder<&mut dyn Write>,
    context: &Context,
    name: &str,
    node: &Node,
) -> io::Result<()> {
    let mut header = header(0, node.mode, node.mtime);
    match &node.kind {
        NodeKind::Folder => {
            header.set_entry_type(tar::EntryType::Directory);
            archive.append_data(&mut header, name, io::empty())
        }
        NodeKind::Link(target) => {
            header.set_entry_type(tar::EntryType::Symlink);
            archive.append_link(&mut header, name, target)
        }
        NodeKind::File { at, size, .. } => {
            header.set_size(*size);
            let content = Content {
                context,
                at: *at,
                left: *size,
            };
            archive.append_data(&mut header, name, content)
        }
    }
}

/// The content of a file of the context.
struct Content<'a> {
    context: &'a Context,
    at: u64,
    left: u64,
}

impl io::Read for Content<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = u64::try_from(buffer.len())
            .unwrap_or(u64::MAX)
            .min(self.left);
        let part = buffer
            .get_mut(..usize::try_from(count).unwrap_or(0))
            .unwrap_or_default();
        let mut out = &mut part[..];
        self.context.copy(self.at, count, &mut out)?;
        self.at += count;
        self.left -= count;
        usize::try_from(count).map_err(io::Error::other)
    }
}

/// Unpacks an archive in a guest that a thread writes meanwhile.
pub async fn stream(
    machine: &Machine,
    request: UnpackRequest,
    produce: impl FnOnce(&mut dyn Write) -> io::Result<()> + Send + 'static,
) -> Result<(), Error> {
    let failed = || Error::agent("the files could not be put into the guest");
    let (sender, mut receiver) = mpsc::channel(PIECES);
    let producing = tokio::task::spawn_blocking(move || {
        let mut out = io::BufWriter::with_capacity(PIECE, Pipe(sender));
        produce(&mut out)?;
        out.flush()
    });
    let mut unpacking = machine.calls().await?.unpack(request).map_err(failed())?;
    while let Some(piece) = receiver.recv().await {
        unpacking.write(&piece).await.map_err(failed())?;
    }
    let produced = producing.await.map_err(|_| Error::Task)?;
    produced.map_err(Error::io("read", "the context"))?;
    unpacking.finish().await.map_err(failed())?;
    Ok(())
}

struct Pipe(mpsc::Sender<Vec<u8>>);

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let sent = self.0.blocking_send(bytes.to_vec());
        sent.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Copies files of one guest to another.
pub async fn between(
    from: &Machine,
    paths: &[String],
    machine: &Machine,
    to: &Destination,
    line: u32,
) -> Result<(), BuildError> {
    let mut items = Vec::new();
    for path in paths {
        let found = expanded(from, path).await?;
        if found.is_empty() {
            return Err(missing(line, path, "the other stage"));
        }
        for path in found {
            let info = from.stat(&path).await?;
            let info = info.ok_or_else(|| missing(line, &path, "the other stage"))?;
            let name = path.rsplit('/').next().unwrap_or_default();
            items.push(PackItem {
                to: match info.kind {
                    FileKind::Directory => to.path.trim_start_matches('/').to_owned(),
                    _ => to.name(name),
                },
                from: path,
            });
        }
    }
    let failed = || Error::agent("the files of the other stage could not be copied");
    let request = PackRequest {
        items,
        one_file_system: false,
        exclude: vec!["/proc".into(), "/sys".into(), "/dev".into()],
    };
    if to.is_new {
        let (target, context) = (to.clone(), Context::empty()?);
        stream(machine, to.request(), move |out| {
            write(&context, &[], &target, out)
        })
        .await?;
    }
    let mut packing = from.calls().await?.pack(request).map_err(failed())?;
    let mut unpacking = machine
        .calls()
        .await?
        .unpack(to.request())
        .map_err(failed())?;
    while let Some(piece) = packing.next().await.map_err(failed())? {
        unpacking.write(&piece).await.map_err(failed())?;
    }
    unpacking.finish().await.map_err(failed())?;
    Ok(())
}

/// Paths of a guest that a path or pattern stands for.
async fn expanded(machine: &Machine, path: &str) -> Result<Vec<String>, Error> {
    let path = clean(path);
    if !Pattern::is_pattern(&path) {
        return Ok(vec![path]);
    }
    let mut found = vec![String::new()];
    for part in path.split('/').filter(|part| !part.is_empty()) {
        let pattern = match Pattern::is_pattern(part) {
            true => Pattern::of_paths(part),
            false => None,
        };
        let Some(pattern) = pattern else {
            for one in &mut found {
                one.push('/');
                one.push_str(part);
            }
            continue;
        };
        let mut next = Vec::new();
        for folder in &found {
            let path = match folder.is_empty() {
                true => "/".to_owned(),
                false => folder.clone(),
            };
            let is_folder = machine.stat(&path).await?;
            if !is_folder.is_some_and(|info| info.kind == FileKind::Directory) {
                continue;
            }
            let (entries, _) = machine
                .calls()
                .await?
                .list(ListRequest {
                    path: path.clone(),
                    depth: 1,
                    limit: None,
                    attributes: None,
                })
                .await
                .map_err(Error::agent(format!("{path} cannot be listed")))?;
            let names = entries.into_iter().map(|entry| entry.path);
            let names = names.filter(|name| pattern.matches(name));
            next.extend(names.map(|name| format!("{folder}/{name}")));
            if next.len() > MAX_MATCHES {
                return Err(Error::refused(
                    ErrorCode::TooLarge,
                    format!("a pattern matches more than {MAX_MATCHES} files"),
                ));
            }
        }
        next.sort();
        found = next;
    }
    Ok(found)
}

/// Shared by the tests and by steps that need no files.
impl Context {
    pub(crate) fn empty() -> Result<Self, Error> {
        let file = std::fs::File::open("/dev/null").map_err(Error::io("open", "/dev/null"))?;
        Ok(Self::of(Arc::new(file), std::collections::BTreeMap::new()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::tests::context;

    fn copy(line: &str) -> forkd_dockerfile::Copy {
        let file = forkd_dockerfile::parse(&format!("FROM a\n{line}\n")).unwrap();
        match &file.stages[0].instructions[0].kind {
            forkd_dockerfile::Kind::Copy(copy) => copy.clone(),
            other => panic!("{other:?}"),
        }
    }

    fn names(sources: &[Source], to: &Destination) -> Vec<String> {
        let context = Context::empty().unwrap();
        let mut out = Vec::new();
        // Contents are not read: the files of this context are empty.
        write(&context, sources, to, &mut out).unwrap();
        let mut archive = tar::Archive::new(out.as_slice());
        let entries = archive.entries().unwrap();
        entries
            .map(|entry| entry.unwrap().path().unwrap().display().to_string())
            .collect()
    }

    fn folder(path: &str) -> Destination {
        Destination {
            path: path.into(),
            is_folder: true,
            is_new: true,
            owner: None,
            mode: None,
        }
    }

    #[test]
    fn sources_are_selected_and_named() {
        let files = context(&[
            ("a.txt", ""),
            ("d/b.txt", ""),
            ("d/e/c.md", ""),
            ("z.md", ""),
        ]);
        let selected = |line: &str| select(&files, &copy(line), 2);
        let of = |line: &str| names(&selected(line).unwrap(), &folder("/to"));
        assert_eq!(
            of("COPY . /to/"),
            [
                "to",
                "to/a.txt",
                "to/d",
                "to/d/b.txt",
                "to/d/e",
                "to/d/e/c.md",
                "to/z.md"
            ]
        );
        assert_eq!(of("COPY d /to/"), ["to", "to/b.txt", "to/e", "to/e/c.md"]);
        assert_eq!(of("COPY *.txt *.md /to/"), ["to", "to/a.txt", "to/z.md"]);
        assert_eq!(of("COPY --exclude=*.md . /to/").len(), 6);
        assert_eq!(of("COPY ../a.txt /to/"), ["to", "to/a.txt"]);
        let one = Destination {
            is_folder: false,
            is_new: false,
            ..folder("/x/y")
        };
        assert_eq!(names(&selected("COPY a.txt /x/y").unwrap(), &one), ["x/y"]);
        let error = selected("COPY nothing /to/").unwrap_err();
        assert_eq!(
            (error.line, error.error.code()),
            (Some(2), ErrorCode::FileNotFound)
        );
        assert!(selected("COPY *.c /to/").is_err());
    }
}
