//! Listeners for the host: vsock, TCP, Unix sockets.

use std::io;
use std::path::PathBuf;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio_vsock::{VMADDR_CID_ANY, VMADDR_CID_HOST, VsockAddr, VsockListener};

/// A byte stream, whatever carries it.
pub trait ByteStream: AsyncRead + AsyncWrite + Unpin {}
impl<T: AsyncRead + AsyncWrite + Unpin> ByteStream for T {}

/// A byte stream, whatever carries it.
pub type Io = Box<dyn ByteStream>;

/// Where to listen: `vsock:PORT`, `tcp:PORT`, `tcp:ADDRESS:PORT` or `unix:PATH`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A vsock port; only the host may connect.
    Vsock(u32),
    /// An address and port; the peer must know the token, if there is one.
    Tcp(String),
    /// A socket in the file system.
    Unix(PathBuf),
}

impl std::str::FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("vsock", port)) => port
                .parse()
                .map(Self::Vsock)
                .map_err(|error| format!("vsock port {port:?}: {error}")),
            Some(("tcp", port)) if port.parse::<u16>().is_ok() => {
                Ok(Self::Tcp(format!("0.0.0.0:{port}")))
            }
            Some(("tcp", address)) => address
                .parse::<std::net::SocketAddr>()
                .map(|address| Self::Tcp(address.to_string()))
                .map_err(|error| format!("tcp address {address:?}: {error}")),
            Some(("unix", path)) if !path.is_empty() => Ok(Self::Unix(path.into())),
            _ => Err(format!(
                "{text:?} is not vsock:PORT, tcp:PORT, tcp:ADDRESS:PORT or unix:PATH"
            )),
        }
    }
}

/// A bound [`Address`].
pub enum Listener {
    Vsock(VsockListener),
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    pub async fn bind(address: &Address) -> io::Result<Self> {
        Ok(match address {
            Address::Vsock(port) => {
                Self::Vsock(VsockListener::bind(VsockAddr::new(VMADDR_CID_ANY, *port))?)
            }
            Address::Tcp(address) => Self::Tcp(TcpListener::bind(address.as_str()).await?),
            Address::Unix(path) => {
                let _ = std::fs::remove_file(path);
                Self::Unix(UnixListener::bind(path)?)
            }
        })
    }

    /// The next connection.
    pub async fn accept(&mut self) -> io::Result<Io> {
        loop {
            return Ok(match self {
                Self::Vsock(listener) => {
                    let (stream, peer) = listener.accept().await?;
                    if peer.cid() != VMADDR_CID_HOST {
                        continue;
                    }
                    Box::new(stream)
                }
                Self::Tcp(listener) => {
                    let (stream, _) = listener.accept().await?;
                    stream.set_nodelay(true)?;
                    Box::new(stream)
                }
                Self::Unix(listener) => Box::new(listener.accept().await?.0),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read() {
        assert_eq!("vsock:1024".parse(), Ok(Address::Vsock(1024)));
        assert_eq!("tcp:1024".parse(), Ok(Address::Tcp("0.0.0.0:1024".into())));
        assert_eq!(
            "tcp:127.0.0.1:0".parse(),
            Ok(Address::Tcp("127.0.0.1:0".into()))
        );
        assert_eq!("unix:/run/a".parse(), Ok(Address::Unix("/run/a".into())));
        for wrong in [
            "",
            "tcp",
            "tcp:",
            "vsock:x",
            "unix:",
            "tcp:localhost:1",
            "ftp:1",
        ] {
            assert!(wrong.parse::<Address>().is_err(), "{wrong}");
        }
    }
}
