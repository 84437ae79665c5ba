//! Guest connections: bytes between the socket that the daemon connects to and the socket that Firecracker listens on.
//!
//! Both sides speak the same `CONNECT <port>` line, so the bytes pass unchanged. One thread serves all connections of a
//! VM with buffers of a fixed size: a side that does not read stops the other side, and nothing grows.

use std::io::{self, PipeWriter, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::fd::BorrowedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

/// The most connections at one time. One more is closed at once.
const MAX_PAIRS: usize = 256;
/// Bytes kept in each direction.
const BUFFER: usize = 64 * 1024;

/// News from the relay to the session, one byte on the pipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum RelayNotice {
    /// The agent has connected to the ready port.
    AgentReady = 1,
}

/// The sockets of one VM.
#[derive(Debug)]
pub struct Relay {
    /// The daemon connects here.
    pub listener: UnixListener,
    /// Firecracker connects here when the guest connects to the ready port.
    pub ready: UnixListener,
    /// Firecracker listens here.
    pub guest: PathBuf,
    /// Where news goes. It must not block.
    pub notices: PipeWriter,
}

/// Bytes on their way in one direction.
#[derive(Debug)]
struct Flow {
    buffer: Box<[u8]>,
    /// The part of the buffer that waits to be written.
    waiting: std::ops::Range<usize>,
    /// The sender sends no more.
    ended: bool,
    /// The receiver was told so.
    told: bool,
}

impl Flow {
    fn new() -> Self {
        Self {
            buffer: vec![0; BUFFER].into_boxed_slice(),
            waiting: 0..0,
            ended: false,
            told: false,
        }
    }

    fn wants_input(&self) -> bool {
        !self.ended && self.waiting.is_empty()
    }

    /// Reads if there is room, and writes what the receiver takes.
    fn step(&mut self, mut from: &UnixStream, mut to: &UnixStream) -> io::Result<()> {
        if self.wants_input() {
            match from.read(&mut self.buffer) {
                Ok(0) => self.ended = true,
                Ok(count) => self.waiting = 0..count,
                Err(error) if is_later(&error) => {}
                Err(error) => return Err(error),
            }
        }
        while !self.waiting.is_empty() {
            let piece = self.buffer.get(self.waiting.clone()).unwrap_or_default();
            match to.write(piece) {
                Ok(count) => self.waiting.start += count,
                Err(error) if is_later(&error) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        if self.ended && !self.told {
            self.told = true;
            // The receiver may have closed already.
            let _ = to.shutdown(Shutdown::Write);
        }
        Ok(())
    }

    fn done(&self) -> bool {
        self.told
    }
}

/// One connection: the daemon's stream and Firecracker's.
#[derive(Debug)]
struct Pair {
    outer: UnixStream,
    inner: UnixStream,
    inward: Flow,
    outward: Flow,
}

impl Pair {
    fn interest(&self) -> [(BorrowedFd<'_>, PollFlags); 2] {
        let flags = |incoming: &Flow, outgoing: &Flow| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, incoming.wants_input());
            flags.set(PollFlags::OUT, !outgoing.waiting.is_empty());
            flags
        };
        [
            (self.outer.as_fd(), flags(&self.inward, &self.outward)),
            (self.inner.as_fd(), flags(&self.outward, &self.inward)),
        ]
    }

    /// Moves bytes both ways. False when the connection is over.
    fn step(&mut self) -> bool {
        let inward = self.inward.step(&self.outer, &self.inner);
        let outward = self.outward.step(&self.inner, &self.outer);
        inward.is_ok() && outward.is_ok() && !(self.inward.done() && self.outward.done())
    }
}

impl Relay {
    /// Starts the thread of the relay. It runs as long as the process.
    pub fn start(self) -> io::Result<()> {
        self.listener.set_nonblocking(true)?;
        self.ready.set_nonblocking(true)?;
        std::thread::Builder::new()
            .name("relay".to_owned())
            .spawn(move || self.run())?;
        Ok(())
    }

    fn run(mut self) {
        let mut pairs: Vec<Pair> = Vec::new();
        loop {
            let Ok(ready) = self.wait(&pairs) else {
                return;
            };
            let mut ready = ready.into_iter();
            let mut next = || ready.next().unwrap_or(PollFlags::empty());
            let (connecting, agent) = (next(), next());
            // A side that is gone for good and has nothing left to read ends its connection.
            let over = PollFlags::HUP | PollFlags::ERR;
            pairs.retain_mut(|pair| {
                let seen = [next(), next()];
                let lost = seen
                    .iter()
                    .any(|flags| flags.intersects(over) && !flags.contains(PollFlags::IN));
                let active = seen.iter().any(|flags| !flags.is_empty());
                !active || (pair.step() && !lost)
            });
            if !agent.is_empty() {
                self.hear_agent();
            }
            if !connecting.is_empty() {
                self.connect(&mut pairs);
            }
        }
    }

