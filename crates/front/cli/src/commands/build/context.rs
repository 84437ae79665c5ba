//! The files of a context as a tar stream.

use std::fs::{self, File, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use forkd_api::BuildImage;
use forkd_dockerfile::Ignore;
use futures::Stream;

use crate::commands::pipe;

const PIECE: usize = 256 << 10;

/// Files of a folder that are not ignored, with their names there.
pub struct Files {
    folder: PathBuf,
    names: Vec<String>,
}

impl Files {
    /// Finds the files. Sockets, devices and names that are not UTF-8 are refused.
    pub fn find(folder: &Path, ignore: &Ignore) -> anyhow::Result<Self> {
        let mut names = Vec::new();
        let mut waiting = vec![String::new()];
        while let Some(name) = waiting.pop() {
            let path = folder.join(&name);
            let failed = || format!("cannot read {}", path.display());
            for entry in fs::read_dir(&path).with_context(failed)? {
                let entry = entry.with_context(failed)?;
                let below = entry
                    .file_name()
                    .into_string()
                    .map_err(|name| anyhow!("{} is not UTF-8", path.join(name).display()))?;
                let below = match name.is_empty() {
                    true => below,
                    false => format!("{name}/{below}"),
                };
                let kind = entry.file_type().with_context(failed)?;
                let ignored = ignore.ignores(&below);
                // A folder that is ignored may hold files that are not.
                if kind.is_dir() && !(ignored && ignore.never_keeps()) {
                    waiting.push(below.clone());
                }
                if ignored {
                    continue;
                }
                if !kind.is_dir() && !kind.is_file() && !kind.is_symlink() {
                    return Err(anyhow!(
                        "{} is neither a file, a folder nor a link: name it in .dockerignore",
                        entry.path().display()
                    ));
                }
                names.push(below);
            }
        }
        names.sort();
        Ok(Self {
            folder: folder.to_owned(),
            names,
        })
    }

    pub fn len(&self) -> usize {
        self.names.len()
    }
}

/// The body of the request.
pub fn stream(
    request: &BuildImage,
    files: Option<Files>,
) -> anyhow::Result<impl Stream<Item = io::Result<Vec<u8>>> + Send + 'static> {
    let request = serde_json::to_vec(request)?;
    Ok(pipe::stream(move |out| {
        let out = io::BufWriter::with_capacity(PIECE, out);
        write(&request, files.as_ref(), out)
    }))
}

fn write(request: &[u8], files: Option<&Files>, out: impl Write) -> io::Result<()> {
    let mut archive = tar::Builder::new(out);
    let mut header = tar::Header::new_gnu();
    header.set_size(request.len() as u64);
    header.set_mode(0o600);
    archive.append_data(&mut header, "build.json", request)?;
    if let Some(files) = files {
        for name in &files.names {
            let path = files.folder.join(name);
            let added = add(&mut archive, &path, &format!("context/{name}"));
            added.map_err(|error| {
                io::Error::new(error.kind(), format!("{}: {error}", path.display()))
            })?;
        }
    }
    archive.into_inner()?.flush()
}

fn add<W: Write>(archive: &mut tar::Builder<W>, path: &Path, name: &str) -> io::Result<()> {
    let found = fs::symlink_metadata(path)?;
    let mut header = header(&found);
    if found.is_dir() {
        header.set_entry_type(tar::EntryType::Directory);
        return archive.append_data(&mut header, name, io::empty());
    }
    if found.is_symlink() {
        header.set_entry_type(tar::EntryType::Symlink);
        return archive.append_link(&mut header, name, fs::read_link(path)?);
    }
    header.set_size(found.len());
    // A file that changes meanwhile keeps the size that the header promises.
    let content = File::open(path)?.chain(io::repeat(0)).take(found.len());
    archive.append_data(&mut header, name, content)
}

fn header(found: &Metadata) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(tar::EntryType::Regular);
    header.set_size(0);
    header.set_mode(found.permissions().mode() & 0o7777);
    header.set_mtime(u64::try_from(found.mtime()).unwrap_or(0));
    header.set_uid(0);
    header.set_gid(0);
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_files_are_left_out_and_kept_ones_come_back() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["a", "b/c", "b/d", "e/f"] {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, name).unwrap();
        }
        let of = |text: &str| {
            let ignore = Ignore::parse(text).unwrap();
            Files::find(folder.path(), &ignore).unwrap().names
        };
        assert_eq!(of(""), ["a", "b", "b/c", "b/d", "e", "e/f"]);
        assert_eq!(of("b\n"), ["a", "e", "e/f"]);
        assert_eq!(of("*\n!b/c\n"), ["b/c"]);
        let files = Files::find(folder.path(), &Ignore::default()).unwrap();
        let mut out = Vec::new();
        write(b"{}", Some(&files), &mut out).unwrap();
        let mut archive = tar::Archive::new(out.as_slice());
        let names: Vec<_> = archive
            .entries()
            .unwrap()
            .map(|entry| entry.unwrap().path().unwrap().display().to_string())
            .collect();
        assert_eq!(names[0], "build.json");
        assert_eq!(names.len(), 7, "{names:?}");
    }
}
