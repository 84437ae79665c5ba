//! Failures of commands: a chain of causes, an optional hint, an exit code.

use std::io;
use std::process::ExitCode;

use forkd_api::{ErrorBody, ErrorCode};
use serde::Serialize;

use crate::ui::Ui;

/// The exit code of a command. clap exits with 2 on invalid usage. Commands that run a program in a sandbox or in the
/// machine exit with the code of that program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit(pub u8);

impl Exit {
    pub const OK: Self = Self(0);
    pub const FAILURE: Self = Self(1);
    /// forkd failed, in a command whose exit code is otherwise that of a program.
    pub const OURS: Self = Self(125);
    /// 128 plus SIGINT, as shells report it.
    pub const INTERRUPTED: Self = Self(130);
    /// 128 plus SIGTERM, as shells report it.
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

/// The result of every command.
pub type CliResult = Result<Exit, CliError>;

/// A failure as `--json` prints it.
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

/// Error code and request ID of a refusal: the keys to the API documentation and to the daemon's log.
pub fn origin(body: &ErrorBody) -> String {
    match &body.request_id {
        Some(id) => format!("{}, request {id}", body.code.as_str()),
        None => body.code.as_str().to_owned(),
    }
}

impl CliError {
    /// An error with an optional hint, and exit code 1.
    pub fn new(error: anyhow::Error, hint: Option<String>) -> Self {
        Self {
            error,
            hint,
            exit: Exit::FAILURE,
        }
    }

    /// Sets the hint: what the user can do about the error.
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

    /// The remedy, if one is known.
    pub fn hint(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    /// The error with its causes, on one line.
    pub fn text(&self) -> String {
        format!("{:#}", self.error)
    }

    /// Prints the chain of causes and the hint, and returns the exit code.
    ///
    /// A closed stdout (`| head`) is not a failure: the reader had enough.
    pub fn report(&self, ui: &Ui) -> Exit {
        if self.is_broken_pipe() {
            return Exit::OK;
        }
        if ui.wants_json() {
            // If stdout is closed, the exit code still reports the failure.
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
