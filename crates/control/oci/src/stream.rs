//! Archives that arrive as a stream, and folders: spooled into files without names.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use crate::archive::{Archive, ArchiveKind, kind};
use crate::error::OciError;
use crate::image::{Image, root};
use crate::layer;
use crate::layout::Layout;
use crate::limits;
use crate::manifest::Platform;
use crate::part::Part;

/// For errors about a stream.
const STREAM: &str = "the stream";

fn nameless(spool: &Path) -> Result<File, OciError> {
    std::fs::create_dir_all(spool).map_err(OciError::io("make the folder", spool))?;
    tempfile::tempfile_in(spool).map_err(OciError::io("write in", spool))
}

/// An image from a stream: an archive of Docker, an OCI layout, or a root file system, plain or compressed.
pub fn any(stream: impl Read, wanted: &Platform, spool: &Path) -> Result<Image, OciError> {
    let mut file = nameless(spool)?;
    let read = io::copy(&mut stream.take(limits::UNPACKED + 1), &mut file)
        .map_err(OciError::io("read", Path::new(STREAM)))?;
    if read > limits::UNPACKED {
        return Err(OciError::Limit {
            what: format!("the size of {STREAM}"),
            found: read,
            limit: limits::UNPACKED,
        });
    }
    of_file(file, wanted, spool)
}

fn of_file(file: File, wanted: &Platform, spool: &Path) -> Result<Image, OciError> {
    let path = Path::new(STREAM);
    let failed = || OciError::io("read", path);
    let packed = Part::whole(file.try_clone().map_err(failed())?).map_err(failed())?;
    let mut file = layer::plain(&packed, STREAM, nameless(spool)?)?.unwrap_or(file);
    let rewind = |file: &mut File| file.seek(SeekFrom::Start(0)).map_err(failed());
    rewind(&mut file)?;
    let kind = kind(&file, path)?;
    rewind(&mut file)?;
    match kind {
        ArchiveKind::Docker => Archive::read(file, path)?.docker_image(None),
        ArchiveKind::Oci => Layout::Archive(Archive::read(file, path)?).image(None, wanted),
        ArchiveKind::Root => root(file, path),
    }
}

/// The files of a folder as an archive: owners, modes, times and links are kept, extended attributes are not.
pub fn folder(folder: &Path, spool: &Path) -> Result<File, OciError> {
    let mut file = nameless(spool)?;
    archive(folder, &mut file)?;
    file.seek(SeekFrom::Start(0))
        .map_err(OciError::io("read", spool))?;
    Ok(file)
}

/// Writes the files of a folder as an archive.
pub fn archive(folder: &Path, into: impl io::Write) -> Result<(), OciError> {
    let failed = || OciError::io("read", folder);
    if !folder.is_dir() {
        return Err(failed()(io::ErrorKind::NotADirectory.into()));
    }
    let mut tar = tar::Builder::new(into);
    tar.follow_symlinks(false);
    tar.append_dir_all(".", folder).map_err(failed())?;
    tar.finish().map_err(failed())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::digest::Digest;

    fn tar(files: &[(&str, &[u8])]) -> Vec<u8> {
        let mut tar = tar::Builder::new(Vec::new());
        for (name, bytes) in files {
            let mut header = tar::Header::new_gnu();
            header.set_size(bytes.len() as u64);
            header.set_mode(0o644);
            tar.append_data(&mut header, name, *bytes).unwrap();
        }
        tar.into_inner().unwrap()
    }

    fn read(bytes: &[u8]) -> Result<Image, OciError> {
        let spool = tempfile::tempdir().unwrap();
        any(bytes, &Platform::host(), spool.path())
    }

    #[test]
    fn a_stream_is_told_apart_by_its_content() {
        let root = tar(&[("bin/sh", b"x")]);
        assert_eq!(read(&root).unwrap().layers.len(), 1);
        let config = format!(r#"{{"rootfs":{{"diff_ids":["{}"]}}}}"#, Digest::of(&root));
        let docker = tar(&[
            ("c.json", config.as_bytes()),
            ("l.tar", &root),
            (
                "manifest.json",
                br#"[{"Config":"c.json","Layers":["l.tar"]}]"#,
            ),
        ]);
        assert_eq!(read(&docker).unwrap().digest, Digest::of(config.as_bytes()));
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&docker).unwrap();
        let gzip = gzip.finish().unwrap();
        assert_eq!(read(&gzip).unwrap().digest, Digest::of(config.as_bytes()));
        assert!(read(&gzip[..gzip.len() / 2]).is_err());
        // In the middle of the layer.
        assert!(read(&docker[..2000]).is_err());
    }

    #[test]
    fn a_folder_becomes_a_root() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("file"), "text").unwrap();
        std::os::unix::fs::symlink("/outside", folder.path().join("link")).unwrap();
        let spool = tempfile::tempdir().unwrap();
        let file = super::folder(folder.path(), spool.path()).unwrap();
        let mut archive = tar::Archive::new(file);
        let names: Vec<_> = archive
            .entries()
            .unwrap()
            .map(|entry| entry.unwrap().path().unwrap().display().to_string())
            .collect();
        assert!(names.iter().any(|name| name.ends_with("link")), "{names:?}");
        let missing = super::folder(&folder.path().join("no"), spool.path());
        assert!(matches!(missing, Err(OciError::Io { .. })));
    }
}
