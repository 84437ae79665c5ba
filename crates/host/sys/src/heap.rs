//! The heap.
#![allow(unsafe_code)]

/// Keeps all threads on one heap. With more, the C library counts the processors when it makes another one,
/// by reading a file, and a process that may open no file ends there. It also keeps a VMM small.
pub fn use_one_heap() {
    // SAFETY: changes one number in the allocator, and takes no pointer.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}
