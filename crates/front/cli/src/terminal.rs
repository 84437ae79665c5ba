//! The user's terminal, while a program somewhere else has it.

use std::io;

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
        // Nothing can be done about a terminal that is gone.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}

/// Rows and columns of the terminal that stdin is; those of a classic one when it is none.
pub fn size() -> (u16, u16) {
    match tcgetwinsize(io::stdin()) {
        Ok(size) if size.ws_row > 0 && size.ws_col > 0 => (size.ws_row, size.ws_col),
        _ => (24, 80),
    }
}

/// What kind of terminal it is.
pub fn kind() -> String {
    std::env::var("TERM").unwrap_or_else(|_| "xterm".to_owned())
}
