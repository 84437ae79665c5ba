//! From a fresh VMM process to a shell: hello, prepare, and the two answers.

use forkd_sys::{Channel, ChannelError};
use forkd_types::Engine;
use forkd_vmm_proto::{
    Capabilities, Command, FromVmm, PROTOCOL_VERSION, Reply, Request, ResponseTo, Shape, WireError,
    encode,
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
    /// The socket did not take them.
    #[error("the new VMM's control socket takes no message")]
    Send(#[from] ChannelError),
}

/// Sends both messages at once; the VMM answers them in turn.
pub fn begin(control: &Channel, shape: Shape) -> Result<(), BeginError> {
    let hello = Request {
        seq: HELLO,
        command: Command::Hello {
            version: PROTOCOL_VERSION,
        },
    };
    let prepare = Request {
        seq: PREPARE,
        command: Command::Prepare(shape),
    };
    for request in [hello, prepare] {
        control.send(&encode(&request)?, &[])?;
    }
    Ok(())
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

    /// Takes a message from the VMM; gives the engine's abilities once the shell is ready.
    pub fn advance(&mut self, message: FromVmm) -> Result<Option<Capabilities>, String> {
        let FromVmm::Response(ResponseTo { seq, result }) = message else {
            return Ok(None);
        };
        match (seq, result) {
            (HELLO, Ok(hello @ Reply::Hello { .. })) => {
                self.capabilities = Some(self.greeted(&hello)?);
                Ok(None)
            }
            (PREPARE, Ok(Reply::Done)) if self.capabilities.is_some() => Ok(self.capabilities),
            (_, Err(error)) => Err(error.message),
            (seq, Ok(reply)) => Err(format!("the VMM answered {reply:?} to message {seq}")),
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
        assert_eq!(greeted, Ok(None));
        assert_eq!(
            progress.advance(answer(PREPARE, Ok(Reply::Done))),
            Ok(Some(Capabilities::all()))
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
