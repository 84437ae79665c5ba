//! Trees of files as tar streams.
//!
//! A helper thread reads or writes the files and the archive; a channel of a few pieces connects it to the stream of the
//! request, so neither side holds more than that in memory. Extended attributes travel as `SCHILY.xattr` records.

use std::collections::HashMap;
use std::fs::{self, File, Metadata};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use forkd_guest_proto::{
    AgentError, ArchiveResult, ErrorCode, PackItem, PackRequest, UnpackRequest, channel,
    frame::DATA_CHUNK,
};
use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, XattrFlags};
use tar::{Builder, EntryType, Header};
use tokio::sync::mpsc;

use super::{absolute, blocking, meta};
use crate::conn::Stream;
use crate::error;

/// Pieces between the stream and the thread.
const PIECES: usize = 4;
const XATTR: &str = "SCHILY.xattr.";
const MAX_XATTR: usize = 64 << 10;

/// Packs files into the stream of the request.
pub async fn pack(stream: &Stream, request: PackRequest) -> Result<ArchiveResult, AgentError> {
    let (sender, mut receiver) = mpsc::channel(PIECES);
    let work = tokio::task::spawn_blocking(move || {
        let out = BufWriter::with_capacity(DATA_CHUNK, Pipe(sender));
        Packer::run(&request, out)
    });
    while let Some(piece) = receiver.recv().await {
        stream
            .send_data(channel::BULK, &piece)
            .await
            .map_err(error::closed)?;
    }
    // Before the end of the channel: an archive that broke off is an error, not a short one.
    let result = work
        .await
        .map_err(|_| AgentError::new(ErrorCode::Internal, "the packing thread failed"))??;
    stream
        .send_end(channel::BULK)
        .await
        .map_err(error::closed)?;
    Ok(result)
}

/// Writes become pieces of the channel.
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

struct Packer<W: Write> {
    archive: Builder<W>,
    exclude: Vec<PathBuf>,
    one_file_system: bool,
    /// Files with several names, by device and inode.
    links: HashMap<(u64, u64), PathBuf>,
    done: ArchiveResult,
}

impl<W: Write> Packer<W> {
    fn run(request: &PackRequest, out: W) -> Result<ArchiveResult, AgentError> {
        let mut archive = Builder::new(out);
        archive.mode(tar::HeaderMode::Complete);
        let mut packer = Self {
            archive,
            exclude: request.exclude.iter().map(PathBuf::from).collect(),
            one_file_system: request.one_file_system,
            links: HashMap::new(),
            done: ArchiveResult::default(),
        };
        for item in &request.items {
            packer.item(item)?;
        }
        let failed = |error: io::Error| error::io("cannot end the archive", &error);
        let mut out = packer.archive.into_inner().map_err(failed)?;
        out.flush().map_err(failed)?;
        Ok(packer.done)
    }

    fn item(&mut self, item: &PackItem) -> Result<(), AgentError> {
        let from = absolute(&item.from)?;
        let from = fs::canonicalize(&from).map_err(|error| error::at("find", &from, &error))?;
        let to = relative(Path::new(&item.to))?;
        let found = fs::metadata(&from).map_err(|error| error::at("look at", &from, &error))?;
        let device = found.dev();
        // A list instead of recursion: the depth of a tree is in the hands of its maker.
        let mut waiting = vec![(from, to)];
        while let Some((path, name)) = waiting.pop() {
            let failed = |error: io::Error| error::at("pack", &path, &error);
            if self.exclude.contains(&path) {
                continue;
            }
            let found = fs::symlink_metadata(&path).map_err(failed)?;
            let elsewhere = self.one_file_system && found.dev() != device;
            if elsewhere && !found.is_dir() {
                continue;
            }
            self.entry(&path, &name, &found).map_err(failed)?;
            if !found.is_dir() || elsewhere {
                continue;
            }
            let mut below = fs::read_dir(&path)
                .and_then(|entries| entries.collect::<io::Result<Vec<_>>>())
                .map_err(failed)?;
            // The same tree gives the same archive. The last of the list comes first.
            below.sort_by_key(|entry| std::cmp::Reverse(entry.file_name()));
            let names = below.iter().map(fs::DirEntry::file_name);
            waiting.extend(names.map(|one| (path.join(&one), name.join(&one))));
        }
        Ok(())
    }

