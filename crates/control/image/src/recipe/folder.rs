//! The files beside a recipe: in a folder of the host, compiled into the program, or none.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// The largest file that a recipe adds.
pub const MAX_FILE: u64 = 64 << 20;

/// Where the files of a recipe are.
#[derive(Debug, Clone, Copy)]
pub enum Folder<'a> {
    Host(&'a Path),
    BuiltIn(&'a [(&'a str, &'a [u8])]),
}

impl Folder<'_> {
    /// Reads a file by its plain name. A symbolic link leads nowhere: a recipe reads files of its own folder only.
    pub fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        match self {
            Self::Host(folder) => {
                let file = forkd_os::beneath::open_file(folder, Path::new(name))?;
                read_bounded(file, MAX_FILE)
            }
            Self::BuiltIn(files) => files
                .iter()
                .find(|(known, _)| *known == name)
                .map(|(_, content)| content.to_vec())
                .ok_or_else(|| io::ErrorKind::NotFound.into()),
        }
    }
}

/// Reads a file of at most `limit` bytes.
pub fn read_file(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    read_bounded(File::open(path)?, limit)
}

fn read_bounded(file: File, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("it has more than {limit} bytes"),
        ));
    }
    Ok(bytes)
}
