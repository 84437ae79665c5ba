//! The artifact as one tar stream.
//!
//! ```text
//!   oci-layout  index.json  blobs/sha256/…: manifest, config, page index, page hashes, signatures  │  packs
//! ```
//!
//! The stream is an OCI layout in a tar archive, so other tools read it. Documents come first: a reader checks them, and
//! decides whether it wants the packs, before the first pack arrives. Packs that the reader has already may be left out.

use std::io::{self, Read, Write};

use forkd_oci::digest::{Digest, Hasher};

use crate::documents::{Documents, Signature};
use crate::error::HubError;
use crate::limits;
use crate::manifest::{Artifact, Descriptor, Index, REF_NAME, bounded, checked, parse, to_bytes};

pub const LAYOUT_FILE: &str = "oci-layout";
pub const LAYOUT: &[u8] = br#"{"imageLayoutVersion":"1.0.0"}"#;
pub const INDEX_FILE: &str = "index.json";
const BLOBS: &str = "blobs/sha256/";
const BLOCK: usize = 512;

/// The path of a blob in a layout.
pub fn blob_path(digest: &Digest) -> String {
    format!("{BLOBS}{}", digest.hex())
}

/// The index of a layout that holds one artifact and its signatures.
pub fn layout_index(documents: &Documents, name: &str) -> Index {
    let mut entry = documents.artifact.descriptor();
    entry
        .annotations
        .insert(REF_NAME.to_owned(), name.to_owned());
    let signatures = documents.signatures.iter().map(Signature::descriptor);
    Index {
        manifests: std::iter::once(entry).chain(signatures).collect(),
        ..Index::default()
    }
}

/// Bytes of a stream with these packs.
pub fn stream_length<'a>(
    documents: &Documents,
    name: &str,
    packs: impl IntoIterator<Item = &'a Descriptor>,
) -> u64 {
    let entry = |bytes: u64| BLOCK as u64 + bytes.next_multiple_of(BLOCK as u64);
    let index = to_bytes(&layout_index(documents, name)).len() as u64;
    let blobs = documents.blobs().into_iter().map(|(_, b)| b.len() as u64);
    let packs = packs.into_iter().map(|pack| pack.size);
    let all = [LAYOUT.len() as u64, index].into_iter().chain(blobs);
    all.chain(packs).map(entry).sum::<u64>() + 2 * BLOCK as u64
}

/// Writes a stream.
pub struct StreamWriter<W: Write> {
    out: W,
}

impl<W: Write> StreamWriter<W> {
    /// Writes the documents.
    pub fn begin(out: W, documents: &Documents, name: &str) -> Result<Self, HubError> {
        let mut writer = Self { out };
        writer.entry(LAYOUT_FILE, LAYOUT.len() as u64, LAYOUT)?;
        let index = to_bytes(&layout_index(documents, name));
        writer.entry(INDEX_FILE, index.len() as u64, index.as_slice())?;
        for (digest, bytes) in documents.blobs() {
            writer.entry(&blob_path(&digest), bytes.len() as u64, bytes.as_slice())?;
        }
        Ok(writer)
    }

    /// Writes a pack. The reader must give as many bytes as the descriptor says.
    pub fn pack(&mut self, pack: &Descriptor, content: impl Read) -> Result<(), HubError> {
        self.entry(&blob_path(&pack.digest), pack.size, content)
    }

    pub fn finish(mut self) -> Result<W, HubError> {
        let end = self.out.write_all(&[0; 2 * BLOCK]);
        end.and_then(|()| self.out.flush())
            .map_err(HubError::Stream)?;
        Ok(self.out)
    }

    fn entry(&mut self, name: &str, size: u64, content: impl Read) -> Result<(), HubError> {
        let write = || -> io::Result<()> {
            let mut header = tar::Header::new_ustar();
            header.set_path(name)?;
            header.set_size(size);
            header.set_mode(0o644);
            header.set_cksum();
            self.out.write_all(header.as_bytes())?;
            let copied = io::copy(&mut content.take(size), &mut self.out)?;
            if copied != size {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
            }
            let padding = size.next_multiple_of(BLOCK as u64) - size;
            let zeros = [0; BLOCK];
            let zeros = zeros.get(..usize::try_from(padding).unwrap_or(0));
            self.out.write_all(zeros.unwrap_or_default())
        };
        write().map_err(HubError::Stream)
    }
}

/// Reads a stream.
#[derive(Debug)]
pub struct StreamReader<R: Read> {
    input: R,
    /// Bytes of padding behind the entry that was read last.
    padding: u64,
}

/// A header of the stream.
#[derive(Debug)]
struct Head {
    name: String,
    size: u64,
}

