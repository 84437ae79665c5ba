//! Bounds on everything that a Dockerfile or a `.dockerignore` file can ask for.

/// Bytes of a Dockerfile.
pub const FILE_BYTES: usize = 1 << 20;
/// Instructions in all stages.
pub const INSTRUCTIONS: usize = 1000;
pub const STAGES: usize = 64;
/// Here-documents of one instruction.
pub const HEREDOCS: usize = 32;
/// Sources of one `COPY` or `ADD`.
pub const SOURCES: usize = 1000;
/// Mounts of one `RUN`.
pub const MOUNTS: usize = 32;
/// Bytes of one expanded text.
pub const EXPANDED_BYTES: usize = 1 << 20;
/// Expansions inside expansions.
pub const EXPAND_DEPTH: usize = 16;
/// Bytes of a `.dockerignore` file.
pub const IGNORE_BYTES: usize = 256 << 10;
/// Patterns of a `.dockerignore` file.
pub const IGNORE_PATTERNS: usize = 2000;
/// Bytes of a pattern.
pub const PATTERN_BYTES: usize = 4096;
