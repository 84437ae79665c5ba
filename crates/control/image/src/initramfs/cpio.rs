//! Writes the archive that the kernel unpacks into its first root: cpio, format "newc".
//!
//! The same entries give the same bytes: times are zero, and inode numbers count up from one.

use std::io::{self, Write};

const MAGIC: &str = "070701";
const TRAILER: &str = "TRAILER!!!";
/// The kernel accepts any length; other readers expect whole blocks.
const BLOCK: u64 = 512;

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const CHARACTER: u32 = 0o020_000;

#[derive(Debug)]
pub struct CpioWriter<W> {
    out: W,
    written: u64,
    inode: u32,
}

struct Header<'a> {
    path: &'a str,
    mode: u32,
    links: u32,
    size: u32,
    device: (u32, u32),
}

impl<W: Write> CpioWriter<W> {
    pub fn new(out: W) -> Self {
        Self {
            out,
            written: 0,
            inode: 0,
        }
    }

    /// Adds a folder.
    pub fn directory(&mut self, path: &str, permissions: u32) -> io::Result<()> {
        self.header(&Header {
            path,
            mode: DIRECTORY | permissions,
            links: 2,
            size: 0,
            device: (0, 0),
        })
    }

    /// Adds a file.
    pub fn file(&mut self, path: &str, permissions: u32, content: &[u8]) -> io::Result<()> {
        let size = u32::try_from(content.len()).map_err(|_| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{path} is larger than 4 GiB"),
            )
        })?;
        self.header(&Header {
            path,
            mode: REGULAR | permissions,
            links: 1,
            size,
            device: (0, 0),
        })?;
        self.put(content)?;
        self.pad(4)
    }

    /// Adds a character device.
    pub fn character_device(
        &mut self,
        path: &str,
        permissions: u32,
        device: (u32, u32),
    ) -> io::Result<()> {
        self.header(&Header {
            path,
            mode: CHARACTER | permissions,
            links: 1,
            size: 0,
            device,
        })
    }

    /// Ends the archive and returns the writer.
    pub fn finish(mut self) -> io::Result<W> {
        self.inode = 0;
        self.record(
            &Header {
                path: TRAILER,
                mode: 0,
                links: 1,
                size: 0,
                device: (0, 0),
            },
            0,
        )?;
        self.pad(BLOCK)?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn header(&mut self, header: &Header<'_>) -> io::Result<()> {
        let path = header.path;
        if path.is_empty() || path.starts_with('/') || path.contains('\0') || path == TRAILER {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{path:?} is not a path inside an archive"),
            ));
        }
        self.inode += 1;
        self.record(header, self.inode)
    }

    fn record(&mut self, header: &Header<'_>, inode: u32) -> io::Result<()> {
        let name_size = header.path.len() as u32 + 1;
        let (major, minor) = header.device;
        let fields = [
            inode,
            header.mode,
            0, // owner
            0, // group
            header.links,
            0, // time
            header.size,
            0, // device the file is on
            0,
            major,
            minor,
            name_size,
            0, // checksum, unused by this format
        ];
        let mut text = String::from(MAGIC);
        for field in fields {
            text.push_str(&format!("{field:08x}"));
        }
        self.put(text.as_bytes())?;
        self.put(header.path.as_bytes())?;
        self.put(&[0])?;
        self.pad(4)
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    fn pad(&mut self, to: u64) -> io::Result<()> {
        let missing = self.written.next_multiple_of(to) - self.written;
        self.put(&vec![0; missing as usize])
    }
}

#[cfg(test)]
pub mod reader {
    //! A reader for round-trip tests.

    /// An entry of an archive.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Entry {
        pub path: String,
        pub mode: u32,
        pub content: Vec<u8>,
        pub device: (u32, u32),
    }

    pub fn read(archive: &[u8]) -> Vec<Entry> {
        let mut at = 0;
        let mut entries = Vec::new();
        loop {
            assert_eq!(&archive[at..at + 6], b"070701");
            let field = |index: usize| {
                let start = at + 6 + index * 8;
                let text = std::str::from_utf8(&archive[start..start + 8]).unwrap();
                u32::from_str_radix(text, 16).unwrap()
            };
            let (mode, size, name_size) = (field(1), field(6) as usize, field(11) as usize);
            let device = (field(9), field(10));
            let name_at = at + 110;
            let path = std::str::from_utf8(&archive[name_at..name_at + name_size - 1]).unwrap();
            assert_eq!(archive[name_at + name_size - 1], 0);
            let data_at = (name_at + name_size).next_multiple_of(4);
            if path == "TRAILER!!!" {
                assert!(archive[data_at..].iter().all(|byte| *byte == 0));
                return entries;
            }
            entries.push(Entry {
                path: path.to_owned(),
                mode,
                content: archive[data_at..data_at + size].to_vec(),
                device,
            });
            at = (data_at + size).next_multiple_of(4);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::reader::{Entry, read};
    use super::*;

    fn entry() -> impl Strategy<Value = Entry> {
        let path = "[a-z0-9._-]{1,20}(/[a-zä0-9._-]{1,20}){0,3}";
        let content = prop::collection::vec(any::<u8>(), 0..300);
        (path, 0_u32..0o7777, content, 0..3, any::<(u8, u8)>()).prop_map(
            |(path, permissions, content, kind, device)| match kind {
                0 => Entry {
                    path,
                    mode: DIRECTORY | permissions,
                    content: Vec::new(),
                    device: (0, 0),
                },
                1 => Entry {
                    path,
                    mode: CHARACTER | permissions,
                    content: Vec::new(),
                    device: (device.0.into(), device.1.into()),
                },
                _ => Entry {
                    path,
                    mode: REGULAR | permissions,
                    content,
                    device: (0, 0),
                },
            },
        )
    }

    fn write(entries: &[Entry]) -> Vec<u8> {
        let mut writer = CpioWriter::new(Vec::new());
        for entry in entries {
            let permissions = entry.mode & 0o7777;
            match entry.mode & !0o7777 {
                DIRECTORY => writer.directory(&entry.path, permissions),
                CHARACTER => writer.character_device(&entry.path, permissions, entry.device),
                _ => writer.file(&entry.path, permissions, &entry.content),
            }
            .unwrap();
        }
        writer.finish().unwrap()
    }

    proptest! {
        #[test]
        fn what_is_written_can_be_read(entries in prop::collection::vec(entry(), 0..12)) {
            let archive = write(&entries);
            prop_assert_eq!(archive.len() % 512, 0);
            prop_assert_eq!(&read(&archive), &entries);
            prop_assert_eq!(write(&entries), archive);
        }
    }

    #[test]
    fn paths_that_leave_or_end_the_archive_are_refused() {
        let mut writer = CpioWriter::new(Vec::new());
        for path in ["", "/etc", "a\0b", "TRAILER!!!"] {
            assert!(writer.file(path, 0o644, b"x").is_err(), "{path:?}");
        }
    }
}
