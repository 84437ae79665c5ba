//! Network interfaces: addresses, routes, hardware addresses.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// The structure that the interface requests of the kernel take, with a socket to make them on.
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