    fn entry(&mut self, path: &Path, name: &Path, found: &Metadata) -> io::Result<()> {
        // The root of the archive has no name.
        if name.as_os_str().is_empty() {
            return Ok(());
        }
        let kind = found.file_type();
        if kind.is_socket() {
            return Ok(());
        }
        self.done.entries += 1;
        let mut header = Header::new_gnu();
        header.set_metadata(found);
        if !kind.is_dir() && found.nlink() > 1 {
            let key = (found.dev(), found.ino());
            if let Some(first) = self.links.get(&key).cloned() {
                header.set_entry_type(EntryType::Link);
                header.set_size(0);
                return self.archive.append_link(&mut header, name, first);
            }
            self.links.insert(key, name.to_owned());
        }
        self.attributes(path)?;
        if kind.is_symlink() {
            header.set_size(0);
            let target = fs::read_link(path)?;
            return self.archive.append_link(&mut header, name, target);
        }
        if kind.is_file() {
            let size = found.len();
            header.set_size(size);
            self.done.bytes += size;
            // A file that shrinks meanwhile is filled up: the header has promised its size.
            let content = File::open(path)?.chain(io::repeat(0)).take(size);
            return self.archive.append_data(&mut header, name, content);
        }
        header.set_size(0);
        self.archive.append_data(&mut header, name, io::empty())
    }

    fn attributes(&mut self, path: &Path) -> io::Result<()> {
        let mut names = vec![0; MAX_XATTR];
        let Ok(length) = rustix::fs::llistxattr(path, &mut names[..]) else {
            return Ok(());
        };
        names.truncate(length);
        let mut found = Vec::new();
        for name in names.split(|byte| *byte == 0) {
            let Ok(name) = std::str::from_utf8(name) else {
                continue;
            };
            if !name.starts_with("user.") && name != "security.capability" {
                continue;
            }
            let mut value = vec![0; MAX_XATTR];
            if let Ok(length) = rustix::fs::lgetxattr(path, name, &mut value[..]) {
                value.truncate(length);
                found.push((format!("{XATTR}{name}"), value));
            }
        }
        if found.is_empty() {
            return Ok(());
        }
        let all = found
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_slice()));
        self.archive.append_pax_extensions(all)
    }
}

/// A path without a root and without steps upwards.
fn relative(path: &Path) -> Result<PathBuf, AgentError> {
    let mut clean = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => clean.push(name),
            Component::RootDir | Component::CurDir => {}
            Component::ParentDir | Component::Prefix(_) => {
                return Err(error::bad(format!("{} leads outside", path.display())));
            }
        }
    }
    Ok(clean)
}

/// Unpacks an archive.
pub async fn unpack(stream: &Stream, request: UnpackRequest) -> Result<ArchiveResult, AgentError> {
    let path = absolute(&request.path)?;
    let (sender, receiver) = mpsc::channel(PIECES);
    let work = blocking(move || {
        let owner = request.owner.as_deref().map(meta::owner).transpose()?;
        fs::create_dir_all(&path).map_err(|error| error::at("make", &path, &error))?;
        let source = FromStream {
            receiver,
            piece: Vec::new(),
            at: 0,
        };
        Unpacker {
            path,
            owner,
            mode: request.mode,
        }
        .run(source)
    });
    let feed = async {
        while let Some(bytes) = stream.receive().await {
            if sender.send(bytes).await.is_err() {
                // The thread has failed, and has the reason.
                break;
            }
        }
        drop(sender);
    };
    let (result, ()) = tokio::join!(work, feed);
    if !stream.input_is_complete() && result.is_ok() {
        return Err(AgentError::new(
            ErrorCode::Cancelled,
            "the archive did not come to its end",
        ));
    }
    result
}

/// The pieces of the channel as a reader.
struct FromStream {
    receiver: mpsc::Receiver<Vec<u8>>,
    piece: Vec<u8>,
    at: usize,
}

impl Read for FromStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.at >= self.piece.len() {
            match self.receiver.blocking_recv() {
                Some(piece) => (self.piece, self.at) = (piece, 0),
                None => return Ok(0),
            }
        }
        let rest = self.piece.get(self.at..).unwrap_or_default();
        let count = rest.len().min(buffer.len());
        for (to, from) in buffer.iter_mut().zip(rest) {
            *to = *from;
        }
        self.at += count;
        Ok(count)
    }
}

struct Unpacker {
    path: PathBuf,
    owner: Option<(u32, u32)>,
    mode: Option<u32>,
}

impl Unpacker {
    fn run(&self, source: impl Read) -> Result<ArchiveResult, AgentError> {
        let mut source = BufReader::with_capacity(64 << 10, source);
        let start = source
            .fill_buf()
            .map_err(|error| error::io("cannot read the archive", &error))?;
        if start.starts_with(&[0x1f, 0x8b]) {
            return self.entries(&mut flate2::read::MultiGzDecoder::new(source));
        }
        self.entries(&mut source)
    }

