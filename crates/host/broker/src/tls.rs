//! One end of a flow: a socket that does not block, and the TLS connection on it.
//!
//! Readiness is edge-triggered: a flag is cleared when the kernel says "not now".

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;

use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};
use rustls::Connection;

/// Plaintext that is read in one step.
pub const STEP: usize = 16 * 1024;

/// A socket with TLS.
pub struct Tls {
    pub fd: OwnedFd,
    pub connection: Connection,
    pub readable: bool,
    pub writable: bool,
    /// The peer ended its direction, with or without an alert.
    pub ended: bool,
    /// We ended ours.
    finished: bool,
}

/// Why an end is of no more use.
#[derive(Debug)]
pub enum Fault {
    Tls(rustls::Error),
    Socket,
}

struct Socket<'a>(&'a OwnedFd);

impl Read for Socket<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(recv(self.0, buffer, RecvFlags::DONTWAIT).map(|(_, len)| len)?)
    }
}

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(send(
            self.0,
            bytes,
            SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
        )?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Tls {
    pub fn new(fd: OwnedFd, connection: Connection) -> Self {
        Self {
            fd,
            connection,
            readable: true,
            writable: true,
            ended: false,
            finished: false,
        }
    }

    /// Takes records off the socket. True if anything came.
    pub fn fill(&mut self) -> Result<bool, Fault> {
        let mut moved = false;
        while self.readable && self.connection.wants_read() {
            match self.connection.read_tls(&mut Socket(&self.fd)) {
                Ok(0) => {
                    self.ended = true;
                    self.readable = false;
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.readable = false;
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return Err(Fault::Socket),
            }
            moved = true;
            let state = self.connection.process_new_packets().map_err(Fault::Tls)?;
            self.ended |= state.peer_has_closed();
        }
        Ok(moved)
    }

    /// Gives records to the socket. True if any went.
    pub fn flush(&mut self) -> Result<bool, Fault> {
        let mut moved = false;
        while self.writable && self.connection.wants_write() {
            match self.connection.write_tls(&mut Socket(&self.fd)) {
                Ok(_) => moved = true,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.writable = false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Err(Fault::Socket),
            }
        }
        Ok(moved)
    }

    /// Appends plaintext of the peer. False if there is none now.
    pub fn read(&mut self, to: &mut Vec<u8>) -> bool {
        let mut buffer = [0; STEP];
        match self.connection.reader().read(&mut buffer) {
            Ok(0) => {
                self.ended = true;
                false
            }
            Ok(count) => {
                to.extend_from_slice(buffer.get(..count).unwrap_or_default());
                true
            }
            Err(error) => {
                self.ended |= error.kind() == io::ErrorKind::UnexpectedEof;
                false
            }
        }
    }

    /// Takes plaintext for the peer off `from`, as much as there is room for.
    pub fn write(&mut self, from: &mut Vec<u8>) -> bool {
        let taken = self.connection.writer().write(from).unwrap_or(0);
        from.drain(..taken);
        taken > 0
    }

    /// Ends our direction after everything that was written. False if that was done before.
    pub fn finish(&mut self) -> bool {
        if self.finished {
            return false;
        }
        self.finished = true;
        self.connection.send_close_notify();
        true
    }

    /// Ends the stream below once the last record is out.
    pub fn close_stream(&mut self) {
        if self.finished && !self.connection.wants_write() {
            let _ = shutdown(&self.fd, Shutdown::Write);
        }
    }
}
