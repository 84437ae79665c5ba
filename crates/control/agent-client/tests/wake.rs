//! A child gets its identity and the time in one exchange.

use std::path::Path;
use std::time::Duration;

use forkd_agent_client::{Client, ConnectError, Deadline, Error, Identified, Options};
use forkd_guest_proto::{
    AgentError, ClockRequest, Decoder, ErrorCode, Frame, Hello, IdentityReport, IdentityRequest,
    Kind, Outcome, PROTOCOL_VERSION, Request, frame, parse_request,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

/// Longer than any test takes: a call that needs it is stuck.
const LONG: Duration = Duration::from_secs(60);
const PORT: u32 = 1024;

/// The vsock device and the agent behind it.
struct Guest {
    io: UnixStream,
    decoder: Decoder,
}

impl Guest {
    async fn accept(listener: &UnixListener) -> Self {
        Self {
            io: listener.accept().await.unwrap().0,
            decoder: Decoder::new(),
        }
    }

    async fn line(&mut self) -> String {
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') {
            line.push(self.io.read_u8().await.unwrap());
        }
        String::from_utf8(line).unwrap()
    }

    async fn next(&mut self) -> Frame {
        loop {
            let byte = [self.io.read_u8().await.unwrap()];
            if let Some(frame) = self.decoder.next(&mut byte.as_slice()).unwrap() {
                return frame;
            }
        }
    }

    /// Reads the whole greeting before anything is answered, and returns the identity.
    async fn greeting(&mut self) -> (u32, IdentityRequest) {
        assert_eq!(self.line().await, "CONNECT 1024\n");
        assert_eq!(self.next().await.kind, Kind::Hello);
        let request = self.next().await;
        match parse_request(&request.payload).unwrap() {
            Request::Identity(identity) => (request.stream, *identity),
            other => panic!("{other:?}"),
        }
    }
}

fn answer(stream: u32, version: u32, outcome: &Outcome<IdentityReport>) -> Vec<u8> {
    let hello = Hello {
        version,
        ..Hello::default()
    };
    let mut bytes = b"OK 1073741824\n".to_vec();
    let hello = serde_json::to_vec(&hello).unwrap();
    frame::encode_into(&mut bytes, 0, Kind::Hello, 0, &hello);
    let outcome = serde_json::to_vec(outcome).unwrap();
    frame::encode_into(&mut bytes, stream, Kind::Response, 0, &outcome);
    bytes
}

type Woken = Result<(Client, Result<Identified, Error>), ConnectError>;

async fn wake(path: &Path) -> Woken {
    let request = IdentityRequest {
        hostname: Some("child".into()),
        ..IdentityRequest::default()
    };
    let deadline = Deadline::within(LONG);
    Client::wake_vsock(path, PORT, Options::default(), request, deadline).await
}

/// Wakes a child whose guest does what `guest` says.
async fn with<T>(guest: impl AsyncFnOnce(Guest) -> T) -> (Woken, T) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vsock");
    let listener = UnixListener::bind(&path).unwrap();
    let serving = async { guest(Guest::accept(&listener).await).await };
    tokio::join!(wake(&path), serving)
}

#[tokio::test]
async fn one_write_asks_for_everything_and_a_move_of_the_clock_follows() {
    let (woken, (identity, guest)) = with(async |mut guest| {
        let (stream, identity) = guest.greeting().await;
        let report = IdentityReport {
            hostname: "child".into(),
            clock_step_ns: Some(1),
            // The guest took a second to get the message, and its clock is late by that.
            unix_ns: identity.unix_ns.map(|sent| sent - 1_000_000_000),
            ..IdentityReport::default()
        };
        let bytes = answer(stream, PROTOCOL_VERSION, &Outcome::Ok(report));
        // In pieces that end nowhere in particular.
        for piece in bytes.chunks(7) {
            guest.io.write_all(piece).await.unwrap();
        }
        (identity, guest)
    })
    .await;
    let mut guest = guest;
    let (client, identified) = woken.unwrap();
    let identified = identified.unwrap();
    assert_eq!(identified.report.hostname, "child");
    assert_eq!(identity.hostname.as_deref(), Some("child"));
    assert!(identified.clock_within.is_some());
    // The next frame is the move: no request can come before it.
    let asked = tokio::spawn(async move { client.by(Deadline::within(LONG)).ping().await });
    let next = guest.next().await;
    match parse_request(&next.payload).unwrap() {
        Request::Clock(ClockRequest { shift_ns, .. }) => {
            assert!(shift_ns.unwrap() >= 1_000_000_000, "{shift_ns:?}");
        }
        other => panic!("{other:?}"),
    }
    drop(guest);
    assert!(asked.await.unwrap().is_err());
}

#[tokio::test]
async fn an_identity_that_failed_leaves_a_connection() {
    let (woken, _guest) = with(async |mut guest| {
        let (stream, _) = guest.greeting().await;
        let error = AgentError::new(ErrorCode::Internal, "not reseeded");
        let bytes = answer(stream, PROTOCOL_VERSION, &Outcome::Error(error));
        guest.io.write_all(&bytes).await.unwrap();
        guest
    })
    .await;
    let (client, identified) = woken.unwrap();
    assert!(matches!(identified, Err(Error::Agent(_))), "{identified:?}");
    assert!(!client.is_closed());
}

#[tokio::test]
async fn an_agent_of_another_version_is_named() {
    let (woken, _guest) = with(async |mut guest| {
        let (stream, _) = guest.greeting().await;
        let other = Outcome::Ok(IdentityReport::default());
        let bytes = answer(stream, PROTOCOL_VERSION + 1, &other);
        guest.io.write_all(&bytes).await.unwrap();
        guest
    })
    .await;
    let refused = woken.err();
    assert!(
        matches!(refused, Some(ConnectError::Version { .. })),
        "{refused:?}"
    );
}

#[tokio::test]
async fn a_device_that_refuses_is_an_error() {
    for line in ["ERR no listener\n".to_owned(), "x".repeat(100_000)] {
        let (woken, _guest) = with(async |mut guest| {
            guest.greeting().await;
            guest.io.write_all(line.as_bytes()).await.unwrap();
            guest
        })
        .await;
        let refused = woken.err();
        assert!(
            matches!(&refused, Some(ConnectError::Refused { answer, .. }) if answer.len() <= 64),
            "{refused:?}"
        );
    }
    let (woken, ()) = with(async |mut guest| {
        guest.greeting().await;
    })
    .await;
    assert!(matches!(woken.err(), Some(ConnectError::Socket { .. })));
}