    fn entries(&self, source: &mut dyn Read) -> Result<ArchiveResult, AgentError> {
        let malformed = |error: io::Error| error::io("the archive is malformed", &error);
        let mut done = ArchiveResult::default();
        // Folders get their times last: a file that is put into one changes them.
        let mut folders = Vec::new();
        let mut archive = tar::Archive::new(source);
        for entry in archive.entries().map_err(malformed)? {
            let mut entry = entry.map_err(malformed)?;
            let name = entry.path().map_err(malformed)?;
            let name = relative(&name)?;
            if name.as_os_str().is_empty() {
                continue;
            }
            let target = self.path.join(&name);
            let made = self.entry(&mut entry, &target);
            made.map_err(|error| error::at("unpack", &target, &error))?;
            done.entries += 1;
            if entry.header().entry_type().is_dir() {
                folders.push((target, entry.header().mtime().unwrap_or(0)));
            } else {
                done.bytes += entry.size();
            }
        }
        for (folder, time) in folders.iter().rev() {
            let _ = set_time(folder, *time);
        }
        // What follows the end of the archive belongs to it.
        let mut rest = archive.into_inner();
        io::copy(&mut rest, &mut io::sink()).map_err(malformed)?;
        Ok(done)
    }

    fn entry<R: Read>(&self, entry: &mut tar::Entry<'_, R>, target: &Path) -> io::Result<()> {
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent)?;
        }
        let header = entry.header().clone();
        let kind = header.entry_type();
        if kind.is_dir() {
            // A link to a folder stays: files are put behind it.
            if !fs::metadata(target).is_ok_and(|found| found.is_dir()) {
                clear(target)?;
                fs::create_dir(target)?;
            }
            return self.finish(entry, &header, target, true);
        }
        clear(target)?;
        match kind {
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                let mut file = File::create_new(target)?;
                io::copy(entry, &mut file)?;
            }
            EntryType::Symlink => {
                let to = entry.link_name()?.ok_or(io::ErrorKind::InvalidData)?;
                std::os::unix::fs::symlink(to, target)?;
            }
            EntryType::Link => {
                let to = entry.link_name()?.ok_or(io::ErrorKind::InvalidData)?;
                let to = relative(&to).map_err(|error| io::Error::other(error.message))?;
                return fs::hard_link(self.path.join(to), target);
            }
            EntryType::Fifo => self.node(target, FileType::Fifo, &header)?,
            EntryType::Char => self.node(target, FileType::CharacterDevice, &header)?,
            EntryType::Block => self.node(target, FileType::BlockDevice, &header)?,
            _ => return Err(io::Error::other("an entry of an unknown kind")),
        }
        self.finish(entry, &header, target, false)
    }

    fn node(&self, target: &Path, kind: FileType, header: &Header) -> io::Result<()> {
        let part = |part: io::Result<Option<u32>>| part.ok().flatten().unwrap_or(0);
        let device = rustix::fs::makedev(part(header.device_major()), part(header.device_minor()));
        Ok(rustix::fs::mknodat(
            CWD,
            target,
            kind,
            Mode::from_raw_mode(0o600),
            device,
        )?)
    }

    fn finish<R: Read>(
        &self,
        entry: &mut tar::Entry<'_, R>,
        header: &Header,
        target: &Path,
        is_folder: bool,
    ) -> io::Result<()> {
        let number = |number: io::Result<u64>| number.map(|n| u32::try_from(n).unwrap_or(0));
        let (uid, gid) = match self.owner {
            Some(owner) => owner,
            None => (number(header.uid())?, number(header.gid())?),
        };
        std::os::unix::fs::lchown(target, Some(uid), Some(gid))?;
        let is_link = header.entry_type() == EntryType::Symlink;
        // After the owner, since changing that one clears the set-user bits.
        if !is_link {
            let mode = self.mode.map_or_else(|| header.mode(), Ok)? & 0o7777;
            fs::set_permissions(target, fs::Permissions::from_mode(mode))?;
        }
        for attribute in entry.pax_extensions()?.into_iter().flatten().flatten() {
            if let Some(name) = attribute.key().ok().and_then(|key| key.strip_prefix(XATTR)) {
                let value = attribute.value_bytes();
                rustix::fs::lsetxattr(target, name, value, XattrFlags::empty())?;
            }
        }
        match is_folder {
            true => Ok(()),
            false => set_time(target, header.mtime()?),
        }
    }
}

