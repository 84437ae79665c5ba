//! Configures the network interfaces of the guest.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use forkd_guest_proto::{AgentError, ErrorCode, NetworkRequest};

use crate::error;
use crate::sys;

/// A request that makes sense.
#[derive(Debug, Default, PartialEq, Eq)]
struct Plan {
    mac: Option<[u8; 6]>,
    address: Option<(Ipv4Addr, u8)>,
    gateway: Option<Ipv4Addr>,
    address6: Option<(Ipv6Addr, u8)>,
    gateway6: Option<Ipv6Addr>,
    mtu: Option<u32>,
    dns: Vec<IpAddr>,
}

/// Sets up an interface. What is as it should be is not touched.
pub fn configure(request: &NetworkRequest) -> Result<(), AgentError> {
    let plan = Plan::parse(request)?;
    let name = match &request.interface {
        Some(name) => name.clone(),
        None => first_interface()
            .ok_or_else(|| AgentError::new(ErrorCode::NotFound, "there is no network interface"))?,
    };
    let failed = |what: &str| {
        let (what, name) = (what.to_owned(), name.clone());
        move |error: std::io::Error| error::io(format_args!("cannot set {what} of {name}"), &error)
    };
    if let Some(mac) = plan.mac
        && sys::mac(&name).ok() != Some(mac)
    {
        sys::set_mac(&name, mac).map_err(failed("the hardware address"))?;
    }
    if let Some(mtu) = plan.mtu {
        sys::set_mtu(&name, mtu).map_err(failed("the packet size"))?;
    }
    // A request for nothing but a new hardware address leaves an interface down that has no network.
    if plan.asks_for_more_than_mac() {
        sys::link_up(&name).map_err(failed("the state"))?;
    }
    if let Some((address, prefix)) = plan.address
        && sys::address4(&name).ok() != Some((address, prefix))
    {
        sys::set_address4(&name, address, prefix).map_err(failed("the address"))?;
    }
    if let Some(gateway) = plan.gateway {
        sys::set_default_route4(&name, gateway).map_err(failed("the route"))?;
    }
    if let Some((address, prefix)) = plan.address6 {
        sys::add_address6(&name, address, prefix).map_err(failed("the IPv6 address"))?;
    }
    if let Some(gateway) = plan.gateway6 {
        sys::add_default_route6(&name, gateway).map_err(failed("the IPv6 route"))?;
    }
    write_dns(&plan.dns)
}

fn write_dns(servers: &[IpAddr]) -> Result<(), AgentError> {
    if servers.is_empty() {
        return Ok(());
    }
    let text: String = servers
        .iter()
        .map(|server| format!("nameserver {server}\n"))
        .collect();
    if fs::read_to_string("/etc/resolv.conf").is_ok_and(|old| old == text) {
        return Ok(());
    }
    // Images leave a link here that points nowhere until some service runs.
    if fs::symlink_metadata("/etc/resolv.conf").is_ok_and(|found| found.is_symlink()) {
        let _ = fs::remove_file("/etc/resolv.conf");
    }
    fs::write("/etc/resolv.conf", text)
        .map_err(|error| error::io("cannot write /etc/resolv.conf", &error))
}

/// The first interface that is not the loopback, by name.
pub fn first_interface() -> Option<String> {
    let entries = fs::read_dir("/sys/class/net").ok()?.flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names
        .filter(|name| name.starts_with("eth") || name.starts_with("en"))
        .min()
}

impl Plan {
    fn asks_for_more_than_mac(&self) -> bool {
        let only_mac = Self {
            mac: self.mac,
            ..Self::default()
        };
        self.mac.is_none() || *self != only_mac
    }

    fn parse(request: &NetworkRequest) -> Result<Self, AgentError> {
        Ok(Self {
            mac: request.mac.as_deref().map(parse_mac).transpose()?,
            address: request
                .address
                .as_deref()
                .map(|text| with_prefix(text, 32))
                .transpose()?,
            gateway: request.gateway.as_deref().map(parse).transpose()?,
            address6: request
                .address6
                .as_deref()
                .map(|text| with_prefix(text, 128))
                .transpose()?,
            gateway6: request.gateway6.as_deref().map(parse).transpose()?,
            mtu: request.mtu,
            dns: request
                .dns
                .iter()
                .map(|text| parse(text))
                .collect::<Result<_, _>>()?,
        })
    }
}

fn parse<T: std::str::FromStr>(text: &str) -> Result<T, AgentError> {
    text.parse()
        .map_err(|_| error::bad(format!("{text:?} is not an address")))
}

fn with_prefix<T: std::str::FromStr>(text: &str, longest: u8) -> Result<(T, u8), AgentError> {
    let wrong = || error::bad(format!("{text:?} is not an address with a prefix length"));
    let (address, prefix) = text.split_once('/').ok_or_else(wrong)?;
    let prefix = prefix
        .parse()
        .ok()
        .filter(|prefix| *prefix <= longest)
        .ok_or_else(wrong)?;
    Ok((parse(address)?, prefix))
}

fn parse_mac(text: &str) -> Result<[u8; 6], AgentError> {
    let wrong = || error::bad(format!("{text:?} is not a hardware address"));
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        let part = parts
            .next()
            .filter(|part| part.len() == 2)
            .ok_or_else(wrong)?;
        *byte = u8::from_str_radix(part, 16).map_err(|_| wrong())?;
    }
    if parts.next().is_some() || mac.first().is_some_and(|first| first & 1 == 1) {
        return Err(wrong());
    }
    Ok(mac)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_hardware_address_alone_does_not_bring_an_interface_up() {
        let mac = NetworkRequest {
            mac: Some("02:00:00:00:00:fe".into()),
            ..Default::default()
        };
        let with_address = NetworkRequest {
            address: Some("10.0.0.2/24".into()),
            ..mac.clone()
        };
        let more =
            |request: &NetworkRequest| Plan::parse(request).unwrap().asks_for_more_than_mac();
        assert!(!more(&mac));
        assert!(more(&with_address));
        assert!(more(&NetworkRequest::default()));
    }

    #[test]
    fn plans_are_read_or_refused() {
        let request = NetworkRequest {
            mac: Some("02:00:00:00:00:fe".into()),
            address: Some("10.0.0.2/24".into()),
            gateway: Some("10.0.0.1".into()),
            dns: vec!["1.1.1.1".into(), "::1".into()],
            ..Default::default()
        };
        let plan = Plan::parse(&request).unwrap();
        assert_eq!(plan.mac, Some([2, 0, 0, 0, 0, 0xfe]));
        assert_eq!(plan.address, Some((Ipv4Addr::new(10, 0, 0, 2), 24)));
        assert_eq!(plan.dns.len(), 2);
        for (mac, address) in [
            (Some("01:00:00:00:00:00"), None),
            (Some("02:00:00:00:00"), None),
            (Some("02:00:00:00:00:00:00"), None),
            (None, Some("10.0.0.2")),
            (None, Some("10.0.0.2/33")),
            (None, Some("x/3")),
        ] {
            let request = NetworkRequest {
                mac: mac.map(Into::into),
                address: address.map(Into::into),
                ..Default::default()
            };
            assert_eq!(
                Plan::parse(&request).unwrap_err().code,
                ErrorCode::BadRequest
            );
        }
    }
}