    /// Waits for the sockets; answers their events in the order listener, ready port, outer and inner of each pair.
    fn wait(&self, pairs: &[Pair]) -> io::Result<Vec<PollFlags>> {
        let mut fds = vec![
            PollFd::new(&self.listener, PollFlags::IN),
            PollFd::new(&self.ready, PollFlags::IN),
        ];
        for (fd, flags) in pairs.iter().flat_map(Pair::interest) {
            fds.push(PollFd::from_borrowed_fd(fd, flags));
        }
        loop {
            match poll(&mut fds, None) {
                Ok(_) => return Ok(fds.iter().map(PollFd::revents).collect()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn hear_agent(&mut self) {
        while self.ready.accept().is_ok() {
            // A pipe that is full has the news already.
            let _ = self.notices.write(&[RelayNotice::AgentReady as u8]);
        }
    }

    fn connect(&self, pairs: &mut Vec<Pair>) {
        while let Ok((outer, _)) = self.listener.accept() {
            if pairs.len() >= MAX_PAIRS {
                continue;
            }
            let Ok(inner) = UnixStream::connect(&self.guest) else {
                continue;
            };
            if outer.set_nonblocking(true).is_err() || inner.set_nonblocking(true).is_err() {
                continue;
            }
            let mut pair = Pair {
                outer,
                inner,
                inward: Flow::new(),
                outward: Flow::new(),
            };
            if pair.step() {
                pairs.push(pair);
            }
        }
    }
}

fn is_later(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Sockets {
        dir: tempfile::TempDir,
        guest: UnixListener,
        notices: io::PipeReader,
    }

    impl Sockets {
        fn start() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let bind = |name: &str| UnixListener::bind(dir.path().join(name)).unwrap();
            let (notices, writer) = io::pipe().unwrap();
            let relay = Relay {
                listener: bind("outer"),
                ready: bind("v.sock_1"),
                guest: dir.path().join("v.sock"),
                notices: writer,
            };
            let guest = bind("v.sock");
            relay.start().unwrap();
            Self {
                dir,
                guest,
                notices,
            }
        }

        fn dial(&self, name: &str) -> UnixStream {
            UnixStream::connect(self.dir.path().join(name)).unwrap()
        }
    }

    #[test]
    fn bytes_and_the_end_of_each_direction_pass_both_ways() {
        let sockets = Sockets::start();
        let mut outer = sockets.dial("outer");
        let (mut inner, _) = sockets.guest.accept().unwrap();
        let large: Vec<u8> = (0..1_000_000_u32).map(|n| n as u8).collect();
        let sent = large.clone();
        let sending = std::thread::spawn(move || {
            outer.write_all(&sent).unwrap();
            outer.shutdown(Shutdown::Write).unwrap();
            let mut answer = String::new();
            outer.read_to_string(&mut answer).unwrap();
            answer
        });
        let mut got = Vec::new();
        inner.read_to_end(&mut got).unwrap();
        assert!(got == large);
        inner.write_all(b"answer").unwrap();
        drop(inner);
        assert_eq!(sending.join().unwrap(), "answer");
    }

    #[test]
    fn a_side_that_closes_closes_the_other() {
        let sockets = Sockets::start();
        let mut outer = sockets.dial("outer");
        let (inner, _) = sockets.guest.accept().unwrap();
        drop(inner);
        assert_eq!(outer.read(&mut [0; 1]).unwrap(), 0);
        let outer = sockets.dial("outer");
        let (mut inner, _) = sockets.guest.accept().unwrap();
        drop(outer);
        assert_eq!(inner.read(&mut [0; 1]).unwrap(), 0);
    }

    #[test]
    fn the_ready_port_is_news_and_a_guest_that_is_not_there_closes_the_connection() {
        let mut sockets = Sockets::start();
        sockets.dial("v.sock_1");
        let mut news = [0; 1];
        sockets.notices.read_exact(&mut news).unwrap();
        assert_eq!(news[0], RelayNotice::AgentReady as u8);
        std::fs::remove_file(sockets.dir.path().join("v.sock")).unwrap();
        assert_eq!(sockets.dial("outer").read(&mut [0; 1]).unwrap(), 0);
    }
}