/// Removes a file that is in the way. A folder is not: it may be full.
fn clear(target: &Path) -> io::Result<()> {
    match fs::symlink_metadata(target) {
        Ok(found) if found.is_dir() => Err(io::Error::from(io::ErrorKind::IsADirectory)),
        Ok(_) => fs::remove_file(target),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

fn set_time(target: &Path, seconds: u64) -> io::Result<()> {
    let time = Timespec {
        tv_sec: i64::try_from(seconds).unwrap_or(0),
        tv_nsec: 0,
    };
    let times = Timestamps {
        last_access: time,
        last_modification: time,
    };
    Ok(rustix::fs::utimensat(
        CWD,
        target,
        &times,
        AtFlags::SYMLINK_NOFOLLOW,
    )?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(request: &PackRequest) -> (Vec<u8>, ArchiveResult) {
        let mut out = Vec::new();
        let done = Packer::run(request, &mut out).unwrap();
        (out, done)
    }

    fn everything(from: &Path, to: &str) -> PackRequest {
        PackRequest {
            items: vec![PackItem {
                from: from.display().to_string(),
                to: to.to_owned(),
            }],
            ..PackRequest::default()
        }
    }

    fn unpacked(bytes: &[u8], into: &Path) -> Result<ArchiveResult, AgentError> {
        let own = fs::metadata(into).unwrap();
        Unpacker {
            path: into.to_owned(),
            owner: Some((own.uid(), own.gid())),
            mode: None,
        }
        .run(bytes)
    }

    #[test]
    fn a_tree_arrives_as_it_was() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let root = from.path();
        fs::create_dir_all(root.join("d/empty")).unwrap();
        fs::write(root.join("d/a"), "text").unwrap();
        fs::set_permissions(root.join("d/a"), fs::Permissions::from_mode(0o4751)).unwrap();
        fs::hard_link(root.join("d/a"), root.join("d/b")).unwrap();
        std::os::unix::fs::symlink("d/a", root.join("link")).unwrap();
        fs::write(root.join("left out"), "x").unwrap();
        let long = "x".repeat(200);
        fs::write(root.join(&long), "long").unwrap();
        let mut request = everything(root, "into");
        request.exclude = vec![root.join("left out").display().to_string()];
        let (bytes, done) = packed(&request);
        assert_eq!(packed(&request).0, bytes);
        let came = unpacked(&bytes, to.path()).unwrap();
        assert_eq!(came.entries, done.entries);
        let at = |name: &str| to.path().join("into").join(name);
        assert_eq!(fs::read_to_string(at("link")).unwrap(), "text");
        assert_eq!(fs::metadata(at("d/a")).unwrap().mode() & 0o7777, 0o4751);
        let inode = |name: &str| fs::metadata(at(name)).unwrap().ino();
        assert_eq!(inode("d/a"), inode("d/b"));
        assert!(at("d/empty").is_dir() && !at("left out").exists());
        assert_eq!(fs::read_to_string(at(&long)).unwrap(), "long");
        // Again, over what is there.
        unpacked(&bytes, to.path()).unwrap();
    }

    #[test]
    fn gzip_is_unpacked_and_links_to_folders_are_followed() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::create_dir(from.path().join("bin")).unwrap();
        fs::write(from.path().join("bin/x"), "x").unwrap();
        fs::create_dir(to.path().join("usr")).unwrap();
        std::os::unix::fs::symlink("usr", to.path().join("bin")).unwrap();
        let (bytes, _) = packed(&everything(from.path(), ""));
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&bytes).unwrap();
        unpacked(&gzip.finish().unwrap(), to.path()).unwrap();
        assert_eq!(fs::read_to_string(to.path().join("usr/x")).unwrap(), "x");
    }

    #[test]
    fn names_that_lead_outside_and_junk_are_refused() {
        let to = tempfile::tempdir().unwrap();
        let mut archive = Builder::new(Vec::new());
        let mut header = Header::new_gnu();
        header.set_size(0);
        header.set_mode(0o644);
        let name = b"../escaped";
        header.as_old_mut().name[..name.len()].copy_from_slice(name);
        header.set_cksum();
        archive.append(&header, io::empty()).unwrap();
        let bytes = archive.into_inner().unwrap();
        let error = unpacked(&bytes, to.path()).unwrap_err();
        assert_eq!(error.code, ErrorCode::BadRequest);
        assert!(unpacked(&[7; 2000], to.path()).is_err());
        assert_eq!(unpacked(&[], to.path()).unwrap().entries, 0);
    }
}
