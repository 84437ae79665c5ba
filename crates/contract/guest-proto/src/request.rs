//! Requests of the host.

use serde::{Deserialize, Serialize};

use crate::{
    AgentError, AttachRequest, ClockRequest, DialRequest, ErrorCode, EvalRequest, ExecRequest,
    FreezeRequest, HoldVolumeRequest, IdentityRequest, InputRequest, InterpName, InterpStart,
    ListRequest, MkdirRequest, MountVolumeRequest, NetworkRequest, ProcessId, QuiesceRequest,
    ReadRequest, RemoveRequest, RenameRequest, ServiceStart, SetAttrRequest, SettleRequest,
    ShutdownRequest, SignalRequest, StatRequest, WatchRequest, WriteRequest,
};
use crate::{MountRequest, PackRequest, UnmountRequest, UnpackRequest};

/// A request of the host. Each comment names the type of a successful response.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", content = "args", rename_all = "snake_case")]
pub enum Request {
    /// Returns a [`crate::Pong`].
    Ping,
    /// Returns an [`crate::ExecResult`], or [`crate::Started`] in the background.
    Exec(Box<ExecRequest>),
    /// Returns a list of [`crate::ProcessInfo`].
    Processes,
    /// Returns an [`crate::ExecResult`].
    Attach(AttachRequest),
    /// Returns an empty response when the process has taken the input.
    Input(InputRequest),
    /// Returns an empty response.
    Signal(SignalRequest),
    /// Returns an [`crate::ExecResult`].
    Wait {
        /// For which process.
        process: ProcessId,
    },
    /// Forgets a process that has ended, or kills it and forgets it. Returns an empty response.
    Forget { process: ProcessId },
    /// Returns an empty response.
    Resize {
        /// Of which process.
        process: ProcessId,
        /// Lines of the terminal.
        rows: u16,
        /// Characters per line.
        cols: u16,
    },
    /// Returns a [`crate::ReadResult`].
    Read(ReadRequest),
    /// Returns a [`crate::WriteResult`].
    Write(WriteRequest),
    /// Returns a [`crate::FileInfo`].
    Stat(StatRequest),
    /// Returns a [`crate::ListResult`].
    List(ListRequest),
    /// Returns an empty response.
    Mkdir(MkdirRequest),
    /// Returns an empty response.
    Rename(RenameRequest),
    /// Returns an empty response.
    Remove(RemoveRequest),
    /// Returns an empty response.
    SetAttr(SetAttrRequest),
    /// Returns an [`crate::ArchiveResult`].
    Pack(PackRequest),
    /// Returns an [`crate::ArchiveResult`].
    Unpack(UnpackRequest),
    /// Returns a [`crate::MountResult`].
    Mount(MountRequest),
    /// Returns an empty response.
    Unmount(UnmountRequest),
    /// Kills every user process and waits until none is left. Returns an empty response.
    KillAll,
    /// Returns an empty response; ends only when the host cancels it.
    Watch(WatchRequest),
    /// Returns an empty response when both directions are closed.
    Dial(DialRequest),
    /// Returns an [`crate::InterpInfo`].
    InterpStart(Box<InterpStart>),
    /// Returns a list of [`crate::InterpInfo`].
    InterpList,
    /// Returns an empty response. The call under way ends as the language handles an interrupt.
    InterpInterrupt(InterpName),
    /// Returns an [`crate::InterpInfo`] after a new warm-up.
    InterpRestart(InterpName),
    /// Returns an empty response.
    InterpStop(InterpName),
    /// Returns an [`crate::EvalResult`].
    Eval(EvalRequest),
    /// Returns a [`crate::ServiceInfo`] when the service is ready.
    ServiceStart(Box<ServiceStart>),
    /// Returns a list of [`crate::ServiceInfo`].
    Services,
    /// Returns a [`crate::SettleReport`] when the guest is calm, or when the time is over.
    Settle(SettleRequest),
    /// Returns a [`crate::ClockState`].
    Clock(ClockRequest),
    /// Returns an [`crate::IdentityReport`].
    Identity(Box<IdentityRequest>),
    /// Returns [`crate::Metrics`] of the guest.
    Metrics,
    /// Returns a [`crate::QuiesceReport`].
    Quiesce(QuiesceRequest),
    /// Returns a [`crate::FreezeReport`].
    Freeze(FreezeRequest),
    /// Returns a [`crate::ThawReport`].
    Thaw,
    /// Returns an empty response when the disk is mounted.
    MountVolume(MountVolumeRequest),
    /// Returns an empty response when writes are held, or go on.
    HoldVolume(HoldVolumeRequest),
    /// Returns an empty response.
    Network(NetworkRequest),
    /// Breaks every TCP connection to elsewhere without a packet to the peer. Returns a [`crate::ResetReport`].
    ResetConnections,
    /// Returns an empty response.
    Shutdown(ShutdownRequest),
}

/// Reads the payload of a request frame. A request that this version does not know is told from one that
/// is malformed.
pub fn parse_request(payload: &[u8]) -> Result<Request, AgentError> {
    #[derive(Deserialize)]
    struct OpOnly {
        op: String,
    }
    serde_json::from_slice(payload).map_err(|error| {
        match serde_json::from_slice::<OpOnly>(payload) {
            Ok(OpOnly { op }) if !is_known(&op) => AgentError::new(
                ErrorCode::Unsupported,
                format!("this agent does not know the request {op:?}"),
            ),
            _ => AgentError::new(
                ErrorCode::BadRequest,
                format!("cannot read the request: {error}"),
            ),
        }
    })
}

fn is_known(op: &str) -> bool {
    // An unknown tag is what serde complains about first, so a known one without its arguments is enough
    // to tell the two apart.
    match serde_json::from_value::<Request>(serde_json::json!({ "op": op, "args": {} })) {
        Ok(_) => true,
        Err(error) => !error.to_string().starts_with("unknown variant"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_request_of_the_future_is_unsupported_and_a_broken_one_is_bad() {
        let unsupported = parse_request(br#"{"op":"teleport","args":{}}"#).unwrap_err();
        assert_eq!(unsupported.code, ErrorCode::Unsupported);
        let bad = parse_request(br#"{"op":"wait","args":{"process":"x"}}"#).unwrap_err();
        assert_eq!(bad.code, ErrorCode::BadRequest);
        assert_eq!(
            parse_request(b"junk").unwrap_err().code,
            ErrorCode::BadRequest
        );
    }

    #[test]
    fn unknown_fields_are_ignored_and_missing_ones_have_defaults() {
        let request =
            parse_request(br#"{"op":"exec","args":{"argv":["true"],"colour":"red"}}"#).unwrap();
        let Request::Exec(exec) = request else {
            panic!("{request:?}")
        };
        assert_eq!(exec.argv, ["true"]);
        assert!(!exec.background);
        assert_eq!(parse_request(br#"{"op":"ping"}"#).unwrap(), Request::Ping);
    }

    #[test]
    fn requests_survive_the_wire() {
        let requests = [
            Request::Ping,
            Request::Exec(Box::new(ExecRequest {
                shell: Some("ls".into()),
                ..Default::default()
            })),
            Request::Write(WriteRequest {
                path: "/a".into(),
                ..Default::default()
            }),
            Request::Dial(DialRequest::Tcp("8888".into())),
            Request::Resize {
                process: 1,
                rows: 2,
                cols: 3,
            },
        ];
        for request in requests {
            let bytes = serde_json::to_vec(&request).unwrap();
            assert_eq!(parse_request(&bytes).unwrap(), request);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse_request(&bytes);
        }
    }
}
