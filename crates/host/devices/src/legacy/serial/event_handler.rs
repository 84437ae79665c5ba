//! The port's part on the device thread.

use super::Serial;
use super::device::WAKE;
use crate::{EventTarget, Ready};

impl EventTarget for Serial {
    fn on_event(&self, token: u32, _ready: Ready) {
        if token == WAKE {
            self.wake.take();
        }
        self.drain();
    }
}
