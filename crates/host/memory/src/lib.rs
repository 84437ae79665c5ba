//! Guest RAM.
