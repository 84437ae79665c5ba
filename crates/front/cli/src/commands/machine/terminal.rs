//! The user's terminal, while a program in the machine has it.

use std::io;

use forkd_machine::PtySize;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// Every key goes through as it is, until dropped.
pub struct RawMode {
    before: Termios,
}

impl RawMode {
    /// Takes the terminal that stdin is.
    pub fn enter() -> io::Result<Self> {
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        Ok(Self { before })
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}

/// The size of the terminal that stdin is; a classic one when it is none.
pub fn size() -> PtySize {
    match tcgetwinsize(io::stdin()) {
        Ok(size) if size.ws_row > 0 && size.ws_col > 0 => PtySize {
            rows: size.ws_row,
            cols: size.ws_col,
        },
        _ => PtySize { rows: 24, cols: 80 },
    }
}
