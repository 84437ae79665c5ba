//! The system calls that no safe wrapper covers.
#![allow(unsafe_code)]

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use tokio::io::unix::AsyncFd;

use forkd_guest_proto::{ExitStatus, ResourceUsage, Rlimit, RlimitResource};

/// The entry point. The runtime of the standard library is left out because it aborts when it finds no
/// open standard descriptors and no `/dev/null`, which is how a kernel may start PID 1.
#[cfg(not(test))]
#[unsafe(no_mangle)]
pub extern "C" fn main(_argc: libc::c_int, _argv: *const *const libc::c_char) -> libc::c_int {
    crate::start()
}

/// What must hold before any thread exists: broken pipes are errors, the heap stays in one piece and
/// gives memory back.
pub fn prepare_self() {
    // SAFETY: plain calls with constant arguments, made before any other thread runs.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
        libc::mallopt(libc::M_ARENA_MAX, 1);
        // Above the size of the buffers that come and go with every frame.
        libc::mallopt(libc::M_MMAP_THRESHOLD, 512 * 1024);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 512 * 1024);
    }
}

/// A descriptor that the event loop watches.
pub fn watched(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an owned descriptor stays the same open descriptor until it is dropped, and the returned
    // value owns it and takes it off the event loop first.
    unsafe { AsyncFd::register(fd) }.map_err(Into::into)
}

/// How a child ended.
#[derive(Debug, Clone, Copy)]
pub struct Reaped {
    pub status: ExitStatus,
    pub usage: ResourceUsage,
}

/// Waits for one child that has ended; `None` when there is none.
pub fn reap_one() -> Option<(u32, Reaped)> {
    loop {
        let mut status = 0;
        // SAFETY: an all-zero rusage is a valid value, and both pointers are to live locals.
        let (pid, usage) = unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            (
                libc::wait4(-1, &raw mut status, libc::WNOHANG, &raw mut usage),
                usage,
            )
        };
        if pid < 0 && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted {
            continue;
        }
        let pid = u32::try_from(pid).ok().filter(|pid| *pid > 0)?;
        let status = if libc::WIFEXITED(status) {
            ExitStatus::Code(libc::WEXITSTATUS(status))
        } else {
            ExitStatus::Signal(libc::WTERMSIG(status))
        };
        let micros = |time: libc::timeval| {
            let whole = u64::try_from(time.tv_sec)
                .unwrap_or(0)
                .saturating_mul(1_000_000);
            whole.saturating_add(u64::try_from(time.tv_usec).unwrap_or(0))
        };
        let usage = ResourceUsage {
            user_us: micros(usage.ru_utime),
            system_us: micros(usage.ru_stime),
            max_rss_kib: u64::try_from(usage.ru_maxrss).unwrap_or(0),
        };
        return Some((pid, Reaped { status, usage }));
    }
}

/// What a child does to itself before it becomes another program.
pub struct ChildSetup {
    pub controlling_terminal: bool,
    pub identity: Option<(u32, u32, Vec<u32>)>,
    pub rlimits: Vec<Rlimit>,
    /// `cgroup.procs` of the group it joins.
    pub cgroup: Option<OwnedFd>,
}

/// Makes the child of `command` a session of its own with this set-up.
pub fn prepare_child(command: &mut Command, setup: ChildSetup) {
    let limits: Vec<_> = setup.rlimits.iter().map(raw_limit).collect();
    // SAFETY: between fork and exec the closure makes only system calls; everything it reads was built
    // before the fork and it allocates nothing.
    unsafe {
        command.pre_exec(move || {
            reset_signals();
            if libc::setsid() < 0 {
                return Err(io::Error::last_os_error());
            }
            if setup.controlling_terminal && libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
                return Err(io::Error::last_os_error());
            }
            leave_the_agents_privileges(setup.cgroup.as_ref());
            for (resource, limit) in &limits {
                if libc::setrlimit(*resource, limit) < 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            match &setup.identity {
                Some((uid, gid, groups)) => become_user(*uid, *gid, groups),
                None => Ok(()),
            }
        });
    }
}

unsafe fn reset_signals() {
    // SAFETY: called in the child between fork and exec; the set is a live local.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    }
}

