//! Extracts the uncompressed kernel from a bzImage.
//!
//! The setup header of the boot protocol contains offset and length of the compressed payload. The first
//! bytes of the payload identify the compression.

use std::io::{self, Read};

use thiserror::Error;

/// The boot protocol's signature and its offset.
const HEADER_MAGIC: (usize, &[u8; 4]) = (0x202, b"HdrS");
const SETUP_SECTS: usize = 0x1f1;
const PROTOCOL: usize = 0x206;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;
const SECTOR: usize = 512;
/// The first protocol version with payload fields.
const FIRST_PROTOCOL: u16 = 0x0208;
/// Upper bound on the uncompressed size. Kernels have tens of megabytes.
const MAX_KERNEL: u64 = 1 << 30;

/// The compression of a kernel payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    Gzip,
    /// xz with the x86 filter.
    Xz,
    Zstd,
    /// The legacy LZ4 stream.
    Lz4,
}

impl Compression {
    /// The name in the kernel's configuration, in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Xz => "xz",
            Self::Zstd => "zstd",
            Self::Lz4 => "lz4",
        }
    }
}

/// Why a bzImage is rejected.
#[derive(Debug, Error)]
pub enum BzImageError {
    #[error("there is no boot header at offset 0x202")]
    NoHeader,
    #[error("boot protocol {major}.{minor:02} is too old: 2.08 or newer is needed")]
    TooOld { major: u8, minor: u8 },
    #[error(
        "the header places the kernel at {offset}+{length}, past the end of the file ({size} bytes)"
    )]
    OutOfFile {
        offset: usize,
        length: usize,
        size: usize,
    },
    #[error(
        "unknown compression of the kernel (first bytes {magic:02x?}): gzip, xz, zstd and lz4 are supported"
    )]
    UnknownCompression {
        /// The first bytes of the payload.
        magic: Vec<u8>,
    },
    #[error("the {} kernel does not decompress", compression.name())]
    Decompress {
        compression: Compression,
        #[source]
        source: io::Error,
    },
}

/// Whether the file has the signature of a bzImage.
pub fn is_bzimage(file: &[u8]) -> bool {
    let (offset, magic) = HEADER_MAGIC;
    file.get(offset..offset + magic.len()) == Some(magic)
}

/// Returns the uncompressed payload and its compression.
pub fn extract(file: &[u8]) -> Result<(Vec<u8>, Compression), BzImageError> {
    let payload = payload(file)?;
    let compression = detect(payload)?;
    let kernel = decompress(payload, compression).map_err(|source| BzImageError::Decompress {
        compression,
        source,
    })?;
    Ok((kernel, compression))
}

fn payload(file: &[u8]) -> Result<&[u8], BzImageError> {
    if !is_bzimage(file) {
        return Err(BzImageError::NoHeader);
    }
    let protocol = file
        .get(PROTOCOL..PROTOCOL + 2)
        .and_then(|bytes| bytes.try_into().ok())
        .map(u16::from_le_bytes)
        .ok_or(BzImageError::NoHeader)?;
    if protocol < FIRST_PROTOCOL {
        let [minor, major] = protocol.to_le_bytes();
        return Err(BzImageError::TooOld { major, minor });
    }
    let sectors = match file.get(SETUP_SECTS) {
        // The protocol says that 0 stands for 4.
        Some(0) => 4,
        Some(count) => usize::from(*count),
        None => return Err(BzImageError::NoHeader),
    };
    let protected_mode = (sectors + 1) * SECTOR;
    let offset = protected_mode.saturating_add(word(file, PAYLOAD_OFFSET)?);
    let length = word(file, PAYLOAD_LENGTH)?;
    offset
        .checked_add(length)
        .and_then(|end| file.get(offset..end))
        .ok_or(BzImageError::OutOfFile {
            offset,
            length,
            size: file.len(),
        })
}

fn word(file: &[u8], offset: usize) -> Result<usize, BzImageError> {
    file.get(offset..offset + 4)
        .and_then(|bytes| bytes.try_into().ok())
        .map(|bytes| u32::from_le_bytes(bytes) as usize)
        .ok_or(BzImageError::NoHeader)
}

fn detect(payload: &[u8]) -> Result<Compression, BzImageError> {
    const MAGICS: [(&[u8], Compression); 4] = [
        (&[0x1f, 0x8b], Compression::Gzip),
        (&[0xfd, b'7', b'z', b'X', b'Z', 0], Compression::Xz),
        (&[0x28, 0xb5, 0x2f, 0xfd], Compression::Zstd),
        (&[0x02, 0x21, 0x4c, 0x18], Compression::Lz4),
    ];
    MAGICS
        .iter()
        .find(|(magic, _)| payload.starts_with(magic))
        .map(|(_, compression)| *compression)
        .ok_or_else(|| BzImageError::UnknownCompression {
            magic: payload.iter().take(6).copied().collect(),
        })
}

/// Decompresses one stream. The kernel's build appends the uncompressed size, so reading stops at the end of
/// the first stream.
fn decompress(payload: &[u8], compression: Compression) -> io::Result<Vec<u8>> {
    match compression {
        Compression::Gzip => bounded(flate2::bufread::GzDecoder::new(payload)),
        Compression::Xz => bounded(lzma_rust2::XzReader::new(payload, false)),
        Compression::Zstd => bounded(zstd::Decoder::with_buffer(payload)?.single_frame()),
        Compression::Lz4 => lz4_legacy(payload),
    }
}

