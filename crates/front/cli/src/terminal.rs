//! The user's terminal while a program in a sandbox or in the machine uses it.

use std::io;

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// Raw mode of the terminal on standard input, until dropped: every key reaches the program.
pub struct RawMode {
    before: Termios,
}

impl RawMode {
    /// Switches the terminal to raw mode.
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
        // The terminal may be gone: nothing to restore then.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}

/// Rows and columns of the terminal on standard input; 24 and 80 without a terminal.
pub fn size() -> (u16, u16) {
    match tcgetwinsize(io::stdin()) {
        Ok(size) if size.ws_row > 0 && size.ws_col > 0 => (size.ws_row, size.ws_col),
        _ => (24, 80),
    }
}

/// The value of `TERM`, or `xterm`.
pub fn kind() -> String {
    std::env::var("TERM").unwrap_or_else(|_| "xterm".to_owned())
}