/// The agent shields itself from the out-of-memory killer and may live in a cgroup of its own and at a
/// better priority; its children do not. Where that cannot be undone there was nothing to undo.
unsafe fn leave_the_agents_privileges(cgroup: Option<&OwnedFd>) {
    // SAFETY: called in the child between fork and exec; all pointers are to constants.
    unsafe {
        if let Some(cgroup) = cgroup {
            libc::write(cgroup.as_raw_fd(), c"0".as_ptr().cast(), 1);
        }
        let fd = libc::open(
            c"/proc/self/oom_score_adj".as_ptr(),
            libc::O_WRONLY | libc::O_CLOEXEC,
        );
        if fd >= 0 {
            libc::write(fd, c"0".as_ptr().cast(), 1);
            libc::close(fd);
        }
        libc::setpriority(libc::PRIO_PROCESS, 0, 0);
    }
}

unsafe fn become_user(uid: u32, gid: u32, groups: &[u32]) -> io::Result<()> {
    // SAFETY: called in the child between fork and exec, which has one thread, so the plain calls act on
    // the whole process; the group list outlives the call.
    let failed = unsafe {
        libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) < 0
            || libc::syscall(libc::SYS_setgid, gid) < 0
            || libc::syscall(libc::SYS_setuid, uid) < 0
    };
    if failed {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

fn raw_limit(limit: &Rlimit) -> (libc::__rlimit_resource_t, libc::rlimit) {
    let resource = match limit.resource {
        RlimitResource::As => libc::RLIMIT_AS,
        RlimitResource::Core => libc::RLIMIT_CORE,
        RlimitResource::Cpu => libc::RLIMIT_CPU,
        RlimitResource::Data => libc::RLIMIT_DATA,
        RlimitResource::Fsize => libc::RLIMIT_FSIZE,
        RlimitResource::Memlock => libc::RLIMIT_MEMLOCK,
        RlimitResource::Nofile => libc::RLIMIT_NOFILE,
        RlimitResource::Nproc => libc::RLIMIT_NPROC,
        RlimitResource::Stack => libc::RLIMIT_STACK,
    };
    let value = limit.limit.unwrap_or(libc::RLIM_INFINITY);
    (
        resource,
        libc::rlimit {
            rlim_cur: value,
            rlim_max: value,
        },
    )
}

/// Opens the standard descriptors that are closed: the console where there is one. Programs started by an
/// agent without them would find their files under these numbers.
pub fn open_standard_descriptors() {
    for path in [c"/dev/console", c"/dev/null"] {
        loop {
            // SAFETY: plain calls with a constant path; descriptors above 2 are closed again, the others are
            // meant to stay open for ever.
            let fd = unsafe { libc::open(path.as_ptr(), libc::O_RDWR | libc::O_NOCTTY) };
            if fd > 2 {
                // SAFETY: it was opened just above and nobody else knows it.
                unsafe { libc::close(fd) };
                return;
            }
            if fd < 0 {
                break;
            }
        }
    }
}

/// Runs before others when there is a choice.
pub fn raise_priority() {
    // SAFETY: a plain call about this process itself.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -10) };
}

/// Sets the host name.
pub fn set_hostname(name: &str) -> io::Result<()> {
    Ok(rustix::system::sethostname(name.as_bytes())?)
}

/// Gives the kernel's random number generator fresh bytes, counted as such, and has it use them at once.
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

/// Duplicates a descriptor of another process.
pub fn take_descriptor(pidfd: &OwnedFd, number: i32) -> io::Result<OwnedFd> {
    // SAFETY: plain numbers; the result is a new descriptor that nobody else owns.
    unsafe {
        let fd = libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), number, 0);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(OwnedFd::from_raw_fd(
            i32::try_from(fd).map_err(|_| io::ErrorKind::InvalidData)?,
        ))
    }
}

/// Breaks a TCP connection without telling the peer: whoever holds the socket finds it aborted.
pub fn break_connection(socket: &OwnedFd) -> io::Result<()> {
    let on: libc::c_int = 1;
    let length = libc::socklen_t::try_from(size_of::<libc::c_int>()).unwrap_or(4);
    // SAFETY: the option is a live integer of the length that is given. A socket under repair sends nothing.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_REPAIR,
            (&raw const on).cast(),
            length,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: an all-zero address is valid and its family then says "none"; the length is that of the type.
    let result = unsafe {
        let address: libc::sockaddr = std::mem::zeroed();
        let length = libc::socklen_t::try_from(size_of::<libc::sockaddr>()).unwrap_or(16);
        libc::connect(socket.as_raw_fd(), &raw const address, length)
    };
    let broken = if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    };
    let off: libc::c_int = 0;
    // SAFETY: as above. A socket left under repair could never connect again.
    unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_REPAIR,
            (&raw const off).cast(),
            length,
        );
    }
    broken
}

/// A request about one interface, as the kernel has it.
struct InterfaceRequest {
    socket: OwnedFd,
    request: libc::ifreq,
}