fn bounded(reader: impl Read) -> io::Result<Vec<u8>> {
    let mut plain = Vec::new();
    let read = reader.take(MAX_KERNEL + 1).read_to_end(&mut plain)?;
    if read as u64 > MAX_KERNEL {
        return Err(too_large());
    }
    Ok(plain)
}

fn too_large() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("it is larger than {MAX_KERNEL} bytes"),
    )
}

/// Decodes the legacy LZ4 stream: a magic number, then blocks of 8 MiB plain text, each after its packed
/// length.
fn lz4_legacy(payload: &[u8]) -> io::Result<Vec<u8>> {
    const BLOCK: usize = 8 << 20;
    let mut plain = Vec::new();
    let mut rest = payload.get(4..).unwrap_or_default();
    while let Some((length, tail)) = rest.split_first_chunk::<4>() {
        let length = u32::from_le_bytes(*length) as usize;
        let Some(block) = tail.get(..length).filter(|block| !block.is_empty()) else {
            // What does not fit is the plain size that the kernel's build puts at the end.
            break;
        };
        let block = lz4_flex::block::decompress(block, BLOCK)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        plain.extend_from_slice(&block);
        if plain.len() as u64 > MAX_KERNEL {
            return Err(too_large());
        }
        rest = tail.get(length..).unwrap_or_default();
    }
    Ok(plain)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    /// A file with a setup header, two setup sectors, some code, and the payload.
    fn made_up(payload: &[u8]) -> Vec<u8> {
        let mut file = vec![0; 3 * SECTOR];
        file[SETUP_SECTS] = 2;
        file[0x202..0x206].copy_from_slice(b"HdrS");
        file[PROTOCOL..PROTOCOL + 2].copy_from_slice(&0x020f_u16.to_le_bytes());
        file[PAYLOAD_OFFSET..PAYLOAD_OFFSET + 4].copy_from_slice(&100_u32.to_le_bytes());
        let length = u32::try_from(payload.len()).unwrap();
        file[PAYLOAD_LENGTH..PAYLOAD_LENGTH + 4].copy_from_slice(&length.to_le_bytes());
        file.extend([0xcc; 100]);
        file.extend(payload);
        file.extend([0xee; 64]);
        file
    }

    fn with_size(mut packed: Vec<u8>, plain: &[u8]) -> Vec<u8> {
        packed.extend(u32::try_from(plain.len()).unwrap().to_le_bytes());
        packed
    }

    fn kernel() -> Vec<u8> {
        (0..200_000_u32)
            .flat_map(|n| (n / 3).to_le_bytes())
            .collect()
    }

    #[test]
    fn a_zstd_kernel_comes_out() {
        let plain = kernel();
        let packed = with_size(zstd::encode_all(&plain[..], 3).unwrap(), &plain);
        let (out, compression) = extract(&made_up(&packed)).unwrap();
        assert_eq!(compression, Compression::Zstd);
        assert!(out == plain);
    }

    #[test]
    fn a_gzip_kernel_comes_out() {
        let plain = kernel();
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(&plain).unwrap();
        let (out, compression) = extract(&made_up(&encoder.finish().unwrap())).unwrap();
        assert_eq!(compression, Compression::Gzip);
        assert!(out == plain);
    }

    #[test]
    fn an_xz_kernel_with_the_x86_filter_comes_out() {
        // Made by: printf 'forkd forkd forkd' | xz --check=crc32 --x86 --lzma2 | od
        let packed = include_bytes!("testdata/hello-x86.xz");
        let (out, compression) = extract(&made_up(&with_size(packed.to_vec(), b"x"))).unwrap();
        assert_eq!(compression, Compression::Xz);
        assert_eq!(out, b"forkd forkd forkd");
    }

    #[test]
    fn an_lz4_kernel_comes_out() {
        let plain = kernel();
        let mut packed = vec![0x02, 0x21, 0x4c, 0x18];
        for block in plain.chunks(8 << 20) {
            let block = lz4_flex::block::compress(block);
            packed.extend(u32::try_from(block.len()).unwrap().to_le_bytes());
            packed.extend(block);
        }
        let (out, compression) = extract(&made_up(&with_size(packed, &plain))).unwrap();
        assert_eq!(compression, Compression::Lz4);
        assert!(out == plain);
    }

    #[test]
    fn what_is_wrong_is_said() {
        assert!(matches!(extract(b"\x7fELF"), Err(BzImageError::NoHeader)));
        assert!(matches!(
            extract(&made_up(b"BZh9 and more")),
            Err(BzImageError::UnknownCompression { .. })
        ));
        let mut file = made_up(b"x");
        file[PAYLOAD_LENGTH..PAYLOAD_LENGTH + 4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(matches!(
            extract(&file),
            Err(BzImageError::OutOfFile { .. })
        ));
        file[PROTOCOL] = 7;
        assert!(matches!(
            extract(&file),
            Err(BzImageError::TooOld { major: 2, minor: 7 })
        ));
        let mut broken = zstd::encode_all(&kernel()[..], 3).unwrap();
        broken.truncate(100);
        assert!(matches!(
            extract(&made_up(&broken)),
            Err(BzImageError::Decompress { .. })
        ));
    }

    proptest! {
        #[test]
        fn no_file_panics(mut file in prop::collection::vec(any::<u8>(), 0..2048), header: bool) {
            if header && file.len() > 0x206 {
                file[0x202..0x206].copy_from_slice(b"HdrS");
            }
            let _ = extract(&file);
        }
    }
}
