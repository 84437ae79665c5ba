//! The serial port's registers as plain data.

use serde::{Deserialize, Serialize};
use vm_superio::SerialState;

/// The serial port, by version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SerialSnapshot {
    V1(SerialSnapshotV1),
}

/// Registers and input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SerialSnapshotV1 {
    /// Divisor latch, low and high.
    pub baud_divisor: [u8; 2],
    /// Interrupt enable register.
    pub interrupt_enable: u8,
    /// Interrupt identification register.
    pub interrupt_identification: u8,
    /// Line control register.
    pub line_control: u8,
    /// Line status register.
    pub line_status: u8,
    /// Modem control register.
    pub modem_control: u8,
    /// Modem status register.
    pub modem_status: u8,
    /// Scratch register of the guest.
    pub scratch: u8,
    /// Input the guest has not read.
    pub input: Vec<u8>,
}

impl From<SerialState> for SerialSnapshot {
    fn from(state: SerialState) -> Self {
        Self::V1(SerialSnapshotV1 {
            baud_divisor: [state.baud_divisor_low, state.baud_divisor_high],
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            input: state.in_buffer,
        })
    }
}

impl From<SerialSnapshot> for SerialState {
    fn from(state: SerialSnapshot) -> Self {
        let SerialSnapshot::V1(state) = state;
        Self {
            baud_divisor_low: state.baud_divisor[0],
            baud_divisor_high: state.baud_divisor[1],
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            in_buffer: state.input,
        }
    }
}
