//! The host name, the kernel's random number generator, and free blocks of disks.

use std::io;
use std::os::fd::AsRawFd;

/// Sets the host name.
pub fn set_hostname(name: &str) -> io::Result<()> {
    Ok(rustix::system::sethostname(name.as_bytes())?)
}

/// Adds entropy to the kernel's random number generator, credits it in full and reseeds the generator at once.
pub fn add_entropy(bytes: &[u8]) -> io::Result<()> {
    const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
    const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
    let random = std::fs::OpenOptions::new()
        .write(true)
        .open("/dev/urandom")?;
    // A bit count, a byte count, and the bytes.
    let mut request = Vec::with_capacity(8 + bytes.len());
    let count = i32::try_from(bytes.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    request.extend_from_slice(&count.saturating_mul(8).to_ne_bytes());
    request.extend_from_slice(&count.to_ne_bytes());
    request.extend_from_slice(bytes);
    // The kernel reads whole words.
    let words: Vec<u32> = request
        .chunks(4)
        .map(|chunk| {
            let mut word = [0; 4];
            for (to, from) in word.iter_mut().zip(chunk) {
                *to = *from;
            }
            u32::from_ne_bytes(word)
        })
        .collect();
    // SAFETY: the pointer is to a live buffer that is as long as its own count says.
    if unsafe { libc::ioctl(random.as_raw_fd(), RNDADDENTROPY, words.as_ptr()) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: takes no argument.
    if unsafe { libc::ioctl(random.as_raw_fd(), RNDRESEEDCRNG) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Writes a file system out as a clean unmount does and holds further writes (`FIFREEZE`), or lets them go on.
pub fn hold_writes(mount: &std::path::Path, held: bool) -> io::Result<()> {
    const FIFREEZE: libc::c_ulong = 0xc004_5877;
    const FITHAW: libc::c_ulong = 0xc004_5878;
    let directory = std::fs::File::open(mount)?;
    let request = if held { FIFREEZE } else { FITHAW };
    // SAFETY: neither request reads or writes memory of the caller.
    if unsafe { libc::ioctl(directory.as_raw_fd(), request, 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Tells the disk under a mount point which of its blocks are free.
pub fn trim(mount: &str) -> io::Result<()> {
    const FITRIM: libc::c_ulong = 0xc018_5879;
    let directory = std::fs::File::open(mount)?;
    let mut range = [0u64, u64::MAX, 0];
    // SAFETY: the range is live and laid out as the kernel has it: start, length, least length.
    if unsafe { libc::ioctl(directory.as_raw_fd(), FITRIM, range.as_mut_ptr()) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
