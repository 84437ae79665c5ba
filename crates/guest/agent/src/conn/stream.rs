//! One request under way: its channels, its credit, what the host says about it.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use forkd_guest_proto::window::{Overrun, RecvWindow, SendWindow};
use forkd_guest_proto::{Control, Event, Kind, MAX_PAYLOAD, channel, frame};
use tokio::sync::Notify;

use super::outbox::{Closed, Outbox};

/// How many controls wait for a request that does not look at them.
const MAX_CONTROLS: usize = 64;

/// One request under way.
pub struct Stream {
    id: u32,
    outbox: Rc<Outbox>,
    send: [RefCell<SendWindow>; channel::COUNT],
    credit: Notify,
    input: RefCell<Input>,
    input_ready: Notify,
    controls: RefCell<VecDeque<Control>>,
    control_ready: Notify,
    end: Cell<Option<EarlyEnd>>,
    ended: Notify,
}

/// Why a request ends before it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EarlyEnd {
    /// The host asked for it.
    Cancelled,
    /// The connection is gone.
    Lost,
}

struct Input {
    waiting: VecDeque<Vec<u8>>,
    window: RecvWindow,
    ended: bool,
}

impl Stream {
    pub fn new(id: u32, outbox: Rc<Outbox>, peer_window: u32, own_window: u32) -> Self {
        Self {
            id,
            outbox,
            send: std::array::from_fn(|_| RefCell::new(SendWindow::new(peer_window))),
            credit: Notify::new(),
            input: RefCell::new(Input {
                waiting: VecDeque::new(),
                window: RecvWindow::new(own_window),
                ended: false,
            }),
            input_ready: Notify::new(),
            controls: RefCell::default(),
            control_ready: Notify::new(),
            end: Cell::new(None),
            ended: Notify::new(),
        }
    }

    /// Sends bulk bytes, waiting for credit as often as needed.
    pub async fn send_data(&self, channel: u8, mut bytes: &[u8]) -> Result<(), Closed> {
        while !bytes.is_empty() {
            let granted = self
                .reserve(channel, bytes.len().min(frame::DATA_CHUNK))
                .await?;
            let (now, rest) = bytes.split_at(granted);
            self.send_reserved(channel, now).await?;
            bytes = rest;
        }
        Ok(())
    }

    /// Waits for credit for one frame on a channel; grants between one and `wanted` bytes.
    pub async fn reserve(&self, channel: u8, wanted: usize) -> Result<usize, Closed> {
        self.wait_for_credit(channel, |window| {
            Some(window.take(wanted)).filter(|granted| *granted > 0)
        })
        .await
    }

    async fn wait_for_credit<T>(
        &self,
        channel: u8,
        mut take: impl FnMut(&mut SendWindow) -> Option<T>,
    ) -> Result<T, Closed> {
        let Some(window) = self.send.get(usize::from(channel)) else {
            return Err(Closed);
        };
        loop {
            if self.end.get() == Some(EarlyEnd::Lost) {
                return Err(Closed);
            }
            if let Some(taken) = take(&mut window.borrow_mut()) {
                return Ok(taken);
            }
            self.credit.notified().await;
        }
    }

    /// Sends bytes whose credit is reserved.
    pub async fn send_reserved(&self, channel: u8, bytes: &[u8]) -> Result<(), Closed> {
        self.outbox.send(self.id, Kind::Data, channel, bytes).await
    }

    /// Gives back the part of reserved credit that is not used: of `reserved` bytes, `used` are sent.
    pub fn unreserve(&self, channel: u8, reserved: usize, used: usize) {
        if let Some(window) = self.send.get(usize::from(channel)) {
            window.borrow_mut().give_back(reserved, used);
            self.credit.notify_waiters();
        }
    }

    /// Says that a channel has no more bytes.
    pub async fn send_end(&self, channel: u8) -> Result<(), Closed> {
        self.outbox.send(self.id, Kind::End, channel, &[]).await
    }

    /// Sends an event, as far as the credit for events goes.
    pub async fn send_event(&self, event: &Event) -> Result<(), Closed> {
        let Ok(payload) = serde_json::to_vec(event) else {
            return Ok(());
        };
        let length = payload.len().min(MAX_PAYLOAD);
        self.wait_for_credit(channel::EVENTS, |window| {
            window.take_whole(length).then_some(())
        })
        .await?;
        self.outbox.send(self.id, Kind::Event, 0, &payload).await
    }

    /// The next bytes from the host; `None` after the last.
    pub async fn receive(&self) -> Option<Vec<u8>> {
        loop {
            if let Some(bytes) = self.take_input() {
                return Some(bytes);
            }
            if self.input.borrow().ended || self.end.get().is_some() {
                return None;
            }
            self.input_ready.notified().await;
        }
    }

    /// The host has said that no more bytes come, as opposed to going away.
    pub fn input_is_complete(&self) -> bool {
        let input = self.input.borrow();
        input.ended && input.waiting.is_empty()
    }

    fn take_input(&self) -> Option<Vec<u8>> {
        let mut input = self.input.borrow_mut();
        let bytes = input.waiting.pop_front()?;
        if let Some(credit) = input.window.consume(bytes.len()) {
            self.outbox
                .send_now(self.id, Kind::Window, channel::IN, &credit.to_le_bytes());
        }
        Some(bytes)
    }

    /// The next thing the host says about the request.
    pub async fn next_control(&self) -> Control {
        loop {
            if let Some(control) = self.controls.borrow_mut().pop_front() {
                return control;
            }
            self.control_ready.notified().await;
        }
    }

    /// Waits until the request is to end early.
    pub async fn early_end(&self) -> EarlyEnd {
        loop {
            if let Some(end) = self.end.get() {
                return end;
            }
            self.ended.notified().await;
        }
    }

    /// Whether the request is to end early, and why.
    pub fn ends_early(&self) -> Option<EarlyEnd> {
        self.end.get()
    }

    // What the connection's reader calls.

    pub(super) fn push_input(&self, bytes: Vec<u8>) -> Result<(), Overrun> {
        let mut input = self.input.borrow_mut();
        if input.ended {
            return Ok(());
        }
        input.window.receive(bytes.len())?;
        input.waiting.push_back(bytes);
        self.input_ready.notify_one();
        Ok(())
    }

    pub(super) fn end_input(&self) {
        self.input.borrow_mut().ended = true;
        self.input_ready.notify_one();
    }

    pub(super) fn grant(&self, channel: u8, credit: u32) {
        if let Some(window) = self.send.get(usize::from(channel)) {
            window.borrow_mut().add(credit);
            self.credit.notify_waiters();
        }
    }

    pub(super) fn push_control(&self, control: Control) {
        if control == Control::Cancel {
            return self.end(EarlyEnd::Cancelled);
        }
        let mut controls = self.controls.borrow_mut();
        if controls.len() < MAX_CONTROLS {
            controls.push_back(control);
            self.control_ready.notify_one();
        }
    }

    pub(super) fn end(&self, end: EarlyEnd) {
        if self.end.get().is_none() || end == EarlyEnd::Lost {
            self.end.set(Some(end));
        }
        self.ended.notify_waiters();
        self.input_ready.notify_one();
        self.credit.notify_waiters();
    }
}
