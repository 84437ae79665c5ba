//! Images of this host as a stream of bytes for the daemon.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use anyhow::{Context, anyhow};
use forkd_oci::source::Source;
use forkd_oci::{engine, stream};
use futures::Stream;

use crate::commands::pipe::{self, Pipe};
use crate::error::CliError;

const PIECE: usize = 256 << 10;

/// The bytes of an image that lies on this host.
pub fn content(
    source: Source,
) -> Result<impl Stream<Item = io::Result<Vec<u8>>> + Send + 'static, CliError> {
    // Opened here, so that a wrong path is reported before the daemon is asked.
    let work: Box<dyn FnOnce(Pipe) -> io::Result<()> + Send> = match source {
        Source::Stdin => Box::new(|pipe| copy(io::stdin().lock(), pipe)),
        Source::Tar { file } => from_file(&file)?,
        Source::OciArchive { file, name: None } | Source::DockerArchive { file, name: None } => {
            from_file(&file)?
        }
        Source::Layout { folder, name: None } | Source::Folder { folder } => {
            if !folder.is_dir() {
                return Err(anyhow!("{} is not a folder", folder.display()).into());
            }
            Box::new(move |pipe| {
                stream::archive(&folder, io::BufWriter::with_capacity(PIECE, pipe))
                    .map_err(io::Error::other)
            })
        }
        Source::Engine { engine, name } => Box::new(move |pipe| {
            copy(
                engine::export(engine, &name).map_err(io::Error::other)?,
                pipe,
            )
        }),
        Source::Layout { .. } | Source::OciArchive { .. } | Source::DockerArchive { .. } => {
            return Err(CliError::new(
                anyhow!("one image of several cannot be chosen over the network"),
                Some("make an archive of that image alone, or use `forkd-image install` on the daemon's host".into()),
            ));
        }
        Source::Registry(_) => {
            return Err(anyhow!("an image in a registry is not sent along").into());
        }
    };
    Ok(pipe::stream(work))
}

fn from_file(path: &Path) -> Result<Box<dyn FnOnce(Pipe) -> io::Result<()> + Send>, CliError> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    Ok(Box::new(|pipe| copy(file, pipe)))
}

fn copy(mut from: impl Read, mut pipe: Pipe) -> io::Result<()> {
    let mut buffer = vec![0; PIECE];
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok(()),
            read => pipe.write_all(buffer.get(..read).unwrap_or_default())?,
        }
    }
}
