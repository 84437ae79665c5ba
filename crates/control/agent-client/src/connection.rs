//! The two tasks that serve a connection, and what they share with the requests.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use forkd_guest_proto::{Control, Decoder, Frame, Hello, Kind, frame};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{Notify, mpsc};

use crate::budget::Budget;
use crate::error::Error;
use crate::stream::{FIRST, State};

/// Cancelled requests that may wait for their response.
const MAX_CANCELLED: usize = 1024;

pub const READ_BUFFER: usize = 64 * 1024;
/// Frames are written together up to about this many bytes.
const WRITE_BATCH: usize = 256 * 1024;

/// The terms of a connection.
pub struct Terms {
    /// The agent's hello.
    pub peer: Hello,
    /// The bytes that this side holds per channel.
    pub window: u32,
    pub budget: Budget,
}

/// The state that requests and the two tasks share.
pub struct Connection {
    pub terms: Terms,
    // Unbounded, but filled only as far as credit goes: every data frame has been granted by the agent and
    // every window frame answers bytes that came.
    out: mpsc::UnboundedSender<Vec<u8>>,
    streams: Mutex<Streams>,
    next: AtomicU32,
    closed: Mutex<Option<String>>,
    ended: Notify,
}

/// The requests that have no response yet.
#[derive(Default)]
struct Streams {
    live: HashMap<u32, Arc<State>>,
    /// Requests that were cancelled. Frames that were under way for them are thrown away; the response frees the
    /// number.
    cancelled: HashSet<u32>,
}

impl Connection {
    /// `rest` is what came after the agent's hello. `first` is a request that was sent with the hello.
    pub fn start(
        terms: Terms,
        reader: impl AsyncRead + Unpin + Send + 'static,
        writer: impl AsyncWrite + Unpin + Send + 'static,
        decoder: Decoder,
        rest: Vec<u8>,
        first: Option<Arc<State>>,
    ) -> Arc<Self> {
        let (out, queue) = mpsc::unbounded_channel();
        let next = FIRST + u32::from(first.is_some());
        let connection = Arc::new(Self {
            terms,
            out,
            streams: Mutex::new(Streams {
                live: first.into_iter().map(|state| (FIRST, state)).collect(),
                cancelled: HashSet::new(),
            }),
            next: AtomicU32::new(next),
            closed: Mutex::new(None),
            ended: Notify::new(),
        });
        // The tasks hold no strong reference: the last client or request to go ends the connection.
        tokio::spawn(write(writer, queue));
        tokio::spawn(read(Arc::downgrade(&connection), reader, decoder, rest));
        connection
    }

    /// Queues a frame.
    pub fn send(&self, stream: u32, kind: Kind, channel: u8, payload: &[u8]) {
        let _ = self.out.send(frame::encode(stream, kind, channel, payload));
    }

    /// Queues a control.
    pub fn send_control(&self, stream: u32, control: &Control) {
        if let Ok(payload) = serde_json::to_vec(control) {
            self.send(stream, Kind::Control, 0, &payload);
        }
    }

    /// Registers a request under a free number.
    pub fn register(&self, state: &Arc<State>) -> Result<u32, Error> {
        let mut streams = self.streams.lock();
        // Asked under this lock: closing takes it after saying so, and then finds what was put in before.
        if let Some(reason) = self.closed.lock().clone() {
            return Err(Error::Closed { reason });
        }
        loop {
            let id = self.next.fetch_add(1, Ordering::Relaxed);
            if id != 0 && !streams.live.contains_key(&id) && !streams.cancelled.contains(&id) {
                streams.live.insert(id, Arc::clone(state));
                return Ok(id);
            }
        }
    }

    /// Gives up a request that has no response yet: its memory is free from now on. An agent that ends none of the
    /// requests it should end is cut off.
    pub fn cancel(&self, id: u32) {
        let mut streams = self.streams.lock();
        if streams.live.remove(&id).is_none() {
            return;
        }
        streams.cancelled.insert(id);
        let too_many = streams.cancelled.len() > MAX_CANCELLED;
        drop(streams);
        self.send_control(id, &Control::Cancel);
        if too_many {
            self.close("the agent does not end cancelled requests");
        }
    }

