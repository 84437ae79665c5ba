//! The way of frames to one guest.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{SendFlags, send};

/// The most frames that wait for a guest that does not read.
const MAX_WAITING: usize = 64;

/// The frame socket, and frames that it did not take yet.
#[derive(Debug)]
pub struct FrameOut {
    socket: OwnedFd,
    waiting: VecDeque<Vec<u8>>,
    /// The buffer of the last frame, for the next one of a TCP flow.
    spare: Vec<u8>,
    pub sent: u64,
    pub dropped: u64,
}

impl FrameOut {
    pub fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            waiting: VecDeque::new(),
            spare: Vec::new(),
            sent: 0,
            dropped: 0,
        }
    }

    /// The socket takes frames. TCP flows send only then, so that none of their frames is dropped.
    pub fn is_open(&self) -> bool {
        self.waiting.is_empty()
    }

    /// A buffer of this length. It may hold bytes of an earlier frame to the same guest, so the caller fills all of it.
    pub fn buffer(&mut self, len: usize) -> Vec<u8> {
        let mut buffer = std::mem::take(&mut self.spare);
        buffer.resize(len, 0);
        buffer
    }

    /// Gives memory back that only a flow needs.
    pub fn shrink(&mut self) {
        self.spare = Vec::new();
    }

    pub fn send(&mut self, frame: Vec<u8>) {
        if self.waiting.is_empty() && self.try_send(&frame) {
            self.spare = frame;
            return;
        }
        if self.waiting.len() < MAX_WAITING {
            self.waiting.push_back(frame);
        } else {
            self.dropped += 1;
        }
    }

    /// Sends frames that waited; true if none is left.
    pub fn flush(&mut self) -> bool {
        while let Some(frame) = self.waiting.pop_front() {
            if !self.try_send(&frame) {
                self.waiting.push_front(frame);
                return false;
            }
        }
        true
    }

    /// True if the frame needs no more care: it was sent, or can never be.
    fn try_send(&mut self, frame: &[u8]) -> bool {
        match send(
            &self.socket,
            frame,
            SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
        ) {
            Ok(_) => self.sent += 1,
            Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS) => return false,
            Err(_) => self.dropped += 1,
        }
        true
    }
}

impl AsFd for FrameOut {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
