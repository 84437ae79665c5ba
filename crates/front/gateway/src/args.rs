//! The command line of the gateway.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Parser;
use forkd_edge::config::{ListenAddr, TlsFiles};
use forkd_fleet::etcd::Etcd;
use forkd_fleet::{Member, Members};
use forkd_rest_client::Target;

/// Serves the REST API of forkd over many hosts.
///
/// Clients use the address of the gateway in place of a daemon's. Every daemon needs a name (`forkd-controller serve --node
/// NAME`), which becomes part of the IDs of its sandboxes, and all daemons the same tokens.
#[derive(Debug, Parser)]
#[command(
    name = "forkd-gateway",
    version,
    max_term_width = 100,
    after_help = "\
Examples:
  forkd-gateway --listen 127.0.0.1:8880 --node http://10.0.0.1:8889 --node http://10.0.0.2:8889
  forkd-gateway --listen 0.0.0.0:443 --tls-cert cert.pem --tls-key key.pem --token-file token --etcd http://10.0.0.9:2379"
)]
pub struct Args {
    /// Where to listen: HOST:PORT or unix:///path; may be given several times
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8880")]
    listen: Vec<String>,
    /// The address of a daemon: http://HOST:PORT, https://HOST:PORT or unix:///path; may be given several times
    #[arg(
        long,
        value_name = "URL",
        env = "FORKD_NODES",
        value_delimiter = ',',
        required_unless_present = "etcd",
        conflicts_with = "etcd"
    )]
    node: Vec<Target>,
    /// An etcd endpoint in which daemons are registered (`forkd-controller serve --etcd`); may be given several times
    #[arg(long, value_name = "URL", env = "FORKD_ETCD", value_delimiter = ',')]
    etcd: Vec<String>,
    /// A file with the token of an administrator, with which the gateway reads what each node has
    #[arg(long, value_name = "FILE", env = "FORKD_TOKEN_FILE")]
    token_file: Option<PathBuf>,
    /// TLS certificate chain (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// TLS key (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// A file with certificates (PEM) that nodes with https may have, besides those the host trusts
    #[arg(long, value_name = "FILE")]
    node_ca: Option<PathBuf>,
    /// Host names under which browsers may use the gateway
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    allow_host: Vec<String>,
}

/// The checked settings.
#[derive(Debug)]
pub struct Settings {
    pub listen: Vec<ListenAddr>,
    pub members: Members,
    pub token: Option<String>,
    pub tls: Option<TlsFiles>,
    /// Certificates of nodes, in PEM.
    pub node_ca: Option<Vec<u8>>,
    pub allow_host: Vec<String>,
}

impl Args {
    /// Checks the arguments and reads the files they name.
    pub fn settings(self) -> anyhow::Result<Settings> {
        let listen = self
            .listen
            .iter()
            .map(|text| address(text))
            .collect::<Result<Vec<_>, _>>()?;
        let token = self.token_file.as_deref().map(read_token).transpose()?;
        let is_public = |address: &ListenAddr| matches!(address, ListenAddr::Tcp(tcp) if !tcp.ip().is_loopback());
        if listen.iter().any(is_public) {
            if token.is_none() {
                bail!(
                    "a gateway on a public address needs --token-file, and its daemons need tokens"
                );
            }
            // A daemon takes root on its Unix socket for an administrator, and here that would be the gateway.
            if self.node.iter().any(|node| matches!(node, Target::Unix(_))) {
                bail!("a gateway on a public address takes no nodes on Unix sockets");
            }
        }
        let node_ca = self.node_ca.map(|path| {
            std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
        });
        let members = if self.etcd.is_empty() {
            let member = |target: &Target| Member {
                url: target.to_string(),
            };
            Members::Fixed(self.node.iter().map(member).collect())
        } else {
            Members::Etcd(Etcd::new(&self.etcd)?)
        };
        Ok(Settings {
            listen,
            members,
            token,
            tls: self
                .tls_cert
                .zip(self.tls_key)
                .map(|(cert, key)| TlsFiles { cert, key }),
            node_ca: node_ca.transpose()?,
            allow_host: self.allow_host,
        })
    }
}

fn address(text: &str) -> anyhow::Result<ListenAddr> {
    if let Some(path) = text.strip_prefix("unix://") {
        return Ok(ListenAddr::Unix(path.into()));
    }
    let tcp: SocketAddr = text
        .parse()
        .with_context(|| format!("{text:?} is not an address: write HOST:PORT or unix:///path"))?;
    Ok(ListenAddr::Tcp(tcp))
}

/// The first token of a file in the form of the daemon's: a token, or `name=token`, on each line.
fn read_token(path: &std::path::Path) -> anyhow::Result<String> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let line = text
        .lines()
        .map(str::trim)
        .find(|line| !line.is_empty() && !line.starts_with('#'))
        .with_context(|| format!("{} has no token", path.display()))?;
    let token = line.rsplit_once('=').map_or(line, |(_, token)| token);
    if token.starts_with("b3:") {
        bail!(
            "{} has the digest of a token, and the gateway needs the token",
            path.display()
        );
    }
    Ok(token.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(line: &str) -> anyhow::Result<Settings> {
        let words = std::iter::once("forkd-gateway").chain(line.split_whitespace());
        Args::try_parse_from(words)?.settings()
    }

    #[test]
    fn a_public_address_needs_a_token_and_nodes_with_addresses() {
        assert!(settings("--node http://127.0.0.1:1").is_ok());
        assert!(settings("--listen 0.0.0.0:1 --node http://127.0.0.1:1").is_err());
        let folder = std::env::temp_dir().join(format!("gateway-{}", std::process::id()));
        std::fs::write(&folder, "# a comment\nname=secret\n").unwrap();
        let with = format!("--listen 0.0.0.0:1 --token-file {}", folder.display());
        let found = settings(&format!("{with} --node http://127.0.0.1:1")).unwrap();
        assert_eq!(found.token.as_deref(), Some("secret"));
        assert!(settings(&format!("{with} --node unix:///x")).is_err());
        std::fs::remove_file(&folder).unwrap();
    }

    #[test]
    fn nodes_come_from_one_place() {
        assert!(settings("").is_err());
        assert!(settings("--etcd http://127.0.0.1:2379").is_ok());
        assert!(settings("--etcd nonsense").is_err());
        assert!(settings("--etcd http://127.0.0.1:2379 --node http://127.0.0.1:1").is_err());
        assert!(settings("--node nonsense").is_err());
    }
}
