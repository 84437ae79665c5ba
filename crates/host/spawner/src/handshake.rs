//! From a fresh VMM process to a shell: hello, its answer, prepare, its answer.
//!
//! The second message waits for the first answer: only then is the process known to have the address space whose page
//! map it is given.

use std::os::fd::BorrowedFd;

use forkd_sys::{Channel, ChannelError};
use forkd_types::Engine;
use forkd_vmm_proto::{
    Capabilities, Command, FdIndex, FromVmm, JailSpec, PROTOCOL_VERSION, PrepareSpec, Reply,
    Request, ResponseTo, Shape, WireError, encode,
};
use thiserror::Error;

const HELLO: u64 = 1;
const PREPARE: u64 = 2;

/// Why the first messages were not sent.
#[derive(Debug, Error)]
pub enum BeginError {
    /// They do not encode.
    #[error("the first messages do not encode")]
    Encode(#[from] WireError),
    /// There is no KVM device, or this process may not use it.
    #[error("cannot open /dev/kvm")]
    Kvm(#[source] std::io::Error),
    /// The socket did not take them.
    #[error("the new VMM's control socket takes no message")]
    Send(#[from] ChannelError),
}

/// Sends the hello.
pub fn begin(control: &Channel) -> Result<(), BeginError> {
    let hello = Request {
        seq: HELLO,
        command: Command::Hello {
            version: PROTOCOL_VERSION,
        },
    };
    Ok(control.send(&encode(&hello)?, &[])?)
}

/// Sends what the shell is built from, with the descriptors that the VMM does not open itself.
pub fn prepare(
    control: &Channel,
    shape: Shape,
    kvm: BorrowedFd<'_>,
    pagemap: Option<BorrowedFd<'_>>,
    (mut jail, namespaces): (JailSpec, Vec<BorrowedFd<'_>>),
) -> Result<(), BeginError> {
    let mut fds = vec![kvm];
    fds.extend(pagemap);
    let first = fds.len() as u8;
    jail.namespaces = (first..).map(FdIndex).take(namespaces.len()).collect();
    fds.extend(namespaces);
    let spec = PrepareSpec {
        shape,
        kvm: FdIndex(0),
        pagemap: pagemap.map(|_| FdIndex(1)),
        jail: Some(jail),
    };
    let request = Request {
        seq: PREPARE,
        command: Command::Prepare(spec),
    };
    Ok(control.send(&encode(&request)?, &fds)?)
}

/// The next step after a message from a VMM that is being started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progressed {
    /// Nothing to do yet.
    Wait,
    /// The hello is answered: the VMM waits for [`prepare`].
    Greeted,
    /// The shell stands.
    Ready(Capabilities),
}

/// How far a new VMM is on its way to a shell.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    /// The engine that the VMM has to be.
    engine: Engine,
    /// Set by the answer to the hello.
    capabilities: Option<Capabilities>,
}

impl Progress {
    /// Nothing has been answered yet by a VMM that has to be of this engine.
    pub fn new(engine: Engine) -> Self {
        Self {
            engine,
            capabilities: None,
        }
    }

    /// Takes a message from the VMM.
    pub fn advance(&mut self, message: FromVmm) -> Result<Progressed, String> {
        let FromVmm::Response(ResponseTo { seq, result }) = message else {
            return Ok(Progressed::Wait);
        };
        match (seq, result, self.capabilities) {
            (HELLO, Ok(hello @ Reply::Hello { .. }), None) => {
                self.capabilities = Some(self.greeted(&hello)?);
                Ok(Progressed::Greeted)
            }
            (PREPARE, Ok(Reply::Done), Some(capabilities)) => Ok(Progressed::Ready(capabilities)),
            (_, Err(error), _) => Err(error.message),
            (seq, Ok(reply), _) => Err(format!("the VMM answered {reply:?} to message {seq}")),
        }
    }

    fn greeted(&self, hello: &Reply) -> Result<Capabilities, String> {
        match hello {
            Reply::Hello {
                version, program, ..
            } if *version != PROTOCOL_VERSION => Err(format!(
                "{program} speaks version {version}, this forkd-spawn speaks {PROTOCOL_VERSION}"
            )),
            Reply::Hello {
                engine, program, ..
            } if *engine != self.engine => Err(format!(
                "{program} is of the engine {engine}, {} is wanted",
                self.engine
            )),
            Reply::Hello { capabilities, .. } => Ok(*capabilities),
            reply => Err(format!("the VMM answered {reply:?} to a hello")),
        }
    }
}

#[cfg(test)]
mod tests {
    use forkd_vmm_proto::{VmmError, VmmErrorCode};

    use super::*;

    fn answer(seq: u64, result: Result<Reply, VmmError>) -> FromVmm {
        FromVmm::Response(ResponseTo { seq, result })
    }

    fn hello(version: u32, engine: Engine) -> FromVmm {
        answer(
            HELLO,
            Ok(Reply::Hello {
                version,
                program: "forkd-vmm 9".to_owned(),
                engine,
                capabilities: Capabilities::all(),
            }),
        )
    }

    fn fresh() -> Progress {
        Progress::new(Engine::FORKD)
    }

    #[test]
    fn two_answers_make_a_shell() {
        let mut progress = fresh();
        let greeted = progress.advance(hello(PROTOCOL_VERSION, Engine::FORKD));
        assert_eq!(greeted, Ok(Progressed::Greeted));
        assert_eq!(
            progress.advance(answer(PREPARE, Ok(Reply::Done))),
            Ok(Progressed::Ready(Capabilities::all()))
        );
    }

    #[test]
    fn anything_else_fails_with_a_reason() {
        assert!(
            fresh()
                .advance(hello(99, Engine::FORKD))
                .unwrap_err()
                .contains("version 99")
        );
        let other = fresh().advance(hello(PROTOCOL_VERSION, "other".parse().unwrap()));
        assert!(other.unwrap_err().contains("engine other"));
        assert!(fresh().advance(answer(PREPARE, Ok(Reply::Done))).is_err());
        let refused = VmmError {
            code: VmmErrorCode::Kvm,
            message: "no /dev/kvm".to_owned(),
        };
        let mut progress = fresh();
        assert_eq!(
            progress.advance(answer(PREPARE, Err(refused))).unwrap_err(),
            "no /dev/kvm"
        );
    }
}
