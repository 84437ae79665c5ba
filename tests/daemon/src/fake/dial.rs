//! Connections to ports of a fake guest. Its loopback interface is that of the host, so a scenario is the server.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};

use forkd_guest_proto::{AgentError, ErrorCode, Event, Kind, channel, frame};

use super::agent::{Answer, Connection, Input, ok};

/// Connects and carries bytes both ways until both are at their end.
pub(super) fn dial(
    connection: &Connection,
    stream: u32,
    address: &str,
    input: &Input,
) -> io::Result<Answer> {
    // A fake guest has no other address, and nothing may leave the host.
    let target = address.parse::<SocketAddr>().map_err(io::Error::other);
    let target = target.and_then(|target| match target.ip().is_loopback() {
        true => Ok(target),
        false => Err(rustix::io::Errno::CONNREFUSED.into()),
    });
    let mut peer = match target.and_then(TcpStream::connect) {
        Ok(peer) => peer,
        Err(error) => {
            let mut refusal =
                AgentError::new(ErrorCode::Internal, format!("no connection: {error}"));
            refusal.errno = error.raw_os_error();
            return Ok(Err(refusal));
        }
    };
    connection.event(stream, &Event::Connected)?;
    let mut reader = peer.try_clone()?;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut buffer = vec![0; frame::DATA_CHUNK];
            while let Ok(count @ 1..) = reader.read(&mut buffer) {
                let bytes = buffer.get(..count).unwrap_or_default();
                if connection
                    .send(stream, Kind::Data, channel::OUT, bytes)
                    .is_err()
                {
                    return;
                }
            }
            let _ = connection.send(stream, Kind::End, channel::OUT, &[]);
        });
        while let Some(bytes) = input.next() {
            if peer.write_all(&bytes).is_err() {
                break;
            }
        }
        let how = match input.is_cancelled() {
            true => Shutdown::Both,
            false => Shutdown::Write,
        };
        let _ = peer.shutdown(how);
    });
    Ok(ok(()))
}
