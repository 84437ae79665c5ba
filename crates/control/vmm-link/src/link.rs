//! Requests and answers, matched by number.

use std::collections::HashMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forkd_vmm_proto::{WireError, decode, encode};
use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::task::AbortHandle;

use crate::socket::Socket;

/// Why the other side could not be asked.
#[derive(Debug, Error)]
pub enum LinkError {
    /// The other side has ended or closed the connection.
    #[error("the other side has closed the connection")]
    Closed,
    /// A message does not fit the wire.
    #[error("a message does not encode or decode")]
    Wire(#[from] WireError),
    /// The socket failed.
    #[error("the control socket failed")]
    Io(#[from] io::Error),
}

/// A message of a protocol from the other side, as the link sees it.
pub trait Incoming: DeserializeOwned + Send + 'static {
    /// The number of the request this answers; `None` for what comes unasked.
    fn answers(&self) -> Option<u64>;

    /// Whether a guest can make as many of these as it likes.
    fn is_guest_made(&self) -> bool {
        false
    }

    /// The most descriptors that may come with the message. A message with more ends the connection.
    fn max_fds(&self) -> usize;

    /// The most unasked messages that wait to be taken, those of guests aside. One more ends the connection: they cannot
    /// be dropped, and the other side may be compromised.
    const MAX_WAITING: usize;
}

/// Events made by a guest that may wait for the daemon. Further ones are dropped, with their descriptors.
const MAX_GUEST_MADE: usize = 64;

/// A message that came unasked.
#[derive(Debug)]
pub struct Unasked<M> {
    pub message: M,
    /// The descriptors of the message.
    pub fds: Vec<OwnedFd>,
    /// Given back when it is taken out of the queue.
    _place: OwnedSemaphorePermit,
}

/// A message and its descriptors.
pub type Delivered<M> = (M, Vec<OwnedFd>);

type Waiting<M> = Arc<Mutex<Option<HashMap<u64, oneshot::Sender<Delivered<M>>>>>>;

/// A connection on which many tasks may ask at once.
#[derive(Debug)]
pub struct Link<M> {
    socket: Arc<Socket>,
    waiting: Waiting<M>,
    next: AtomicU64,
    reader: AbortHandle,
}

impl<M: Incoming> Link<M> {
    /// Takes over a connected socket. What comes unasked goes to the returned channel, which closes when
    /// the connection does. Numbers start at `first`, so that answers meant for an earlier owner of the
    /// socket are not taken for ours.
    pub fn new(fd: OwnedFd, first: u64) -> io::Result<(Self, mpsc::UnboundedReceiver<Unasked<M>>)> {
        let socket = Arc::new(Socket::new(fd)?);
        let waiting: Waiting<M> = Arc::new(Mutex::new(Some(HashMap::new())));
        let (unasked, receiver) = mpsc::unbounded_channel();
        let reader =
            tokio::spawn(read(Arc::clone(&socket), Arc::clone(&waiting), unasked)).abort_handle();
        Ok((
            Self {
                socket,
                waiting,
                next: AtomicU64::new(first),
                reader,
            },
            receiver,
        ))
    }

    /// Sends what `make` builds for a fresh number and waits for the answer.
    pub async fn ask<R: Serialize>(
        &self,
        make: impl FnOnce(u64) -> R,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Delivered<M>, LinkError> {
        let seq = self.next.fetch_add(1, Ordering::Relaxed);
        let packet = encode(&make(seq))?;
        let (sender, answer) = oneshot::channel();
        self.waiting
            .lock()
            .as_mut()
            .ok_or(LinkError::Closed)?
            .insert(seq, sender);
        let forget = Forget {
            waiting: &self.waiting,
            seq,
        };
        match self.socket.send(&packet, fds).await {
            Ok(()) => {}
            Err(error) if gone(&error) => return Err(LinkError::Closed),
            Err(error) => return Err(error.into()),
        }
        let delivered = answer.await.map_err(|_| LinkError::Closed);
        drop(forget);
        delivered
    }
}

impl<M> Drop for Link<M> {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// Takes a request off the list when its caller stops waiting.
struct Forget<'a, M> {
    waiting: &'a Waiting<M>,
    seq: u64,
}

impl<M> Drop for Forget<'_, M> {
    fn drop(&mut self) {
        if let Some(map) = self.waiting.lock().as_mut() {
            map.remove(&self.seq);
        }
    }
}

async fn read<M: Incoming>(
    socket: Arc<Socket>,
    waiting: Waiting<M>,
    unasked: mpsc::UnboundedSender<Unasked<M>>,
) {
    let guest_made = Arc::new(Semaphore::new(MAX_GUEST_MADE));
    let others = Arc::new(Semaphore::new(M::MAX_WAITING));
    while let Ok(Some(packet)) = socket.recv().await {
        let Ok(message) = decode::<M>(&packet.bytes) else {
            break;
        };
        if packet.fds.len() > message.max_fds() {
            break;
        }
        match message.answers() {
            Some(seq) => {
                let sender = waiting.lock().as_mut().and_then(|map| map.remove(&seq));
                if let Some(sender) = sender {
                    // The caller may have stopped waiting a moment ago.
                    let _ = sender.send((message, packet.fds));
                }
            }
            None => {
                let places = match message.is_guest_made() {
                    true => &guest_made,
                    false => &others,
                };
                let _place = match Arc::clone(places).try_acquire_owned() {
                    Ok(place) => place,
                    Err(_) if message.is_guest_made() => continue,
                    Err(_) => break,
                };
                let fds = packet.fds;
                let _ = unasked.send(Unasked {
                    message,
                    fds,
                    _place,
                });
            }
        }
    }
    // Dropping the senders tells every waiting caller that no answer will come.
    waiting.lock().take();
}

fn gone(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
    )
}