impl<R: Read> StreamReader<R> {
    /// Reads the documents. Afterwards [`StreamReader::next_pack`] gives the packs.
    pub fn open(input: R) -> Result<(Documents, Self, Option<PackHead>), HubError> {
        let mut reader = Self { input, padding: 0 };
        reader.named(LAYOUT_FILE, 4096)?;
        let index = reader.named(INDEX_FILE, limits::MANIFEST)?;
        let index: Index = parse(&index, "the index of the layout")?;
        let first = index.manifests.first();
        let first = first.ok_or_else(|| HubError::invalid("the index of the layout is empty"))?;
        let manifest = reader.blob(first.digest, limits::MANIFEST, "the manifest")?;
        let artifact = Artifact::parse(manifest)?;
        let config = reader.blob(artifact.config.digest, limits::CONFIG, "the configuration")?;
        let pages = reader.blob(artifact.index.digest, limits::INDEX, "the page index")?;
        let mut documents = Documents::parse(artifact, config, pages)?;
        let next = reader.more(&mut documents)?;
        Ok((documents, reader, next))
    }

    /// Reads page hashes and signatures until the first pack.
    fn more(&mut self, documents: &mut Documents) -> Result<Option<PackHead>, HubError> {
        let hashes = documents.artifact.hashes.as_ref().map(|found| found.digest);
        let mut wanted: Option<(Vec<u8>, Digest)> = None;
        while let Some(head) = self.head()? {
            let digest = digest_of(&head)?;
            if let Some(pack) = pack_of(documents, digest, head.size)? {
                return Ok(Some(pack));
            }
            if hashes == Some(digest) {
                let limit = documents.hashes_limit();
                let bytes = self.content(&head, limit)?;
                documents.set_hashes(&bytes)?;
                continue;
            }
            let bytes = self.content(&head, limits::SIGNATURE)?;
            checked("a signature", &bytes, digest)?;
            match wanted.take() {
                Some((manifest, expected)) if expected == digest => {
                    documents.add_signature(Signature {
                        manifest,
                        text: bytes,
                    })?;
                }
                _ => {
                    let subject = documents.artifact.digest;
                    let blob = match bytes.as_slice() {
                        crate::manifest::EMPTY => None,
                        bytes => Signature::blob_of(bytes, subject)?,
                    };
                    wanted = blob.map(|blob| (bytes, blob.digest));
                }
            }
        }
        Ok(None)
    }

    /// The head of the next pack.
    pub fn next_pack(&mut self, documents: &Documents) -> Result<Option<PackHead>, HubError> {
        let Some(head) = self.head()? else {
            return Ok(None);
        };
        let digest = digest_of(&head)?;
        pack_of(documents, digest, head.size)?
            .map(Some)
            .ok_or_else(|| HubError::invalid("a blob follows the packs that is not a pack"))
    }

    /// Reads exactly these bytes of the current pack.
    pub fn read_exact(&mut self, buffer: &mut [u8]) -> Result<(), HubError> {
        self.input.read_exact(buffer).map_err(HubError::Stream)
    }

