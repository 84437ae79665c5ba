//! How a command fails: a chain of causes, an optional hint, an exit code.

use std::io;
use std::process::ExitCode;

use forkd_api::{ErrorBody, ErrorCode};
use serde::Serialize;

use crate::ui::Ui;

/// The exit code of a command. 2 is wrong usage (clap's own); commands that run a program somewhere else pass that
/// program's code on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit(pub u8);

impl Exit {
    /// Everything was done.
    pub const OK: Self = Self(0);
    /// Something was not done.
    pub const FAILURE: Self = Self(1);
    /// Where the code is that of a program: it was not the program that failed.
    pub const OURS: Self = Self(125);
    /// What a shell says of SIGINT.
    pub const INTERRUPTED: Self = Self(130);
    /// What a shell says of SIGTERM.
    pub const TERMINATED: Self = Self(143);
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
    exit: Exit,
}

/// What every command returns.
pub type CliResult = Result<Exit, CliError>;

/// A failure for programs.
#[derive(Debug, Serialize)]
struct Failure<'a> {
    error: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    causes: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<ErrorCode>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<&'a str>,
}

/// What finds an answer of the daemon again: in its documentation and in its log.
pub fn origin(body: &ErrorBody) -> String {
    match &body.request_id {
        Some(id) => format!("{}, request {id}", body.code.as_str()),
        None => body.code.as_str().to_owned(),
    }
}

impl CliError {
    /// An error and what the user can do about it.
    pub fn new(error: anyhow::Error, hint: Option<String>) -> Self {
        Self {
            error,
            hint,
            exit: Exit::FAILURE,
        }
    }

    /// Adds what the user can do about it.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Sets the exit code.
    #[must_use]
    pub fn with_exit(mut self, exit: Exit) -> Self {
        self.exit = exit;
        self
    }

    /// What the user can do about it.
    pub fn hint(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    /// The error with its causes, on one line.
    pub fn text(&self) -> String {
        format!("{:#}", self.error)
    }

    /// Prints the chain and the hint and gives the exit code.
    ///
    /// A reader that closed our stdout early (`| head`) has what it wanted: that is success.
    pub fn report(&self, ui: &Ui) -> Exit {
        if self.is_broken_pipe() {
            return Exit::OK;
        }
        if ui.wants_json() {
            // The exit code says the same to whoever has closed stdout.
            let _ = ui.json(&self.as_data());
        } else {
            let origin = self.body().map(origin);
            ui.error(self.error.chain(), origin.as_deref(), self.hint());
        }
        self.exit
    }

    fn as_data(&self) -> Failure<'_> {
        let body = self.body();
        Failure {
            error: self.error.to_string(),
            causes: self
                .error
                .chain()
                .skip(1)
                .map(ToString::to_string)
                .collect(),
            code: body.map(|body| body.code),
            hint: self.hint(),
            request_id: body.and_then(|body| body.request_id.as_deref()),
        }
    }

    fn body(&self) -> Option<&ErrorBody> {
        self.error
            .downcast_ref::<forkd_rest_client::Error>()
            .and_then(forkd_rest_client::Error::body)
    }

    fn is_broken_pipe(&self) -> bool {
        self.error
            .downcast_ref::<io::Error>()
            .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
    }
}

impl From<anyhow::Error> for CliError {
    fn from(error: anyhow::Error) -> Self {
        Self::new(error, None)
    }
}

impl From<io::Error> for CliError {
    fn from(error: io::Error) -> Self {
        anyhow::Error::from(error).into()
    }
}
