//! A guest that lies, floods or never answers costs its host little.

use std::time::Duration;

use forkd_agent_client::{Budget, Client, Deadline, Error, Options};
use forkd_guest_proto::window::{self, FRAME_COST};
use forkd_guest_proto::{
    Control, Decoder, EvalRequest, ExecRequest, Frame, Hello, Kind, channel, frame,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

/// Longer than any test takes: a call that needs it is stuck.
const LONG: Duration = Duration::from_secs(60);
const MIB: usize = 1 << 20;

/// The guest's end of a connection.
struct Guest {
    io: DuplexStream,
    decoder: Decoder,
}

impl Guest {
    async fn next(&mut self) -> Frame {
        loop {
            let byte = [self.io.read_u8().await.unwrap()];
            if let Some(frame) = self.decoder.next(&mut byte.as_slice()).unwrap() {
                return frame;
            }
        }
    }

    async fn send(&mut self, stream: u32, kind: Kind, channel: u8, payload: &[u8]) {
        let bytes = frame::encode(stream, kind, channel, payload);
        self.io.write_all(&bytes).await.unwrap();
    }

    /// Ends both outputs and sends bulk bytes as the host gives credit; false when the host cancels the request.
    async fn flood(&mut self, stream: u32, bytes: &[u8]) -> bool {
        for output in [channel::OUT, channel::ERR] {
            self.send(stream, Kind::End, output, &[]).await;
        }
        let mut credit = window::DEFAULT as usize;
        for part in bytes.chunks(frame::DATA_CHUNK) {
            while credit < part.len() + FRAME_COST {
                let frame = self.next().await;
                match frame.credit() {
                    Some(more) if frame.kind == Kind::Window => credit += more as usize,
                    _ => return false,
                }
            }
            credit -= part.len() + FRAME_COST;
            self.send(stream, Kind::Data, channel::BULK, part).await;
        }
        true
    }
}

/// A client, and a guest that has said hello to it.
async fn pair(budget: Budget) -> (Client, Guest) {
    let (near, io) = tokio::io::duplex(1 << 20);
    let mut guest = Guest {
        io,
        decoder: Decoder::new(),
    };
    let options = Options {
        budget,
        ..Options::default()
    };
    let greet = async {
        guest.next().await;
        let hello = serde_json::to_vec(&Hello::default()).unwrap();
        guest.send(0, Kind::Hello, 0, &hello).await;
    };
    let (client, ()) = tokio::join!(Client::connect(near, options), greet);
    (client.unwrap(), guest)
}

/// A result whose value is `count` small lists, as a tree about forty times its text.
fn nested(count: usize) -> Vec<u8> {
    format!(r#"{{"json":[{}[0]]}}"#, "[0],".repeat(count)).into_bytes()
}

#[tokio::test]
async fn a_value_of_many_small_parts_stays_text() {
    let (client, mut guest) = pair(Budget::of(64 * MIB)).await;
    let calls = client.by(Deadline::within(LONG));
    let answer = nested(MIB);
    let answering = async {
        let request = guest.next().await;
        assert!(guest.flood(request.stream, &answer).await);
        guest
            .send(request.stream, Kind::End, channel::BULK, &[])
            .await;
        let short = format!(r#"{{"ok":{{"bulk":{}}}}}"#, answer.len());
        guest
            .send(request.stream, Kind::Response, 0, short.as_bytes())
            .await;
    };
    let (done, ()) = tokio::join!(calls.eval(EvalRequest::default()), answering);
    let json = done.unwrap().result.json.unwrap();
    assert!(json.get().starts_with("[[0],[0],") && json.get().len() > 4 * MIB);
}

#[tokio::test]
async fn a_result_over_eight_mebibytes_is_refused() {
    let (client, mut guest) = pair(Budget::unlimited()).await;
    let calls = client.by(Deadline::within(LONG));
    let flooding = async {
        let request = guest.next().await;
        guest.flood(request.stream, &vec![b' '; 9 * MIB]).await
    };
    let (done, all_taken) = tokio::join!(calls.eval(EvalRequest::default()), flooding);
    assert!(matches!(done, Err(Error::OverLimit { limit }) if limit == 8 * MIB));
    assert!(!all_taken);
}

#[tokio::test]
async fn answers_of_all_guests_share_one_budget() {
    let budget = Budget::of(MIB);
    let (client, mut guest) = pair(budget.clone()).await;
    let calls = client.by(Deadline::within(LONG));
    let flooding = async {
        let request = guest.next().await;
        guest.flood(request.stream, &vec![b' '; 2 * MIB]).await
    };
    let (done, all_taken) = tokio::join!(calls.eval(EvalRequest::default()), flooding);
    assert!(matches!(done, Err(Error::OverBudget { limit }) if limit == MIB));
    assert!(!all_taken);
    assert_eq!(budget.free(), MIB);
}

#[tokio::test]
async fn a_guest_that_never_answers_meets_every_deadline() {
    let (client, mut guest) = pair(Budget::unlimited()).await;
    let soon = || client.by(Deadline::within(Duration::from_millis(1)));
    assert!(matches!(soon().ping().await, Err(Error::Timeout)));
    assert!(matches!(
        soon().eval(EvalRequest::default()).await,
        Err(Error::Timeout)
    ));
    let exec = soon().exec(ExecRequest::default()).await;
    assert!(matches!(exec.err(), Some(Error::Timeout)));
    assert!(matches!(
        soon().read_file("/", 1).await,
        Err(Error::Timeout)
    ));
    // Each of them was cancelled.
    for _ in 0..4 {
        let request = guest.next().await;
        assert_eq!(request.kind, Kind::Request);
        let control = guest.next().await;
        let said: Control = serde_json::from_slice(&control.payload).unwrap();
        assert_eq!((control.stream, said), (request.stream, Control::Cancel));
    }
    assert!(!client.is_closed());
}

#[tokio::test]
async fn a_guest_that_ends_no_cancelled_request_is_cut_off() {
    let (client, mut guest) = pair(Budget::unlimited()).await;
    let reading = tokio::spawn(async move {
        let mut ignored = vec![0; 1 << 16];
        while guest
            .io
            .read(&mut ignored)
            .await
            .is_ok_and(|count| count > 0)
        {}
    });
    let mut sent = 0;
    while !client.is_closed() {
        let _ = client.by(Deadline::within(Duration::ZERO)).ping().await;
        sent += 1;
        assert!(sent < 10_000, "requests pile up");
    }
    reading.await.unwrap();
}

#[tokio::test]
async fn late_frames_of_a_cancelled_request_are_thrown_away() {
    let (client, mut guest) = pair(Budget::unlimited()).await;
    let cancelled = client.by(Deadline::within(Duration::ZERO));
    assert!(matches!(
        cancelled.eval(EvalRequest::default()).await,
        Err(Error::Timeout)
    ));
    let request = guest.next().await;
    guest.next().await;
    guest
        .send(request.stream, Kind::Data, channel::OUT, b"late")
        .await;
    guest
        .send(request.stream, Kind::Response, 0, br#"{"ok":{}}"#)
        .await;
    // The connection goes on.
    let calls = client.by(Deadline::within(LONG));
    let answering = async {
        let request = guest.next().await;
        guest
            .send(request.stream, Kind::Response, 0, br#"{"ok":{"pid":7}}"#)
            .await;
    };
    let (pong, ()) = tokio::join!(calls.ping(), answering);
    assert_eq!(pong.unwrap().pid, 7);
}
