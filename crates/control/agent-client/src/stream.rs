//! One request: the frames that came for it, and the credit in both directions.

use std::collections::VecDeque;
use std::sync::Arc;

use forkd_guest_proto::window::{RecvWindow, SendWindow};
use forkd_guest_proto::{Control, Event, Kind, MAX_PAYLOAD, Outcome, Request, channel, frame};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use tokio::sync::Notify;

use crate::budget::Budget;
use crate::connection::Connection;
use crate::error::Error;

/// The number of the first request of a connection.
pub const FIRST: u32 = 1;

/// A request as bytes.
pub fn payload(request: &Request) -> Result<Vec<u8>, Error> {
    let payload = serde_json::to_vec(request).map_err(|source| Error::BadAnswer { source })?;
    if payload.len() > MAX_PAYLOAD {
        return Err(Error::TooLarge {
            size: payload.len(),
        });
    }
    Ok(payload)
}

/// The part of a request that the reader task fills and the request's owner empties.
pub struct State {
    inner: Mutex<Inner>,
    arrived: Notify,
    credit: Notify,
}

struct Inner {
    channels: [Channel; channel::COUNT],
    send: SendWindow,
    response: Option<Vec<u8>>,
    lost: Option<String>,
}

struct Channel {
    waiting: VecDeque<Vec<u8>>,
    window: RecvWindow,
    ended: bool,
}

impl State {
    pub fn new(peer_window: u32, own_window: u32) -> Self {
        let channel = |_| Channel {
            waiting: VecDeque::new(),
            window: RecvWindow::new(own_window),
            ended: false,
        };
        Self {
            inner: Mutex::new(Inner {
                channels: std::array::from_fn(channel),
                send: SendWindow::new(peer_window),
                response: None,
                lost: None,
            }),
            arrived: Notify::new(),
            credit: Notify::new(),
        }
    }

    fn push(&self, number: u8, bytes: Vec<u8>) -> Result<(), String> {
        let mut inner = self.inner.lock();
        let Some(channel) = inner.channels.get_mut(usize::from(number)) else {
            return Err(format!("data on channel {number}, which does not exist"));
        };
        channel
            .window
            .receive(bytes.len())
            .map_err(|overrun| overrun.to_string())?;
        if !bytes.is_empty() {
            channel.waiting.push_back(bytes);
        }
        drop(inner);
        self.arrived.notify_waiters();
        Ok(())
    }

    pub fn push_data(&self, number: u8, bytes: Vec<u8>) -> Result<(), String> {
        if number == channel::EVENTS {
            return Err("data on the channel of events".to_owned());
        }
        self.push(number, bytes)
    }

    pub fn push_event(&self, bytes: Vec<u8>) -> Result<(), String> {
        self.push(channel::EVENTS, bytes)
    }

    pub fn end_channel(&self, number: u8) -> Result<(), String> {
        let mut inner = self.inner.lock();
        match inner.channels.get_mut(usize::from(number)) {
            Some(channel) => channel.ended = true,
            None => return Err(format!("the end of channel {number}, which does not exist")),
        }
        drop(inner);
        self.arrived.notify_waiters();
        Ok(())
    }

    pub fn grant(&self, credit: u32) {
        self.inner.lock().send.add(credit);
        self.credit.notify_waiters();
    }

    pub fn respond(&self, payload: Vec<u8>) {
        self.inner.lock().response = Some(payload);
        self.arrived.notify_waiters();
        self.credit.notify_waiters();
    }

    pub fn lose(&self, reason: &str) {
        self.inner
            .lock()
            .lost
            .get_or_insert_with(|| reason.to_owned());
        self.arrived.notify_waiters();
        self.credit.notify_waiters();
    }
}

/// A request under way. Can be shared; does not cancel by itself.
#[derive(Clone)]
pub struct Handle {
    connection: Arc<Connection>,
    id: u32,
    state: Arc<State>,
}

/// A request under way; cancelled when dropped before its answer.
pub struct Stream {
    handle: Handle,
}

impl std::ops::Deref for Stream {
    type Target = Handle;

    fn deref(&self) -> &Handle {
        &self.handle
    }
}

impl Stream {
    /// Sends a request.
    pub fn open(connection: &Arc<Connection>, request: &Request) -> Result<Self, Error> {
        let payload = payload(request)?;
        let state = Arc::new(State::new(
            connection.terms.peer.window,
            connection.terms.window,
        ));
        let id = connection.register(&state)?;
        connection.send(id, Kind::Request, 0, &payload);
        let handle = Handle {
            connection: Arc::clone(connection),
            id,
            state,
        };
        Ok(Self { handle })
    }

