//! The monitor of one microVM.
