//! System calls that a system call filter must forbid, for tests of filters and of the jail.
//!
//! None of them touches memory of the caller. They are here because they need `unsafe`.
#![allow(unsafe_code)]

use std::io;

const PAGE: usize = 4096;

/// Maps a page with these protections and unmaps it.
fn map_page(protection: libc::c_int) -> io::Result<()> {
    // SAFETY: a new mapping at an address the kernel chooses, which nothing else knows of.
    let page = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            PAGE,
            protection,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if page == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping made above, which nothing uses.
    unsafe { libc::munmap(page, PAGE) };
    Ok(())
}

/// Maps a page that can be written, as an allocator does.
pub fn map_writable_page() -> io::Result<()> {
    map_page(libc::PROT_READ | libc::PROT_WRITE)
}

/// Maps a page that can be written and executed.
pub fn map_executable_page() -> io::Result<()> {
    map_page(libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC)
}

/// Makes a new page executable.
pub fn make_page_executable() -> io::Result<()> {
    // SAFETY: a new mapping at an address the kernel chooses, which nothing else knows of.
    let rc = unsafe {
        let page = libc::mmap(
            std::ptr::null_mut(),
            PAGE,
            libc::PROT_READ,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        libc::mprotect(page, PAGE, libc::PROT_READ | libc::PROT_EXEC)
    };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Sends a signal to a thread of a process.
pub fn signal_thread(process: i32, thread: i32, signal: i32) -> io::Result<()> {
    // SAFETY: a system call without pointers.
    let rc = unsafe { libc::syscall(libc::SYS_tgkill, process, thread, signal) };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Asks to trace a process.
pub fn trace_process(process: i32) -> io::Result<()> {
    // SAFETY: this request uses neither of the two pointers.
    let rc = unsafe { libc::syscall(libc::SYS_ptrace, libc::PTRACE_SEIZE, process, 0, 0) };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Asks to run a program in place of this one. The path is a folder, so the call never succeeds.
pub fn run_program() -> io::Result<()> {
    let none: [*const libc::c_char; 1] = [std::ptr::null()];
    // SAFETY: the path ends with a zero, and both lists with a null pointer.
    unsafe { libc::execve(c"/".as_ptr(), none.as_ptr(), none.as_ptr()) };
    Err(io::Error::last_os_error())
}