impl InterfaceRequest {
    fn new(name: &str) -> io::Result<Self> {
        Self::on(libc::AF_INET, name)
    }

    fn on(family: libc::c_int, name: &str) -> io::Result<Self> {
        // SAFETY: plain numbers; the descriptor is wrapped at once.
        let socket = unsafe {
            let fd = libc::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(fd)
        };
        // SAFETY: all-zero is a valid value of this structure of numbers.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        if name.is_empty() || name.len() >= request.ifr_name.len() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *to = from.cast_signed();
        }
        Ok(Self { socket, request })
    }

    fn call(&mut self, number: libc::c_ulong) -> io::Result<()> {
        // SAFETY: every request this type is used with takes a pointer to this structure.
        if unsafe { libc::ioctl(self.socket.as_raw_fd(), number, &raw mut self.request) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    fn set_address(&mut self, address: Ipv4Addr) {
        self.request.ifr_ifru.ifru_addr = socket_address(address);
    }

    fn address(&self) -> Ipv4Addr {
        // SAFETY: the request that was made fills in an address, and any bytes are one.
        let data = unsafe { self.request.ifr_ifru.ifru_addr.sa_data };
        let [_, _, a, b, c, d, ..] = data.map(i8::cast_unsigned);
        Ipv4Addr::new(a, b, c, d)
    }
}

fn socket_address(address: Ipv4Addr) -> libc::sockaddr {
    let mut data = [0; 14];
    for (to, from) in data.iter_mut().skip(2).zip(address.octets()) {
        *to = from.cast_signed();
    }
    libc::sockaddr {
        sa_family: libc::AF_INET as libc::sa_family_t,
        sa_data: data,
    }
}

/// Starts an interface.
pub fn link_up(name: &str) -> io::Result<()> {
    set_link(name, true)
}

fn set_link(name: &str, up: bool) -> io::Result<()> {
    let mut request = InterfaceRequest::new(name)?;
    request.call(libc::SIOCGIFFLAGS)?;
    let bit = libc::IFF_UP as libc::c_short;
    // SAFETY: the request above has filled in the flags.
    let flags = unsafe { request.request.ifr_ifru.ifru_flags };
    let wanted = if up { flags | bit } else { flags & !bit };
    if wanted == flags {
        return Ok(());
    }
    request.request.ifr_ifru.ifru_flags = wanted;
    request.call(libc::SIOCSIFFLAGS)
}

/// The hardware address of an interface.
pub fn mac(name: &str) -> io::Result<[u8; 6]> {
    let mut request = InterfaceRequest::new(name)?;
    request.call(libc::SIOCGIFHWADDR)?;
    // SAFETY: the request above has filled in the address.
    let data = unsafe { request.request.ifr_ifru.ifru_hwaddr.sa_data };
    let [a, b, c, d, e, f, ..] = data.map(i8::cast_unsigned);
    Ok([a, b, c, d, e, f])
}

/// Sets the hardware address of an interface; one that must be stopped for it is.
pub fn set_mac(name: &str, mac: [u8; 6]) -> io::Result<()> {
    let mut request = InterfaceRequest::new(name)?;
    let mut data = [0; 14];
    for (to, from) in data.iter_mut().zip(mac) {
        *to = from.cast_signed();
    }
    let address = libc::sockaddr {
        sa_family: libc::ARPHRD_ETHER,
        sa_data: data,
    };
    request.request.ifr_ifru.ifru_hwaddr = address;
    match request.call(libc::SIOCSIFHWADDR) {
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
            set_link(name, false)?;
            request.request.ifr_ifru.ifru_hwaddr = address;
            let result = request.call(libc::SIOCSIFHWADDR);
            set_link(name, true)?;
            result
        }
        other => other,
    }
}

/// Sets the largest packet of an interface.
pub fn set_mtu(name: &str, mtu: u32) -> io::Result<()> {
    let mut request = InterfaceRequest::new(name)?;
    request.request.ifr_ifru.ifru_mtu =
        i32::try_from(mtu).map_err(|_| io::ErrorKind::InvalidInput)?;
    request.call(libc::SIOCSIFMTU)
}

/// The IPv4 address and prefix length of an interface.
pub fn address4(name: &str) -> io::Result<(Ipv4Addr, u8)> {
    let mut request = InterfaceRequest::new(name)?;
    request.call(libc::SIOCGIFADDR)?;
    let address = request.address();
    request.call(libc::SIOCGIFNETMASK)?;
    let prefix = u32::from(request.address()).count_ones();
    Ok((address, u8::try_from(prefix).unwrap_or(32)))
}