    pub fn is_closed(&self) -> bool {
        self.closed.lock().is_some()
    }

    pub async fn closed(&self) {
        loop {
            let ended = self.ended.notified();
            tokio::pin!(ended);
            ended.as_mut().enable();
            if self.is_closed() {
                return;
            }
            ended.await;
        }
    }

    /// Ends everything, with the first reason given.
    pub fn close(&self, reason: &str) {
        self.closed.lock().get_or_insert_with(|| reason.to_owned());
        let streams = std::mem::take(&mut *self.streams.lock());
        for state in streams.live.into_values() {
            state.lose(reason);
        }
        // An empty message tells the writer to stop.
        let _ = self.out.send(Vec::new());
        self.ended.notify_waiters();
    }

    fn take(&self, frame: Frame) -> Result<(), String> {
        let mut streams = self.streams.lock();
        let Some(state) = streams.live.get(&frame.stream).cloned() else {
            if !streams.cancelled.contains(&frame.stream) {
                return Err(format!(
                    "a frame for request {}, which does not exist",
                    frame.stream
                ));
            }
            if frame.kind == Kind::Response {
                streams.cancelled.remove(&frame.stream);
            }
            return Ok(());
        };
        drop(streams);
        match frame.kind {
            Kind::Data => state.push_data(frame.channel, frame.payload),
            Kind::Event => state.push_event(frame.payload),
            Kind::End => state.end_channel(frame.channel),
            Kind::Window => {
                let credit = frame.credit().ok_or("a window frame without credit")?;
                state.grant(credit);
                Ok(())
            }
            Kind::Response => {
                self.streams.lock().live.remove(&frame.stream);
                state.respond(frame.payload);
                Ok(())
            }
            Kind::Hello | Kind::Request | Kind::Control => {
                Err(format!("a frame of kind {:?} from the agent", frame.kind))
            }
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.close("dropped");
    }
}

async fn write(mut writer: impl AsyncWrite + Unpin, mut queue: mpsc::UnboundedReceiver<Vec<u8>>) {
    while let Some(mut batch) = queue.recv().await {
        let mut stop = batch.is_empty();
        while !stop && batch.len() < WRITE_BATCH {
            match queue.try_recv() {
                Ok(more) if more.is_empty() => stop = true,
                Ok(more) => batch.extend_from_slice(&more),
                Err(_) => break,
            }
        }
        if writer.write_all(&batch).await.is_err() || writer.flush().await.is_err() || stop {
            break;
        }
    }
    // The reader notices that the peer is gone; until then nothing more can be sent.
    let _ = writer.shutdown().await;
}

async fn read(
    connection: std::sync::Weak<Connection>,
    mut reader: impl AsyncRead + Unpin,
    mut decoder: Decoder,
    rest: Vec<u8>,
) {
    let mut buffer = rest;
    let reason = loop {
        let Some(connection) = connection.upgrade() else {
            return;
        };
        let mut bytes = buffer.as_slice();
        let result = loop {
            match decoder.next(&mut bytes) {
                Ok(Some(frame)) => {
                    if let Err(reason) = connection.take(frame) {
                        break Err(reason);
                    }
                }
                Ok(None) => break Ok(()),
                Err(error) => break Err(error.to_string()),
            }
        };
        if let Err(reason) = result {
            break format!("the agent broke the protocol: {reason}");
        }
        if connection.is_closed() {
            return;
        }
        drop(connection);
        buffer.resize(READ_BUFFER, 0);
        match reader.read(&mut buffer).await {
            Ok(0) => break "the agent closed it".to_owned(),
            Ok(count) => buffer.truncate(count),
            Err(error) => break error.to_string(),
        }
    };
    if let Some(connection) = connection.upgrade() {
        connection.close(&reason);
    }
}
