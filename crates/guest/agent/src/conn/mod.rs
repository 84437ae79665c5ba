//! One connection: frames in, requests started, frames out.

mod dispatch;
mod outbox;
mod stream;

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use forkd_guest_proto::{
    AgentError, Control, Decoder, ErrorCode, Frame, Hello, Kind, Outcome, PROTOCOL_VERSION,
    feature, parse_request, window,
};
use tokio::io::{AsyncRead, AsyncReadExt, ReadHalf};

use crate::agent::Agent;
use crate::transport::Io;

pub use outbox::Closed;
pub use stream::{EarlyEnd, Stream};

use outbox::Outbox;

/// Requests that may be under way on one connection.
const MAX_STREAMS: usize = 512;
/// How long a peer may take to say hello.
const HELLO_TIME: Duration = Duration::from_secs(30);
/// The window of each channel towards the agent, bytes.
const OWN_WINDOW: u32 = 128 * 1024;

/// Serves one connection until it ends.
pub async fn serve(agent: Rc<Agent>, io: Io, token: Option<Rc<str>>) {
    let (mut reader, mut writer) = tokio::io::split(io);
    let outbox = Rc::new(Outbox::default());
    let writing = {
        let outbox = Rc::clone(&outbox);
        tokio::task::spawn_local(async move { outbox.write_all_to(&mut writer).await })
    };
    let mut decoder = Decoder::new();
    let mut buffer = Buffer::new();
    let hello = tokio::time::timeout(
        HELLO_TIME,
        next_frame(&mut reader, &mut decoder, &mut buffer),
    );
    let peer = hello
        .await
        .ok()
        .flatten()
        .and_then(|frame| accept_hello(&frame, token.as_deref()));
    if let Some(peer) = peer {
        if let Ok(payload) = serde_json::to_vec(&own_hello()) {
            outbox.send_now(0, Kind::Hello, 0, &payload);
        }
        let conn = Conn {
            agent,
            outbox: Rc::clone(&outbox),
            peer,
            streams: Rc::default(),
        };
        while let Some(frame) = next_frame(&mut reader, &mut decoder, &mut buffer).await {
            if conn.take(frame).await.is_err() {
                break;
            }
        }
        conn.lose_all();
    }
    outbox.close();
    let _ = writing.await;
}

type Streams = Rc<RefCell<HashMap<u32, Rc<Stream>>>>;

struct Conn {
    agent: Rc<Agent>,
    outbox: Rc<Outbox>,
    peer: Hello,
    streams: Streams,
}

/// The peer broke the rules and is cut off.
struct Violation;

impl Conn {
    async fn take(&self, frame: Frame) -> Result<(), Violation> {
        if frame.kind == Kind::Request {
            return self.open(frame).await;
        }
        let Some(stream) = self.streams.borrow().get(&frame.stream).cloned() else {
            // The request has just ended; what was under way for it does not matter any more.
            return Ok(());
        };
        match frame.kind {
            Kind::Data => stream.push_input(frame.payload).map_err(|_| Violation)?,
            Kind::End => stream.end_input(),
            Kind::Window => stream.grant(frame.channel, frame.credit().ok_or(Violation)?),
            Kind::Control => {
                stream.push_control(
                    serde_json::from_slice(&frame.payload).unwrap_or(Control::Unknown),
                );
            }
            Kind::Hello | Kind::Request | Kind::Event | Kind::Response => return Err(Violation),
        }
        Ok(())
    }

