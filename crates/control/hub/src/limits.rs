//! Limits of an artifact. Artifacts come from strangers: every count and length is checked before memory is taken.

/// Bytes of a page.
pub const PAGE: usize = 4096;
/// Pages of a frame.
pub const FRAME_PAGES: usize = 16;
/// Bytes of an unpacked frame.
pub const FRAME: usize = PAGE * FRAME_PAGES;
/// Bytes of a packed frame: zstd adds little to bytes that it cannot pack.
pub const PACKED_FRAME: u32 = FRAME as u32 + 1024;
/// Bytes of a pack.
pub const PACK: u64 = 64 << 20;
/// Packs of an artifact.
pub const PACKS: usize = 1024;
/// Frames of a pack: 1 GiB of pages.
pub const FRAMES: usize = 16384;
/// Stored pages of an artifact, and pages of all its blobs together: 256 GiB.
pub const PAGES: u64 = 1 << 26;
/// Bytes of an unpacked index.
pub const INDEX: u64 = 64 << 20;
/// Blobs of a snapshot.
pub const BLOBS: usize = 512;
/// Bytes of one blob.
pub const BLOB: u64 = 1 << 40;
/// Bytes of a manifest or of the index of a layout.
pub const MANIFEST: u64 = 4 << 20;
/// Bytes of a configuration.
pub const CONFIG: u64 = 1 << 20;
/// Bytes of a signature.
pub const SIGNATURE: u64 = 64 << 10;
/// Signatures of one artifact that are looked at.
pub const SIGNATURES: usize = 16;
/// Bytes of the page hashes: one per stored page.
pub const HASHES: u64 = PAGES * 32;
