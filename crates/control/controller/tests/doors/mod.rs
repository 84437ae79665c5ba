//! A server with both kinds of doors.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use axum::Router;
use forkd_edge::listen::{self, Bound, Limits, ListenAddr, Server};
use tokio::net::{TcpSocket, TcpStream};
use tokio_util::sync::CancellationToken;

/// A server on a TCP port and a Unix socket.
pub struct Doors {
    address: SocketAddr,
    pub socket: PathBuf,
    stop: CancellationToken,
}

impl Doors {
    pub async fn open(router: Router, limits: Limits, dir: &Path) -> Self {
        let stop = CancellationToken::new();
        let server = Server::new(router, None, limits, stop.clone());
        let socket = dir.join("api.sock");
        let any = ListenAddr::Tcp("127.0.0.1:0".parse().unwrap());
        let tcp = listen::bind(&any).await.unwrap();
        let Bound::Tcp(listener) = &tcp else {
            panic!("{tcp:?}");
        };
        let address = listener.local_addr().unwrap();
        let unix = listen::bind(&ListenAddr::Unix(socket.clone())).await;
        tokio::spawn(server.clone().accept(tcp));
        tokio::spawn(server.accept(unix.unwrap()));
        Self {
            address,
            socket,
            stop,
        }
    }

    /// A connection from an address of the loopback network.
    pub async fn connect_from(&self, source: [u8; 4]) -> std::io::Result<TcpStream> {
        let socket = TcpSocket::new_v4()?;
        socket.bind(SocketAddr::new(IpAddr::from(source), 0))?;
        socket.connect(self.address).await
    }

    /// The answer to `GET /healthz` over the Unix socket, on a thread of its own.
    pub fn ask_unix(socket: &Path) -> String {
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.write_all(ASK).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }
}

pub const ASK: &[u8] = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";

impl Drop for Doors {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}
