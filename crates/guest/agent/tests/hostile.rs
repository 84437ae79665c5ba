//! Peers that do not behave.

mod common;

use common::{TestAgent, sh};
use forkd_agent_client::{Client, Options};
use forkd_guest_proto::{Decoder, ErrorCode, Hello, Kind, Outcome, frame};
use rand::{Rng, RngExt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

async fn greeted(agent: &TestAgent) -> UnixStream {
    let mut stream = UnixStream::connect(agent.socket()).await.unwrap();
    let hello = serde_json::to_vec(&Hello::default()).unwrap();
    stream
        .write_all(&frame::encode(0, Kind::Hello, 0, &hello))
        .await
        .unwrap();
    stream
}

#[tokio::test]
async fn random_bytes_hurt_nobody() {
    let mut agent = TestAgent::start().await;
    let client = agent.connect().await;
    for round in 0..200 {
        let mut stream = if round % 2 == 0 {
            UnixStream::connect(agent.socket()).await.unwrap()
        } else {
            greeted(&agent).await
        };
        let mut bytes = vec![0; rand::rng().random_range(1..20_000)];
        rand::rng().fill_bytes(&mut bytes);
        if round % 4 == 1 {
            // Well-formed frames with rubbish inside.
            let kind = Kind::from_number(rand::rng().random_range(1..=8)).unwrap();
            bytes = frame::encode(
                rand::rng().random_range(0..3),
                kind,
                rand::rng().random(),
                &bytes,
            );
        }
        let _ = stream.write_all(&bytes).await;
    }
    assert!(agent.is_alive());
    assert_eq!(
        client.exec_capture(sh("echo ok")).await.unwrap().stdout,
        b"ok\n"
    );
    assert!(agent.rss_kib() < 16 * 1024, "{} KiB", agent.rss_kib());
}

#[tokio::test]
async fn a_peer_that_overdraws_its_window_is_cut_off() {
    let agent = TestAgent::start().await;
    let mut stream = greeted(&agent).await;
    let request =
        br#"{"op":"exec","args":{"argv":["sleep","1000"],"stdin":true,"on_disconnect":"kill"}}"#;
    stream
        .write_all(&frame::encode(1, Kind::Request, 0, request))
        .await
        .unwrap();
    let data = frame::encode(1, Kind::Data, 0, &vec![0; 200_000]);
    let _ = stream.write_all(&data).await;
    let _ = stream.write_all(&data).await;
    // The end of the stream comes although this side keeps it open.
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest).await;
    assert_eq!(
        agent
            .connect()
            .await
            .exec_capture(sh("echo ok"))
            .await
            .unwrap()
            .stdout,
        b"ok\n"
    );
}

#[tokio::test]
async fn an_unknown_request_is_answered_and_the_connection_lives() {
    let agent = TestAgent::start().await;
    let mut stream = greeted(&agent).await;
    let unknown = br#"{"op":"teleport","args":{"to":"mars"}}"#;
    stream
        .write_all(&frame::encode(5, Kind::Request, 0, unknown))
        .await
        .unwrap();
    stream
        .write_all(&frame::encode(6, Kind::Request, 0, br#"{"op":"ping"}"#))
        .await
        .unwrap();
    let mut decoder = Decoder::new();
    let mut answers = Vec::new();
    let mut buffer = [0; 4096];
    while answers.len() < 2 {
        let count = stream.read(&mut buffer).await.unwrap();
        assert!(count > 0);
        let mut bytes = &buffer[..count];
        while let Some(frame) = decoder.next(&mut bytes).unwrap() {
            if frame.kind == Kind::Response {
                answers.push((
                    frame.stream,
                    serde_json::from_slice::<Outcome<serde_json::Value>>(&frame.payload).unwrap(),
                ));
            }
        }
    }
    answers.sort_by_key(|(stream, _)| *stream);
    assert!(
        matches!(&answers[0], (5, Outcome::Error(error)) if error.code == ErrorCode::Unsupported)
    );
    assert!(matches!(&answers[1], (6, Outcome::Ok(_))));
}

#[tokio::test]
async fn a_client_notices_an_agent_that_breaks_the_protocol() {
    let (near, mut far) = tokio::io::duplex(1 << 16);
    let hello = serde_json::to_vec(&Hello::default()).unwrap();
    far.write_all(&frame::encode(0, Kind::Hello, 0, &hello))
        .await
        .unwrap();
    let client = Client::connect(near, Options::default())
        .await
        .unwrap()
        .each_within(common::LIMIT);
    let request = tokio::spawn({
        let client = client.clone();
        async move { client.exec_capture(sh("x")).await }
    });
    // More than the window of a channel, for a request whose output is not read.
    let chunk = frame::encode(1, Kind::Data, 3, &vec![0; 60_000]);
    let mut sink = vec![0; 4096];
    let _ = far.read(&mut sink).await;
    let _ = far.read(&mut sink).await;
    for _ in 0..6 {
        if far.write_all(&chunk).await.is_err() {
            break;
        }
    }
    client.closed().await;
    assert!(request.await.unwrap().is_err());
}
