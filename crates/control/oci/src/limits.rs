//! Limits of an image. Images come from strangers: without limits, a small file could fill a disk.

/// Layers of an image.
pub const LAYERS: usize = 128;
/// Entries of all layers together.
pub const ENTRIES: u64 = 2_000_000;
/// Bytes of a path inside an image.
pub const PATH: usize = 4096;
/// Folders above an entry.
pub const DEPTH: usize = 128;
/// Bytes of all layers together, unpacked.
pub const UNPACKED: u64 = 64 << 30;
/// A layer may be this many times larger than its compressed form, once [`FREE`] bytes are unpacked.
pub const RATIO: u64 = 200;
/// Bytes that are unpacked before the ratio counts.
pub const FREE: u64 = 64 << 20;
/// Bytes of a manifest or an index.
pub const MANIFEST: u64 = 4 << 20;
/// Bytes of a configuration.
pub const CONFIG: u64 = 8 << 20;
/// Entries of the outer archive that holds an image.
pub const ARCHIVE_ENTRIES: usize = 100_000;
/// Indexes that lead to one another before a manifest comes.
pub const INDEX_DEPTH: usize = 4;
/// Layers that are fetched at the same time.
pub const AT_ONCE: usize = 4;
/// Redirects of one request.
pub const REDIRECTS: usize = 5;
/// Attempts of one request to a registry, the first included.
pub const ATTEMPTS: u32 = 5;
/// Times that the rest of one blob is asked for.
pub const RESUMES: u32 = 20;
/// Bytes of the answer of a token service, and of an error.
pub const TOKEN: u64 = 64 << 10;
/// Bytes per second below which a blob takes too long.
pub const SLOWEST: u64 = 16 << 10;
/// Bytes of blobs that stay on disk after a pull, for other images with the same layers.
pub const KEPT_BLOBS: u64 = 10 << 30;
