//! The two tasks that serve a connection, and what they share with the requests.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use forkd_guest_proto::{Control, Decoder, Frame, Hello, Kind, frame};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{Notify, mpsc};

use crate::error::Error;
use crate::stream::State;

pub const READ_BUFFER: usize = 64 * 1024;
/// Frames are written together up to about this many bytes.
const WRITE_BATCH: usize = 256 * 1024;

/// What requests and tasks share.
pub struct Connection {
    /// The agent's hello.
    pub peer: Hello,
    /// What we hold per channel.
    pub window: u32,
    // Unbounded, but filled only as far as credit goes: every data frame has been granted by the agent and
    // every window frame answers bytes that came.
    out: mpsc::UnboundedSender<Vec<u8>>,
    streams: Mutex<HashMap<u32, Arc<State>>>,
    next: AtomicU32,
    closed: Mutex<Option<String>>,
    ended: Notify,
}

impl Connection {
    pub fn start(
        peer: Hello,
        window: u32,
        reader: impl AsyncRead + Unpin + Send + 'static,
        writer: impl AsyncWrite + Unpin + Send + 'static,
        decoder: Decoder,
        rest: Vec<u8>,
    ) -> Arc<Self> {
        let (out, queue) = mpsc::unbounded_channel();
        let connection = Arc::new(Self {
            peer,
            window,
            out,
            streams: Mutex::default(),
            next: AtomicU32::new(1),
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
            if id != 0 && !streams.contains_key(&id) {
                streams.insert(id, Arc::clone(state));
                return Ok(id);
            }
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
        let streams: Vec<_> = self
            .streams
            .lock()
            .drain()
            .map(|(_, state)| state)
            .collect();
        for state in streams {
            state.lose(reason);
        }
        // An empty message tells the writer to stop.
        let _ = self.out.send(Vec::new());
        self.ended.notify_waiters();
    }

    fn take(&self, frame: Frame) -> Result<(), String> {
        let state = self.streams.lock().get(&frame.stream).cloned();
        let Some(state) = state else {
            return Err(format!(
                "a frame for request {}, which does not exist",
                frame.stream
            ));
        };
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
                self.streams.lock().remove(&frame.stream);
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