/// Sets the IPv4 address of an interface; the routes of an old one go with it.
pub fn set_address4(name: &str, address: Ipv4Addr, prefix: u8) -> io::Result<()> {
    let mut request = InterfaceRequest::new(name)?;
    request.set_address(address);
    request.call(libc::SIOCSIFADDR)?;
    let mask = u32::MAX
        .checked_shl(32 - u32::from(prefix.min(32)))
        .unwrap_or(0);
    request.set_address(Ipv4Addr::from(mask));
    request.call(libc::SIOCSIFNETMASK)
}

/// Sends everything that has no nearer route to a gateway; an older default route goes.
pub fn set_default_route4(name: &str, gateway: Ipv4Addr) -> io::Result<()> {
    let device = std::ffi::CString::new(name)?;
    let request = InterfaceRequest::new(name)?;
    // SAFETY: all-zero is a valid value of this structure of numbers and pointers.
    let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
    route.rt_dst = socket_address(Ipv4Addr::UNSPECIFIED);
    route.rt_genmask = socket_address(Ipv4Addr::UNSPECIFIED);
    route.rt_flags = libc::RTF_UP;
    // SAFETY: the structure is live and names no device, which stands for any.
    unsafe {
        libc::ioctl(
            request.socket.as_raw_fd(),
            libc::SIOCDELRT,
            &raw const route,
        )
    };
    route.rt_gateway = socket_address(gateway);
    route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
    route.rt_dev = device.as_ptr().cast_mut();
    // SAFETY: the structure and the name it points to are live; the kernel only reads them.
    if unsafe {
        libc::ioctl(
            request.socket.as_raw_fd(),
            libc::SIOCADDRT,
            &raw const route,
        )
    } < 0
    {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn interface_index(name: &str) -> io::Result<i32> {
    let mut request = InterfaceRequest::new(name)?;
    request.call(libc::SIOCGIFINDEX)?;
    // SAFETY: the request above has filled in the index.
    Ok(unsafe { request.request.ifr_ifru.ifru_ifindex })
}

/// Adds an IPv6 address to an interface.
pub fn add_address6(name: &str, address: Ipv6Addr, prefix: u8) -> io::Result<()> {
    #[repr(C)]
    struct Request {
        address: libc::in6_addr,
        prefix: u32,
        index: libc::c_int,
    }
    let request = Request {
        address: libc::in6_addr {
            s6_addr: address.octets(),
        },
        prefix: u32::from(prefix),
        index: interface_index(name)?,
    };
    let socket = InterfaceRequest::on(libc::AF_INET6, name)?.socket;
    // SAFETY: the structure is live and laid out as the kernel has it.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFADDR, &raw const request) } < 0 {
        let error = io::Error::last_os_error();
        return if error.raw_os_error() == Some(libc::EEXIST) {
            Ok(())
        } else {
            Err(error)
        };
    }
    Ok(())
}

/// Adds an IPv6 default route.
pub fn add_default_route6(name: &str, gateway: Ipv6Addr) -> io::Result<()> {
    #[repr(C)]
    struct Route {
        target: [u8; 16],
        source: [u8; 16],
        gateway: [u8; 16],
        kind: u32,
        target_prefix: u16,
        source_prefix: u16,
        metric: u32,
        info: libc::c_ulong,
        flags: u32,
        index: libc::c_int,
    }
    let socket = InterfaceRequest::on(libc::AF_INET6, name)?.socket;
    let route = Route {
        target: [0; 16],
        source: [0; 16],
        gateway: gateway.octets(),
        kind: 0,
        target_prefix: 0,
        source_prefix: 0,
        metric: 1,
        info: 0,
        flags: u32::from(libc::RTF_UP | libc::RTF_GATEWAY),
        index: interface_index(name)?,
    };
    // SAFETY: the structure is live; the kernel only reads it.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCADDRT, &raw const route) } < 0 {
        let error = io::Error::last_os_error();
        return if error.raw_os_error() == Some(libc::EEXIST) {
            Ok(())
        } else {
            Err(error)
        };
    }
    Ok(())
}

/// Sends a signal to every process but this one. Only for the first process of a machine.
pub fn signal_everybody(signal: rustix::process::Signal) {
    if std::process::id() == 1 {
        // SAFETY: plain numbers.
        unsafe { libc::kill(-1, signal.as_raw()) };
    }
}

/// Some process is there besides this one and the kernel's own.
pub fn anybody_else() -> bool {
    // SAFETY: plain numbers; no signal is sent.
    std::process::id() == 1 && unsafe { libc::kill(-1, 0) } == 0
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
