//! The power button: a press ends the guest cleanly.

use std::os::fd::OwnedFd;
use std::rc::Rc;

use forkd_guest_proto::{ShutdownMode, ShutdownRequest};
use rustix::fs::{Mode, OFlags, open};

use crate::agent::{Agent, Role};
use crate::process::pump;
use crate::{shutdown, sys};

const FOLDER: &str = "/dev/input";
/// A time stamp of two words, a kind, a code and a value.
const EVENT_LEN: usize = 24;
const KIND_KEY: u16 = 1;
const CODE_POWER: u16 = 116;
const PRESSED: i32 = 1;

/// Listens to every input device there is; a guest without one has no button.
pub fn watch(agent: &Rc<Agent>) {
    if agent.role == Role::Process {
        return;
    }
    let Ok(entries) = std::fs::read_dir(FOLDER) else {
        return;
    };
    for entry in entries.flatten() {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        if let Ok(device) = open(entry.path(), flags, Mode::empty()) {
            let agent = Rc::clone(agent);
            tokio::task::spawn_local(listen(agent, device));
        }
    }
}

async fn listen(agent: Rc<Agent>, device: OwnedFd) {
    let Ok(device) = sys::watched(device) else {
        return;
    };
    while let Ok(bytes) = pump::read(&device, EVENT_LEN * 16).await {
        if bytes.is_empty() {
            return;
        }
        if bytes.chunks_exact(EVENT_LEN).any(is_power_press) {
            let mode = ShutdownMode::Poweroff;
            shutdown::run(
                &agent,
                ShutdownRequest {
                    mode,
                    grace_ms: None,
                },
            )
            .await;
        }
    }
}

fn is_power_press(event: &[u8]) -> bool {
    let number16 = |at: usize| {
        event
            .get(at..at + 2)
            .map(|b| u16::from_le_bytes([b[0], b[1]]))
    };
    let value = event
        .get(20..24)
        .map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    number16(16) == Some(KIND_KEY) && number16(18) == Some(CODE_POWER) && value == Some(PRESSED)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: u16, code: u16, value: i32) -> Vec<u8> {
        let mut bytes = vec![0; 16];
        bytes.extend(kind.to_le_bytes());
        bytes.extend(code.to_le_bytes());
        bytes.extend(value.to_le_bytes());
        bytes
    }

    #[test]
    fn only_the_press_of_the_power_key_counts() {
        assert!(is_power_press(&event(1, 116, 1)));
        assert!(!is_power_press(&event(1, 116, 0)), "letting go");
        assert!(!is_power_press(&event(1, 30, 1)), "another key");
        assert!(!is_power_press(&event(0, 0, 0)), "the end of a report");
        assert!(!is_power_press(&[]));
    }
}
