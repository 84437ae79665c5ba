//! Connections from the host to something inside.

use std::net::SocketAddr;

use forkd_guest_proto::{AgentError, DialRequest, Event, channel, frame::DATA_CHUNK};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

use crate::conn::Stream;
use crate::error;
use crate::transport::Io;

/// Connects and carries bytes both ways until both are at their end.
pub async fn dial(stream: &Stream, request: DialRequest) -> Result<(), AgentError> {
    let failed = |what: &str, error: &std::io::Error| {
        error::io(format_args!("cannot connect to {what}"), error)
    };
    let io: Io = match request {
        DialRequest::Tcp(address) => {
            let target = tcp_target(&address)?;
            let peer = TcpStream::connect(target)
                .await
                .map_err(|error| failed(&address, &error))?;
            let _ = peer.set_nodelay(true);
            Box::new(peer)
        }
        DialRequest::Unix(path) => Box::new(
            UnixStream::connect(&path)
                .await
                .map_err(|error| failed(&path, &error))?,
        ),
    };
    stream
        .send_event(&Event::Connected)
        .await
        .map_err(error::closed)?;
    let (mut reader, mut writer) = tokio::io::split(io);
    let outward = async {
        let mut buffer = vec![0; DATA_CHUNK];
        loop {
            let room = stream
                .reserve(channel::OUT, DATA_CHUNK)
                .await
                .map_err(error::closed)?;
            let part = buffer.get_mut(..room).unwrap_or_default();
            let count = reader
                .read(part)
                .await
                .map_err(|error| error::io("the peer failed", &error))?;
            stream.unreserve(channel::OUT, room, count);
            if count == 0 {
                return stream.send_end(channel::OUT).await.map_err(error::closed);
            }
            let bytes = part.get(..count).unwrap_or_default();
            stream
                .send_reserved(channel::OUT, bytes)
                .await
                .map_err(error::closed)?;
        }
    };
    let inward = async {
        while let Some(bytes) = stream.receive().await {
            writer
                .write_all(&bytes)
                .await
                .map_err(|error| error::io("the peer failed", &error))?;
        }
        let _ = writer.shutdown().await;
        Ok(())
    };
    tokio::try_join!(outward, inward).map(|_| ())
}

/// Numbers only: looking names up needs the guest's own libraries.
fn tcp_target(address: &str) -> Result<SocketAddr, AgentError> {
    if let Ok(port) = address.parse::<u16>() {
        return Ok(SocketAddr::from(([127, 0, 0, 1], port)));
    }
    let address = address
        .strip_prefix("localhost:")
        .map_or_else(|| address.to_owned(), |port| format!("127.0.0.1:{port}"));
    address.parse().map_err(|_| {
        error::bad(format!(
            "{address:?} is not a port or an address with a port"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_read() {
        assert_eq!(tcp_target("80").unwrap(), "127.0.0.1:80".parse().unwrap());
        assert_eq!(
            tcp_target("localhost:80").unwrap(),
            "127.0.0.1:80".parse().unwrap()
        );
        assert_eq!(tcp_target("[::1]:80").unwrap(), "[::1]:80".parse().unwrap());
        assert!(tcp_target("example.org:80").is_err());
        assert!(tcp_target("99999").is_err());
    }
}
