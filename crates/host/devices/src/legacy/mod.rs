//! Legacy.
