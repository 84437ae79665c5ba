//! One connection: a stream on the host, two ports, and the credit of both sides.
//!
//! Neither side can make the device buffer without bound: the guest may send as much as the device has
//! announced, and the device reads from the client only what the guest has room for.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags};
use rustix::time::Timespec;

use super::greeting::Greeter;
use super::packet::{Header, SHUT_BOTH, SHUT_RECEIVE, SHUT_SEND};
use crate::{Ready, Registrar};

/// Bytes that the guest may send before the client has taken them.
pub(super) const BUF_ALLOC: u32 = 128 * 1024;

/// The two ports of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Ports {
    pub(super) host: u32,
    pub(super) guest: u32,
}

/// How far a connection is.
#[derive(Debug)]
pub(super) enum Phase {
    /// The client has not said where it wants to go.
    Greeting(Greeter),
    /// The guest has been asked.
    Requested,
    Open,
    /// The guest is done with it; what it sent is still on its way to the client.
    Draining,
}

/// Result of reading from a stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// This many bytes.
    Data(usize),
    /// Nothing for now.
    Nothing,
    /// The other side will not send any more.
    End,
}

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) ports: Ports,
    pub(super) phase: Phase,
    /// None on the ready port, where what is sent goes nowhere.
    stream: Option<UnixStream>,
    /// Events that the loop listens to.
    registered: Option<Ready>,
    /// From the guest, not yet taken by the client.
    pending: VecDeque<u8>,
    /// Bytes the client has taken.
    forwarded: u32,
    /// The last value of `forwarded` that was sent to the guest.
    told: u32,
    /// Bytes sent to the guest.
    sent: u32,
    guest_alloc: u32,
    guest_forwarded: u32,
    /// The directions the guest has shut.
    guest_shut: u32,
    /// The directions that were reported to the guest as shut.
    pub(super) host_shut: u32,
    /// In the list of connections that may have something for the guest.
    pub(super) queued: bool,
    /// A credit request is on its way.
    pub(super) asked_credit: bool,
    /// A credit update is on its way.
    pub(super) owed_credit: bool,
    /// The client has closed its end; what it sent before may still be there.
    pub(super) hung_up: bool,
    /// The client does not take any more.
    pub(super) broken: bool,
}

impl Connection {
    pub(super) fn new(ports: Ports, phase: Phase, stream: Option<UnixStream>) -> Self {
        Self {
            ports,
            phase,
            stream,
            registered: None,
            pending: VecDeque::new(),
            forwarded: 0,
            told: 0,
            sent: 0,
            guest_alloc: 0,
            guest_forwarded: 0,
            guest_shut: 0,
            host_shut: 0,
            queued: false,
            asked_credit: false,
            owed_credit: false,
            hung_up: false,
            broken: false,
        }
    }

    pub(super) fn stream(&self) -> Option<&UnixStream> {
        self.stream.as_ref()
    }

    /// The phase and the stream, to read a greeting.
    pub(super) fn greeter(&mut self) -> (&mut Phase, Option<&UnixStream>) {
        (&mut self.phase, self.stream.as_ref())
    }

    /// Notes the buffer sizes in a header of the guest.
    pub(super) fn learn_credit(&mut self, header: &Header) {
        self.guest_alloc = header.buf_alloc;
        self.guest_forwarded = header.fwd_cnt;
        if self.credit() > 0 {
            self.asked_credit = false;
        }
    }

    /// Bytes that may be sent to the guest now.
    pub(super) fn credit(&self) -> usize {
        let in_flight = self.sent.wrapping_sub(self.guest_forwarded);
        self.guest_alloc.saturating_sub(in_flight) as usize
    }

    /// Whether data for the guest is wanted at all.
    pub(super) fn reads(&self) -> bool {
        matches!(self.phase, Phase::Open)
            && self.guest_shut & SHUT_RECEIVE == 0
            && self.host_shut & SHUT_SEND == 0
    }

    /// Fills the credit fields of a packet to the guest.
    pub(super) fn put_credit(&mut self, header: &mut Header) {
        header.buf_alloc = BUF_ALLOC;
        header.fwd_cnt = self.forwarded;
        self.told = self.forwarded;
        self.owed_credit = false;
    }

    /// Whether a credit update is due.
    pub(super) fn owes_credit(&mut self) -> bool {
        let owes = !self.owed_credit && self.forwarded.wrapping_sub(self.told) >= BUF_ALLOC / 2;
        self.owed_credit |= owes;
        owes
    }

