//! The C library's heap.
#![allow(unsafe_code)]

/// Keeps all threads on one heap. For a second heap the C library counts the processors by reading a file,
/// which the system call filter forbids. One heap also keeps a VMM small.
pub fn use_one_heap() {
    // SAFETY: changes one number in the allocator, and takes no pointer.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}
