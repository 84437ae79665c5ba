//! From a fresh VMM process to a shell: hello, prepare, and the two answers.

use forkd_sys::{Channel, ChannelError};
use forkd_vmm_proto::{
    Command, FromVmm, PROTOCOL_VERSION, Reply, Request, ResponseTo, Shape, WireError, encode,
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

/// Which answers have come.
#[derive(Debug, Default, Clone, Copy)]
pub struct Progress {
    greeted: bool,
}

impl Progress {
    /// Takes a message from the VMM; true once the shell is ready.
    pub fn advance(&mut self, message: FromVmm) -> Result<bool, String> {
        let FromVmm::Response(ResponseTo { seq, result }) = message else {
            return Ok(false);
        };
        match (seq, result) {
            (HELLO, Ok(Reply::Hello { version, .. })) if version == PROTOCOL_VERSION => {
                self.greeted = true;
                Ok(false)
            }
            (HELLO, Ok(Reply::Hello { version, program })) => Err(format!(
                "{program} speaks version {version}, this forkd-spawn speaks {PROTOCOL_VERSION}"
            )),
            (PREPARE, Ok(Reply::Done)) if self.greeted => Ok(true),
            (_, Err(error)) => Err(error.message),
            (seq, Ok(reply)) => Err(format!("the VMM answered {reply:?} to message {seq}")),
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

    fn hello(version: u32) -> FromVmm {
        answer(
            HELLO,
            Ok(Reply::Hello {
                version,
                program: "forkd-vmm 9".to_owned(),
            }),
        )
    }

    #[test]
    fn two_answers_make_a_shell() {
        let mut progress = Progress::default();
        assert_eq!(progress.advance(hello(PROTOCOL_VERSION)), Ok(false));
        assert_eq!(progress.advance(answer(PREPARE, Ok(Reply::Done))), Ok(true));
    }

    #[test]
    fn anything_else_fails_with_a_reason() {
        assert!(
            Progress::default()
                .advance(hello(99))
                .unwrap_err()
                .contains("version 99")
        );
        assert!(
            Progress::default()
                .advance(answer(PREPARE, Ok(Reply::Done)))
                .is_err()
        );
        let refused = VmmError {
            code: VmmErrorCode::Kvm,
            message: "no /dev/kvm".to_owned(),
        };
        let mut progress = Progress::default();
        assert_eq!(
            progress.advance(answer(PREPARE, Err(refused))).unwrap_err(),
            "no /dev/kvm"
        );
    }
}