    /// The request that was sent with the hello, under the number [`FIRST`].
    pub fn first(connection: &Arc<Connection>, state: Arc<State>) -> Self {
        let handle = Handle {
            connection: Arc::clone(connection),
            id: FIRST,
            state,
        };
        Self { handle }
    }

    /// The memory that answers may take.
    pub fn budget(&self) -> &Budget {
        &self.connection.terms.budget
    }

    /// A second handle, which does not keep the request from being cancelled.
    pub fn share(&self) -> Handle {
        self.handle.clone()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.connection.cancel(self.id);
        // A second handle keeps the state, but nothing that was received.
        for channel in &mut self.state.inner.lock().channels {
            channel.waiting.clear();
        }
    }
}

impl Handle {
    /// The next bytes of a channel; `None` after the last.
    pub async fn receive(&self, number: u8) -> Result<Option<Vec<u8>>, Error> {
        self.wait_for(|inner| {
            let answered = inner.response.is_some();
            let channel = inner.channels.get_mut(usize::from(number))?;
            if let Some(bytes) = channel.waiting.pop_front() {
                if let Some(credit) = channel.window.consume(bytes.len()) {
                    self.connection
                        .send(self.id, Kind::Window, number, &credit.to_le_bytes());
                }
                return Some(Some(bytes));
            }
            (channel.ended || answered).then_some(None)
        })
        .await
    }

    /// The next event; `None` when no more come.
    pub async fn next_event(&self) -> Result<Option<Event>, Error> {
        match self.receive(channel::EVENTS).await? {
            Some(bytes) => serde_json::from_slice(&bytes)
                .map(Some)
                .map_err(|source| Error::BadAnswer { source }),
            None => Ok(None),
        }
    }

    /// Waits for the answer. A channel that is not emptied meanwhile holds the agent up.
    pub async fn response<T: DeserializeOwned>(&self) -> Result<T, Error> {
        let payload = self.wait_for(|inner| inner.response.clone()).await?;
        let outcome: Outcome<T> =
            serde_json::from_slice(&payload).map_err(|source| Error::BadAnswer { source })?;
        Result::from(outcome).map_err(Error::Agent)
    }

    /// Waits for an event that comes first; an answer instead of it is an error or none at all.
    pub async fn expect_event(&self) -> Result<Event, Error> {
        match self.next_event().await? {
            Some(event) => Ok(event),
            None => {
                let _: serde_json::Value = self.response().await?;
                Err(Error::Closed {
                    reason: "the agent answered before it began".to_owned(),
                })
            }
        }
    }

    /// Sends bytes on the input channel. Bytes for a request that has its answer are thrown away.
    pub async fn send(&self, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            let wanted = bytes.len().min(frame::DATA_CHUNK);
            let Some(granted) = self.reserve(wanted).await? else {
                return Ok(());
            };
            let (now, rest) = bytes.split_at(granted);
            self.connection.send(self.id, Kind::Data, channel::IN, now);
            bytes = rest;
        }
        Ok(())
    }

    /// Says that no more input comes.
    pub fn end_input(&self) {
        if self.state.inner.lock().response.is_none() {
            self.connection.send(self.id, Kind::End, channel::IN, &[]);
        }
    }

    /// Says something about the request.
    pub fn control(&self, control: &Control) {
        if self.state.inner.lock().response.is_none() {
            self.connection.send_control(self.id, control);
        }
    }

    async fn reserve(&self, wanted: usize) -> Result<Option<usize>, Error> {
        loop {
            let credit = self.state.credit.notified();
            tokio::pin!(credit);
            credit.as_mut().enable();
            {
                let mut inner = self.state.inner.lock();
                if let Some(reason) = &inner.lost {
                    return Err(Error::Closed {
                        reason: reason.clone(),
                    });
                }
                if inner.response.is_some() {
                    return Ok(None);
                }
                let granted = inner.send.take(wanted);
                if granted > 0 {
                    return Ok(Some(granted));
                }
            }
            credit.await;
        }
    }

    async fn wait_for<T>(
        &self,
        mut found: impl FnMut(&mut Inner) -> Option<T>,
    ) -> Result<T, Error> {
        loop {
            let arrived = self.state.arrived.notified();
            tokio::pin!(arrived);
            arrived.as_mut().enable();
            {
                let mut inner = self.state.inner.lock();
                if let Some(found) = found(&mut inner) {
                    return Ok(found);
                }
                if let Some(reason) = &inner.lost {
                    return Err(Error::Closed {
                        reason: reason.clone(),
                    });
                }
            }
            arrived.await;
        }
    }
}
