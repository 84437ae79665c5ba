//! One VMM process.

use std::os::fd::{BorrowedFd, OwnedFd};

use forkd_vmm_proto::{Capabilities, Command, Event, FromVmm, Reply, Request, VmmError};
use thiserror::Error;
use tokio::sync::mpsc;

use crate::link::{Incoming, Link, LinkError, Unasked};

/// Why a VMM did not do what it was asked.
#[derive(Debug, Error)]
pub enum VmmCallError {
    /// It could not be asked.
    #[error("the VMM does not answer")]
    Link(#[from] LinkError),
    /// It said no.
    #[error("the VMM refused")]
    Refused(#[source] VmmError),
    /// It said something that is no answer to this.
    #[error("the VMM gave an answer that does not fit: {reply:?}")]
    Unexpected { reply: Box<Reply> },
}

/// Something a VMM said unasked, and the descriptor that came with it.
#[derive(Debug)]
pub struct VmmEvent {
    pub event: Event,
    /// The stream of [`Event::VsockConnect`].
    pub fd: Option<OwnedFd>,
}

/// The controller's end of a VMM's control socket.
#[derive(Debug)]
pub struct Vmm {
    link: Link<FromVmm>,
    capabilities: Capabilities,
}

impl Incoming for FromVmm {
    fn answers(&self) -> Option<u64> {
        match self {
            Self::Response(response) => Some(response.seq),
            Self::Event(_) => None,
        }
    }

    fn max_fds(&self) -> usize {
        match self {
            Self::Event(Event::VsockConnect { .. }) => 1,
            _ => 0,
        }
    }

    const MAX_WAITING: usize = 256;

    fn is_guest_made(&self) -> bool {
        matches!(
            self,
            Self::Event(
                Event::AgentReady | Event::VsockConnect { .. } | Event::DeviceFailed { .. }
            )
        )
    }
}

impl Vmm {
    /// Takes over a control socket. Events go to the returned stream, which ends with the VMM.
    ///
    /// `epoch` keeps the numbers of successive owners of one socket apart: a controller that adopts a VMM
    /// gives another value than the one before it did. `capabilities` are those that `forkd-spawn` reports of
    /// the VM.
    pub fn new(
        control: OwnedFd,
        epoch: u32,
        capabilities: Capabilities,
    ) -> std::io::Result<(Self, VmmEvents)> {
        let (link, receiver) = Link::new(control, (u64::from(epoch) << 32) + 16)?;
        Ok((Self { link, capabilities }, VmmEvents { receiver }))
    }

    /// The abilities of the VM's engine.
    pub fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// Asks for something, with the descriptors the command names.
    pub async fn call(
        &self,
        command: Command,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Reply, VmmCallError> {
        let (answer, _) = self.link.ask(|seq| Request { seq, command }, fds).await?;
        match answer {
            FromVmm::Response(response) => response.result.map_err(VmmCallError::Refused),
            FromVmm::Event(_) => Err(LinkError::Closed.into()),
        }
    }

    /// Asks for something whose answer is plain "done".
    pub async fn run(&self, command: Command, fds: &[BorrowedFd<'_>]) -> Result<(), VmmCallError> {
        match self.call(command, fds).await? {
            Reply::Done => Ok(()),
            reply => Err(VmmCallError::Unexpected {
                reply: Box::new(reply),
            }),
        }
    }
}

/// An event that a VMM sends without a request.
#[derive(Debug)]
pub struct VmmEvents {
    receiver: mpsc::UnboundedReceiver<Unasked<FromVmm>>,
}

impl VmmEvents {
    /// The next event; `None` once the VMM is gone.
    pub async fn next(&mut self) -> Option<VmmEvent> {
        loop {
            let unasked = self.receiver.recv().await?;
            if let FromVmm::Event(event) = unasked.message {
                return Some(VmmEvent {
                    event,
                    fd: unasked.fds.into_iter().next(),
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use forkd_channel::Channel;
    use forkd_vmm_proto::{StopCause, encode};
    use std::os::fd::AsFd;

    use super::*;

    fn pair() -> (Channel, Vmm, VmmEvents) {
        let (ours, theirs) = Channel::pair().unwrap();
        let (vmm, events) = Vmm::new(ours.into(), 1, Capabilities::all()).unwrap();
        (theirs, vmm, events)
    }

    fn event(event: Event) -> Vec<u8> {
        encode(&FromVmm::Event(event)).unwrap()
    }

    #[tokio::test]
    async fn a_vmm_that_sends_descriptors_unasked_is_cut_off() {
        let (theirs, _vmm, mut events) = pair();
        let file = tempfile::tempfile().unwrap();
        let stream = event(Event::VsockConnect { port: 7 });
        theirs.send(&stream, &[file.as_fd()]).unwrap();
        assert!(events.next().await.is_some_and(|event| event.fd.is_some()));
        let stopped = event(Event::Stopped {
            cause: StopCause::Asked,
        });
        theirs.send(&stopped, &[file.as_fd()]).unwrap();
        assert!(events.next().await.is_none());
    }

    #[tokio::test]
    async fn a_vmm_that_floods_the_daemon_is_cut_off() {
        let (theirs, vmm, mut events) = pair();
        let taken = event(Event::CutTaken {
            seq: 1,
            pause_us: 0,
        });
        // The last ones stay in the socket: the daemon does not read on.
        let flood = tokio::task::spawn_blocking(move || {
            for _ in 0..FromVmm::MAX_WAITING + 20 {
                theirs.send(&taken, &[]).unwrap();
            }
            theirs
        });
        let _theirs = flood.await.unwrap();
        assert!(vmm.call(Command::Status, &[]).await.is_err());
        let mut seen = 0;
        while events.next().await.is_some() {
            seen += 1;
        }
        assert_eq!(seen, FromVmm::MAX_WAITING);
    }
}