    async fn open(&self, frame: Frame) -> Result<(), Violation> {
        let id = frame.stream;
        if id == 0 || self.streams.borrow().contains_key(&id) {
            return Err(Violation);
        }
        let request = if self.streams.borrow().len() >= MAX_STREAMS {
            Err(AgentError::new(
                ErrorCode::Limit,
                format!("more than {MAX_STREAMS} requests at once"),
            ))
        } else {
            parse_request(&frame.payload)
        };
        let request = match request {
            Ok(request) => request,
            Err(error) => {
                let payload = serde_json::to_vec(&Outcome::<()>::Error(error)).unwrap_or_default();
                return self
                    .outbox
                    .send(id, Kind::Response, 0, &payload)
                    .await
                    .map_err(|Closed| Violation);
            }
        };
        let stream = Stream::new(id, Rc::clone(&self.outbox), self.peer.window, OWN_WINDOW);
        let stream = Rc::new(stream);
        self.streams.borrow_mut().insert(id, Rc::clone(&stream));
        let (agent, outbox) = (Rc::clone(&self.agent), Rc::clone(&self.outbox));
        let streams = Rc::clone(&self.streams);
        tokio::task::spawn_local(async move {
            let outcome = dispatch::run(&agent, &stream, request).await;
            streams.borrow_mut().remove(&id);
            if let Some(payload) = outcome {
                let _ = outbox.send(id, Kind::Response, 0, &payload).await;
            }
            if let Some(shutdown) = agent.shutdown.take() {
                outbox.flushed().await;
                crate::shutdown::run(&agent, shutdown).await;
            }
        });
        Ok(())
    }

    fn lose_all(&self) {
        for stream in self.streams.borrow().values() {
            stream.end(EarlyEnd::Lost);
        }
    }
}

fn own_hello() -> Hello {
    Hello {
        version: PROTOCOL_VERSION,
        features: feature::ALL.iter().map(ToString::to_string).collect(),
        window: OWN_WINDOW,
        program: concat!("forkd-agent ", env!("CARGO_PKG_VERSION")).to_owned(),
        token: None,
    }
}

fn accept_hello(frame: &Frame, token: Option<&str>) -> Option<Hello> {
    if frame.kind != Kind::Hello || frame.stream != 0 {
        return None;
    }
    let mut hello: Hello = serde_json::from_slice(&frame.payload).ok()?;
    if let Some(token) = token
        && !same(
            token.as_bytes(),
            hello.token.as_deref().unwrap_or("").as_bytes(),
        )
    {
        return None;
    }
    hello.window = hello.window.clamp(window::MIN, window::MAX);
    Some(hello)
}

/// Compares in a time that does not depend on where the two differ.
fn same(secret: &[u8], given: &[u8]) -> bool {
    let mut difference = secret.len() ^ given.len();
    for (index, byte) in secret.iter().enumerate() {
        difference |= usize::from(byte ^ given.get(index).copied().unwrap_or(!byte));
    }
    difference == 0
}

struct Buffer {
    bytes: Vec<u8>,
    from: usize,
    to: usize,
}

impl Buffer {
    fn new() -> Self {
        Self {
            bytes: vec![0; 32 * 1024],
            from: 0,
            to: 0,
        }
    }
}

async fn next_frame<R: AsyncRead>(
    reader: &mut ReadHalf<R>,
    decoder: &mut Decoder,
    buffer: &mut Buffer,
) -> Option<Frame> {
    loop {
        let mut unread = buffer.bytes.get(buffer.from..buffer.to).unwrap_or_default();
        let frame = decoder.next(&mut unread).ok()?;
        buffer.from = buffer.to - unread.len();
        if frame.is_some() {
            return frame;
        }
        let count = reader.read(&mut buffer.bytes).await.ok()?;
        if count == 0 {
            return None;
        }
        (buffer.from, buffer.to) = (0, count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_compared_whole() {
        assert!(same(b"secret", b"secret"));
        for wrong in [&b""[..], b"secre", b"secret2", b"Secret", b"secreT"] {
            assert!(!same(b"secret", wrong));
        }
        assert!(same(b"", b""));
    }

    #[test]
    fn a_hello_needs_the_token_where_there_is_one() {
        let hello = |json: &str| Frame {
            stream: 0,
            kind: Kind::Hello,
            channel: 0,
            payload: json.as_bytes().to_vec(),
        };
        assert!(accept_hello(&hello("{}"), None).is_some());
        assert!(accept_hello(&hello("{}"), Some("t")).is_none());
        assert!(accept_hello(&hello(r#"{"token":"u"}"#), Some("t")).is_none());
        assert!(accept_hello(&hello(r#"{"token":"t"}"#), Some("t")).is_some());
    }
}