    /// Whether the client has closed both directions.
    pub(super) fn check_hung_up(&mut self) -> bool {
        if let Some(stream) = &self.stream {
            let mut fds = [PollFd::new(stream, PollFlags::empty())];
            let now = Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            let polled = rustix::event::poll(&mut fds, Some(&now)).is_ok();
            self.hung_up |= polled && fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR);
        }
        self.hung_up
    }

    /// Reads from the client.
    pub(super) fn take(&mut self, data: &mut [u8]) -> Taken {
        let Some(mut stream) = self.stream.as_ref() else {
            return Taken::Nothing;
        };
        match stream.read(data) {
            Ok(0) => Taken::End,
            Ok(count) => {
                // A packet is at most 64 KiB.
                self.sent = self.sent.wrapping_add(count as u32);
                Taken::Data(count)
            }
            Err(error) if would_block(&error) => Taken::Nothing,
            Err(_) => Taken::End,
        }
    }

    /// Takes data from the guest; false if the guest sends more than it may.
    pub(super) fn give(&mut self, data: &[u8]) -> bool {
        if self.guest_shut & SHUT_SEND != 0 {
            return false;
        }
        let mut rest = data;
        if self.pending.is_empty() {
            rest = &data[self.write_some(data)..];
        }
        if self.pending.len() + rest.len() > BUF_ALLOC as usize {
            return false;
        }
        self.pending.extend(rest);
        true
    }

    /// Writes what the client takes of `data`; what can never be written counts as taken.
    fn write_some(&mut self, data: &[u8]) -> usize {
        let mut done = 0;
        while done < data.len() {
            let Some(mut stream) = self.stream.as_ref() else {
                done = data.len();
                break;
            };
            match stream.write(&data[done..]) {
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if would_block(&error) => break,
                Err(_) => {
                    self.broken = true;
                    done = data.len();
                }
            }
        }
        self.forwarded = self.forwarded.wrapping_add(done as u32);
        done
    }

    /// Writes what the client takes of what is pending.
    pub(super) fn flush(&mut self) {
        while !self.pending.is_empty() {
            let pending = std::mem::take(&mut self.pending);
            let (first, second) = pending.as_slices();
            let mut done = self.write_some(first);
            if done == first.len() && !second.is_empty() {
                done += self.write_some(second);
            }
            self.pending = pending;
            if done == 0 {
                return;
            }
            self.pending.drain(..done);
        }
        self.pending = VecDeque::new();
        if self.guest_shut & SHUT_SEND != 0 {
            self.shut(Shutdown::Write);
        }
    }

    /// Whether everything the guest sent has reached the client.
    pub(super) fn drained(&self) -> bool {
        self.pending.is_empty()
    }

    /// The guest shuts directions; true if it has now shut both.
    pub(super) fn guest_shuts(&mut self, flags: u32) -> bool {
        self.guest_shut |= flags & SHUT_BOTH;
        if self.pending.is_empty() && self.guest_shut & SHUT_SEND != 0 {
            self.shut(Shutdown::Write);
        }
        self.guest_shut == SHUT_BOTH
    }

    /// Ends the stream for its client. Closing it would not: a process that writes a cut has it open, too.
    pub(super) fn hang_up(&self) {
        self.shut(Shutdown::Both);
    }

    fn shut(&self, how: Shutdown) {
        if let Some(stream) = &self.stream {
            // A stream whose other end is gone is shut already.
            let _ = stream.shutdown(how);
        }
    }

    /// Listens to what matters now: to the client's data if `readable`, to room for the guest's, and in
    /// any case, until it has happened, to the client going away.
    pub(super) fn listen(&mut self, events: &Registrar, token: u32, readable: bool) {
        let mut wanted = Ready::empty();
        if readable {
            wanted |= Ready::IN | Ready::RDHUP;
        }
        if !self.pending.is_empty() {
            wanted |= Ready::OUT;
        }
        let wanted = Some(wanted).filter(|wanted| !wanted.is_empty() || !self.hung_up);
        let Some(stream) = self.stream.as_ref().filter(|_| wanted != self.registered) else {
            return;
        };
        let result = match (self.registered, wanted) {
            (None, Some(wanted)) => events.add(stream, token, wanted),
            (Some(_), Some(wanted)) => events.modify(stream, token, wanted),
            (_, None) => {
                events.remove(stream);
                Ok(())
            }
        };
        self.registered = wanted.filter(|_| result.is_ok());
    }

    pub(super) fn unlisten(&mut self, events: &Registrar) {
        if let (Some(stream), Some(_)) = (&self.stream, self.registered.take()) {
            events.remove(stream);
        }
    }
}

fn would_block(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(stream: UnixStream) -> Connection {
        let ports = Ports { host: 1, guest: 2 };
        stream.set_nonblocking(true).unwrap();
        Connection::new(ports, Phase::Open, Some(stream))
    }

    #[test]
    fn credit_is_right_when_the_counters_wrap() {
        let (mut client, stream) = UnixStream::pair().unwrap();
        let mut connection = open(stream);
        connection.guest_alloc = 100;
        connection.sent = u32::MAX - 10;
        connection.guest_forwarded = u32::MAX - 10;
        assert_eq!(connection.credit(), 100);
        client.write_all(&[1; 60]).unwrap();
        assert_eq!(connection.take(&mut [0; 100]), Taken::Data(60));
        assert_eq!(connection.credit(), 40);

        connection.forwarded = u32::MAX - 10;
        connection.told = u32::MAX - 10;
        assert!(connection.give(&[0; BUF_ALLOC as usize / 2]));
        assert!(connection.owes_credit());
        assert!(!connection.owes_credit());
    }

    #[test]
    fn a_guest_that_lies_about_its_counters_gets_no_more_than_its_window() {
        let (_client, stream) = UnixStream::pair().unwrap();
        let mut connection = open(stream);
        connection.guest_alloc = 1000;
        connection.sent = 10;
        connection.guest_forwarded = 5000;
        assert_eq!(connection.credit(), 0);
        connection.guest_alloc = u32::MAX;
        assert!(connection.credit() < u32::MAX as usize);
    }

    #[test]
    fn a_client_that_is_gone_breaks_the_connection() {
        let (client, stream) = UnixStream::pair().unwrap();
        let mut connection = open(stream);
        drop(client);
        assert!(connection.give(b"lost"));
        assert!(connection.broken);
        assert!(connection.check_hung_up());
    }
}
