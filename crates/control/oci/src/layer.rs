//! A layer as a plain tar archive: decompressed by what its first bytes say, checked against its digest.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use crate::digest::{Digest, Hasher};
use crate::error::OciError;
use crate::limits;
use crate::part::Part;

const GZIP: [u8; 2] = [0x1f, 0x8b];
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
const BUFFER: usize = 256 << 10;
/// The largest window that is held in memory, as a power of two: what `zstd --ultra` may ask for.
const ZSTD_WINDOW: u32 = 27;

/// Bytes that the layers of one image may still take.
#[derive(Debug)]
pub struct Budget {
    left: u64,
}

impl Default for Budget {
    fn default() -> Self {
        Self {
            left: limits::UNPACKED,
        }
    }
}

/// Unpacks a layer into a new file and checks that it is what the configuration promises.
/// Without a promise the digest found is given back and nothing is checked.
pub fn unpack(
    blob: &Part,
    what: &str,
    promised: Option<Digest>,
    into: &Path,
    budget: &mut Budget,
) -> Result<(File, Digest), OciError> {
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(into)
        .map_err(OciError::io("write", into))?;
    let found = copy(blob, &file, what, budget)?;
    if let Some(promised) = promised {
        promised.check(what, found)?;
    }
    Ok((file, found))
}

/// The plain bytes of a blob that may be compressed. `None` if it is plain already.
pub(crate) fn plain(blob: &Part, what: &str, into: File) -> Result<Option<File>, OciError> {
    let mut start = Vec::new();
    let read = blob.reader().take(4).read_to_end(&mut start);
    read.map_err(|source| OciError::Unpack {
        what: what.to_owned(),
        source,
    })?;
    if !start.starts_with(&GZIP) && !start.starts_with(&ZSTD) {
        return Ok(None);
    }
    copy(blob, &into, what, &mut Budget::default())?;
    Ok(Some(into))
}

fn copy(blob: &Part, mut out: &File, what: &str, budget: &mut Budget) -> Result<Digest, OciError> {
    let unpack = |source| OciError::Unpack {
        what: what.to_owned(),
        source,
    };
    let mut reader = decoder(blob).map_err(unpack)?;
    let allowed = budget
        .left
        .min(blob.length.saturating_mul(limits::RATIO).max(limits::FREE));
    let mut hasher = Hasher::default();
    let mut buffer = vec![0; BUFFER];
    let mut total: u64 = 0;
    loop {
        let read = match reader.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(unpack(error)),
        };
        total += read as u64;
        if total > allowed {
            return Err(OciError::Limit {
                what: format!("the unpacked size of {what}"),
                found: total,
                limit: allowed,
            });
        }
        let bytes = buffer.get(..read).unwrap_or_default();
        hasher.update(bytes);
        out.write_all(bytes).map_err(unpack)?;
    }
    budget.left -= total;
    Ok(hasher.finish())
}

/// A reader of the plain bytes.
fn decoder(blob: &Part) -> io::Result<Box<dyn Read>> {
    let mut start = Vec::new();
    blob.reader().take(4).read_to_end(&mut start)?;
    if start.starts_with(&GZIP) {
        // Several gzip members in a row are one layer: pigz and stargz write such.
        return Ok(Box::new(flate2::read::MultiGzDecoder::new(blob.reader())));
    }
    if start.starts_with(&ZSTD) {
        let mut decoder = zstd::Decoder::new(blob.reader())?;
        decoder.window_log_max(ZSTD_WINDOW)?;
        return Ok(Box::new(decoder));
    }
    Ok(Box::new(blob.reader()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blob(bytes: &[u8]) -> Part {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        Part::whole(file).unwrap()
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn every_compression_gives_the_same_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let plain = b"not an archive, but bytes".repeat(1000);
        let two_members = [gzip(&plain[..9000]), gzip(&plain[9000..])].concat();
        let zstd = zstd::encode_all(&plain[..], 3).unwrap();
        for (name, bytes) in [
            ("plain", plain.clone()),
            ("gzip", gzip(&plain)),
            ("members", two_members),
            ("zstd", zstd),
        ] {
            let promised = Some(Digest::of(&plain));
            let into = folder.path().join(name);
            unpack(&blob(&bytes), name, promised, &into, &mut Budget::default()).unwrap();
            assert_eq!(std::fs::read(&into).unwrap(), plain, "{name}");
        }
    }

    #[test]
    fn other_bytes_than_promised_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let into = folder.path().join("x");
        let promised = Some(Digest::of(b"a"));
        let error = unpack(
            &blob(b"b"),
            "layer 1",
            promised,
            &into,
            &mut Budget::default(),
        );
        assert!(matches!(error, Err(OciError::Digest { .. })));
    }

    #[test]
    fn a_bomb_and_a_cut_layer_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let zeros = vec![0; (limits::FREE as usize) + 1];
        let bomb = zstd::encode_all(&zeros[..], 3).unwrap();
        let error = unpack(
            &blob(&bomb),
            "x",
            None,
            &folder.path().join("a"),
            &mut Budget::default(),
        );
        assert!(matches!(error, Err(OciError::Limit { .. })), "{error:?}");
        let cut = &gzip(&[7; 5000])[..20];
        let error = unpack(
            &blob(cut),
            "x",
            None,
            &folder.path().join("b"),
            &mut Budget::default(),
        );
        assert!(matches!(error, Err(OciError::Unpack { .. })), "{error:?}");
    }
}