    /// The content of a pack as a reader. It must be read to its end, and then [`PackContent::finish`] called.
    pub fn content_of(&mut self, head: PackHead) -> PackContent<'_, R> {
        PackContent {
            left: head.bytes,
            head,
            reader: self,
            check: PackCheck::default(),
        }
    }

    /// Ends the current pack.
    pub fn end_pack(&mut self, head: &PackHead) {
        self.padding = padding(head.bytes);
    }

    fn named(&mut self, name: &'static str, limit: u64) -> Result<Vec<u8>, HubError> {
        let head = self.head()?.filter(|head| head.name == name);
        let head = head.ok_or_else(|| {
            HubError::invalid(format!("the stream has no {name} where it belongs"))
        })?;
        self.content(&head, limit)
    }

    fn blob(
        &mut self,
        digest: Digest,
        limit: u64,
        what: &'static str,
    ) -> Result<Vec<u8>, HubError> {
        let name = blob_path(&digest);
        let head = self.head()?.filter(|head| head.name == name);
        let head = head.ok_or_else(|| {
            HubError::invalid(format!("the stream has not {what} where it belongs"))
        })?;
        let bytes = self.content(&head, limit)?;
        checked(what, &bytes, digest)?;
        Ok(bytes)
    }

    fn content(&mut self, head: &Head, limit: u64) -> Result<Vec<u8>, HubError> {
        bounded("bytes in a document", head.size, limit)?;
        // In steps: memory is taken for bytes that arrived, not for bytes that a header promises.
        let mut bytes = Vec::new();
        let read = (&mut self.input).take(head.size).read_to_end(&mut bytes);
        let read = read.map_err(HubError::Stream)?;
        if read as u64 != head.size {
            let cut = io::Error::from(io::ErrorKind::UnexpectedEof);
            return Err(HubError::Stream(cut));
        }
        self.padding = padding(head.size);
        Ok(bytes)
    }

    /// The next header; none at the end of the archive.
    fn head(&mut self) -> Result<Option<Head>, HubError> {
        let mut block = [0; BLOCK];
        let skipped = usize::try_from(self.padding).unwrap_or(0);
        self.padding = 0;
        let skip = block.get_mut(..skipped).unwrap_or_default();
        self.input.read_exact(skip).map_err(HubError::Stream)?;
        self.input
            .read_exact(&mut block)
            .map_err(HubError::Stream)?;
        if block.iter().all(|byte| *byte == 0) {
            // The sender writes a second block of zeros, and some tools more of them.
            let mut rest = (&mut self.input).take(1 << 20);
            io::copy(&mut rest, &mut io::sink()).map_err(HubError::Stream)?;
            return Ok(None);
        }
        let mut header = tar::Header::new_ustar();
        header.as_mut_bytes().copy_from_slice(&block);
        let bad = |_| HubError::invalid("the tar stream has a damaged header");
        let sum: u32 = block
            .iter()
            .enumerate()
            .map(|(at, byte)| {
                if (148..156).contains(&at) {
                    32
                } else {
                    u32::from(*byte)
                }
            })
            .sum();
        if header.cksum().map_err(bad)? != sum || !header.entry_type().is_file() {
            return Err(HubError::invalid(
                "the tar stream has a damaged header or an entry that is not a file",
            ));
        }
        Ok(Some(Head {
            name: String::from_utf8_lossy(&header.path_bytes()).into_owned(),
            size: header.size().map_err(bad)?,
        }))
    }
}

/// A pack that arrives.
#[derive(Debug, Clone, Copy)]
pub struct PackHead {
    /// Number of the pack in the page index.
    pub number: usize,
    pub digest: Digest,
    pub bytes: u64,
}

fn padding(size: u64) -> u64 {
    (BLOCK as u64 - size % BLOCK as u64) % BLOCK as u64
}

fn digest_of(head: &Head) -> Result<Digest, HubError> {
    let hex = head.name.strip_prefix(BLOBS);
    hex.and_then(|hex| format!("sha256:{hex}").parse().ok())
        .ok_or_else(|| HubError::invalid("the stream has an entry that is not a blob"))
}

fn pack_of(documents: &Documents, digest: Digest, size: u64) -> Result<Option<PackHead>, HubError> {
    let packs = &documents.index.packs;
    let Some(number) = packs.iter().position(|pack| pack.digest == digest) else {
        return Ok(None);
    };
    let bytes = packs.get(number).map_or(0, |pack| pack.bytes);
    if bytes != size {
        return Err(HubError::invalid(
            "a pack has another length than its manifest says",
        ));
    }
    Ok(Some(PackHead {
        number,
        digest,
        bytes,
    }))
}

/// Hashes a pack as it passes and compares the digest at its end.
#[derive(Default)]
pub struct PackCheck(Hasher);

impl PackCheck {
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub fn finish(self, head: &PackHead) -> Result<(), HubError> {
        let found = self.0.finish();
        if found == head.digest {
            return Ok(());
        }
        Err(HubError::Digest {
            what: "a pack".into(),
            expected: head.digest.to_string(),
            found: found.to_string(),
        })
    }
}

/// The content of a pack on its way through a stream.
pub struct PackContent<'a, R: Read> {
    reader: &'a mut StreamReader<R>,
    head: PackHead,
    left: u64,
    check: PackCheck,
}

impl<R: Read> PackContent<'_, R> {
    /// Compares the digest of what was read, and skips the rest.
    pub fn finish(mut self) -> Result<(), HubError> {
        io::copy(&mut self, &mut io::sink()).map_err(HubError::Stream)?;
        if self.left > 0 {
            return Err(HubError::Stream(io::ErrorKind::UnexpectedEof.into()));
        }
        self.check.finish(&self.head)?;
        self.reader.end_pack(&self.head);
        Ok(())
    }
}

impl<R: Read> Read for PackContent<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let want = buffer
            .len()
            .min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let read = self
            .reader
            .input
            .read(buffer.get_mut(..want).unwrap_or_default())?;
        self.check.update(buffer.get(..read).unwrap_or_default());
        self.left -= read as u64;
        Ok(read)
    }
}
