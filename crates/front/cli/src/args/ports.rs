//! Arguments about the ports of a sandbox: `forkd ports`, `forkd forward`, and `--publish` of `spawn`.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;

use clap::{Args, ValueEnum};
use forkd_api::{PortAccess, PortRequest};

use super::DaemonArgs;

/// Clients that may use a port.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Access {
    /// Clients with a token of the owner
    Owner,
    /// Clients with the access token of the sandbox
    Token,
    /// Every client that reaches the daemon
    Public,
}

impl From<Access> for PortAccess {
    fn from(access: Access) -> Self {
        match access {
            Access::Owner => Self::Owner,
            Access::Token => Self::Token,
            Access::Public => Self::Public,
        }
    }
}

/// A local address and a port of the guest: `[ADDRESS:]LOCAL:PORT`, or `PORT` for the same number on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortPair {
    pub local: SocketAddr,
    pub port: u16,
}

impl FromStr for PortPair {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || "write PORT, LOCAL:PORT or ADDRESS:LOCAL:PORT, such as 8080:80".to_owned();
        let number = |text: &str| text.parse::<u16>().map_err(|_| invalid());
        let here = IpAddr::from(Ipv4Addr::LOCALHOST);
        let (local, port) = match text.rsplit_once(':') {
            None => (SocketAddr::new(here, number(text)?), number(text)?),
            Some((local, port)) => {
                let local = match local.contains(':') {
                    true => local.parse().map_err(|_| invalid())?,
                    false => SocketAddr::new(here, number(local)?),
                };
                (local, number(port)?)
            }
        };
        if port == 0 {
            return Err("a port of a sandbox is 1 to 65535".to_owned());
        }
        Ok(Self { local, port })
    }
}

/// Host ports of each sandbox that a command starts.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Ports of each sandbox")]
pub struct PublishArgs {
    /// Publish a port on this host: [ADDRESS:]HOST:PORT, or PORT; host port 0 takes a free one; repeatable
    #[arg(long, value_name = "HOST:PORT")]
    pub publish: Vec<PortPair>,
}

impl PublishArgs {
    /// The ports as the API takes them.
    pub fn request(&self) -> Vec<PortRequest> {
        self.publish
            .iter()
            .map(|pair| PortRequest {
                port: pair.port,
                access: PortAccess::Owner,
                host: Some(pair.local.to_string()),
            })
            .collect()
    }
}

/// Arguments of `forkd ports`.
#[derive(Debug, Args)]
#[command(
    after_help = "A port is reached at its URL (PORT-ID.DOMAIN), at its path on the daemon, and on its host port.\n\
    The URL is for clients that the access lets in; a host port is for every client that reaches it.\n\
    Servers that listen on 127.0.0.1 of the guest are reached, and the guest needs no network.\n\nExamples:\n  \
    forkd ports sb…                           ports on which programs listen\n  \
    forkd ports sb… 3000 --access public      let everyone use port 3000 by its URL\n  \
    forkd ports sb… 3000 --access token       print the token that clients need\n  \
    forkd ports sb… 5432 --publish 15432      reach port 5432 at 127.0.0.1:15432\n  \
    forkd ports sb… 5432 --close              back to the owner alone, without a host port"
)]
pub struct PortsArgs {
    /// ID of the sandbox
    pub id: String,
    /// Show or change this port
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    pub port: Option<u16>,
    /// Clients that may use the port by its URL
    #[arg(long, value_enum, requires = "port", value_name = "WHO")]
    pub access: Option<Access>,
    /// Publish the port on this host: [ADDRESS:]PORT; 0 takes a free port
    #[arg(long, requires = "port", value_name = "[ADDRESS:]PORT", value_parser = host)]
    pub publish: Option<SocketAddr>,
    /// Forget the settings of the port and close its host port
    #[arg(long, requires = "port", conflicts_with_all = ["access", "publish"])]
    pub close: bool,
    /// Print the answer as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

fn host(text: &str) -> Result<SocketAddr, String> {
    let invalid = |_| "write PORT or ADDRESS:PORT, such as 127.0.0.1:8080".to_owned();
    match text.parse::<u16>() {
        Ok(port) => Ok(SocketAddr::from((Ipv4Addr::LOCALHOST, port))),
        Err(_) => text.parse().map_err(invalid),
    }
}

/// Arguments of `forkd forward`.
#[derive(Debug, Args)]
#[command(
    after_help = "The connections go through the daemon, so this works from every host that reaches the daemon.\n\
    The forwarding ends with this command.\n\nExamples:\n  \
    forkd forward sb… 8080:80          127.0.0.1:8080 here is port 80 there\n  \
    forkd forward sb… 5432 6379        the same number on both sides\n  \
    forkd forward sb… 0:80             a free local port; the command prints it"
)]
pub struct ForwardArgs {
    /// ID of the sandbox
    pub id: String,
    /// Local port and port of the sandbox: [ADDRESS:]LOCAL:PORT, or PORT
    #[arg(required = true, value_name = "LOCAL:PORT")]
    pub ports: Vec<PortPair>,
    /// Print each local address as a JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_of_ports_are_parsed() {
        let pair = |text: &str| {
            let pair: PortPair = text.parse().unwrap();
            (pair.local.to_string(), pair.port)
        };
        assert_eq!(pair("80"), ("127.0.0.1:80".into(), 80));
        assert_eq!(pair("8080:80"), ("127.0.0.1:8080".into(), 80));
        assert_eq!(pair("0.0.0.0:8080:80"), ("0.0.0.0:8080".into(), 80));
        assert_eq!(pair("[::1]:8080:80"), ("[::1]:8080".into(), 80));
        for bad in ["", ":", "a:80", "80:0", "80:", "1:2:3", "70000:1"] {
            assert!(bad.parse::<PortPair>().is_err(), "{bad}");
        }
    }
}
