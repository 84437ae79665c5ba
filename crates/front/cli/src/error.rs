//! How a command fails: a chain of causes, an optional hint, an exit code.

use std::io;
use std::process::ExitCode;

use crate::ui::Ui;

/// The exit code of a command. 0 is success, 1 a failure, 2 wrong usage (clap's own); commands
/// that run a program in a guest pass that program's code on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit(pub u8);

impl Exit {
    /// Everything was done.
    pub const OK: Self = Self(0);
    /// Something was not done.
    pub const FAILURE: Self = Self(1);
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.0)
    }
}

/// A failed command.
#[derive(Debug)]
pub struct CliError {
    error: anyhow::Error,
    hint: Option<String>,
}

/// What every command returns.
pub type CliResult = Result<Exit, CliError>;

impl CliError {
    /// An error and what the user can do about it.
    pub fn new(error: anyhow::Error, hint: Option<String>) -> Self {
        Self { error, hint }
    }

    /// Adds what the user can do about it.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Prints the chain and the hint to stderr and gives the exit code.
    ///
    /// A reader that closed our stdout early (`| head`) has what it wanted: that is success.
    pub fn report(&self, ui: &Ui) -> Exit {
        if self.is_broken_pipe() {
            return Exit::OK;
        }
        ui.error(self.error.chain(), self.hint.as_deref());
        Exit::FAILURE
    }

    fn is_broken_pipe(&self) -> bool {
        self.error
            .downcast_ref::<io::Error>()
            .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
    }
}

impl From<anyhow::Error> for CliError {
    fn from(error: anyhow::Error) -> Self {
        Self { error, hint: None }
    }
}

impl From<io::Error> for CliError {
    fn from(error: io::Error) -> Self {
        anyhow::Error::from(error).into()
    }
}
