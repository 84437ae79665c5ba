//! The `forkd.` words of the kernel's command line.

use forkd_guest_proto::{AGENT_PORT, NetworkRequest};

use crate::agent::Role;
use crate::transport::Address;

/// The parsed `forkd.` words.
#[derive(Debug, PartialEq, Eq)]
pub struct Cmdline {
    pub role: Role,
    pub root: Root,
    pub listen: Address,
    pub hostname: String,
    pub network: Option<NetworkRequest>,
}

/// The file system that becomes the root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Root {
    /// The first disk if there is one; with a layer in memory over it if it cannot be written.
    Auto,
    /// The first disk with a layer in memory over it.
    Overlay,
    /// The initramfs itself.
    Initramfs,
}

impl Cmdline {
    /// Reads it from the kernel.
    pub fn read() -> Self {
        Self::parse(&std::fs::read_to_string("/proc/cmdline").unwrap_or_default())
    }

    /// Words that make no sense are passed over: a guest that comes up with a default can say what is
    /// wrong, one that does not come up cannot.
    pub fn parse(text: &str) -> Self {
        let value = |key: &str| {
            let words = text
                .split_ascii_whitespace()
                .filter_map(|word| word.split_once('='));
            words
                .filter(|(name, _)| *name == key)
                .map(|(_, value)| value)
                .next_back()
        };
        let role = match value("forkd.role") {
            Some("machine") => Role::Machine,
            _ => Role::Guest,
        };
        let root = match value("forkd.root") {
            Some("overlay") => Root::Overlay,
            Some("none" | "initramfs") => Root::Initramfs,
            _ => Root::Auto,
        };
        let port = u16::try_from(AGENT_PORT).unwrap_or(1024);
        let default_listen = match role {
            Role::Machine => Address::Tcp(format!("0.0.0.0:{port}")),
            _ => Address::Vsock(AGENT_PORT),
        };
        let listen = value("forkd.listen")
            .and_then(|text| text.parse().ok())
            .unwrap_or(default_listen);
        let hostname = value("forkd.hostname")
            .unwrap_or("forkd")
            .chars()
            .take(63)
            .collect();
        Self {
            role,
            root,
            listen,
            hostname,
            network: network(role, value),
        }
    }
}

fn network<'a>(role: Role, value: impl Fn(&str) -> Option<&'a str>) -> Option<NetworkRequest> {
    let owned = |key: &str| value(key).map(ToOwned::to_owned);
    if let Some(address) = owned("forkd.ip") {
        return Some(NetworkRequest {
            interface: owned("forkd.interface"),
            address: Some(address),
            gateway: owned("forkd.gw"),
            mac: owned("forkd.mac"),
            dns: value("forkd.dns")
                .map(|list| list.split(',').map(ToOwned::to_owned).collect())
                .unwrap_or_default(),
            ..Default::default()
        });
    }
    // What QEMU's user-mode network gives to its first guest.
    (role == Role::Machine).then(|| NetworkRequest {
        address: Some("10.0.2.15/24".to_owned()),
        gateway: Some("10.0.2.2".to_owned()),
        dns: vec!["10.0.2.3".to_owned()],
        ..Default::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_guest_is_the_default() {
        let cmdline = Cmdline::parse("console=ttyS0 quiet");
        assert_eq!(cmdline.role, Role::Guest);
        assert_eq!(
            (cmdline.root, cmdline.listen),
            (Root::Auto, Address::Vsock(1024))
        );
        assert_eq!(cmdline.network, None);
    }

    #[test]
    fn words_are_read_and_the_last_one_counts() {
        let text = "forkd.root=overlay forkd.hostname=a forkd.hostname=b forkd.ip=10.1.0.2/30 forkd.gw=10.1.0.1 \
                    forkd.dns=1.1.1.1,9.9.9.9 forkd.listen=tcp:99";
        let cmdline = Cmdline::parse(text);
        assert_eq!(
            (cmdline.root, cmdline.hostname.as_str()),
            (Root::Overlay, "b")
        );
        assert_eq!(cmdline.listen, Address::Tcp("0.0.0.0:99".into()));
        let network = cmdline.network.unwrap();
        assert_eq!(network.address.as_deref(), Some("10.1.0.2/30"));
        assert_eq!(network.dns, ["1.1.1.1", "9.9.9.9"]);
    }

    #[test]
    fn a_machine_has_its_own_defaults() {
        let cmdline = Cmdline::parse("forkd.role=machine");
        assert_eq!(cmdline.listen, Address::Tcp("0.0.0.0:1024".into()));
        assert_eq!(
            cmdline.network.unwrap().gateway.as_deref(),
            Some("10.0.2.2")
        );
    }

    proptest! {
        #[test]
        fn any_text_is_read(text in ".*") {
            let _ = Cmdline::parse(&text);
        }
    }
}
