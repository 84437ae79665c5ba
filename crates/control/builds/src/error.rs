//! Why a build fails.

use forkd_api::{BuildEvent, ErrorBody, ErrorCode};
use forkd_dockerfile::{ParseError, Problem};
use forkd_sandboxes::error::Error;

/// Why a build failed, and where.
#[derive(Debug)]
pub struct BuildError {
    pub error: Box<Error>,
    /// Line in the Dockerfile.
    pub line: Option<u32>,
    /// The sandbox in which the step failed, if it was kept.
    pub sandbox: Option<String>,
    pub exit_code: Option<i32>,
}

impl From<Error> for BuildError {
    fn from(error: Error) -> Self {
        Self {
            error: Box::new(error),
            line: None,
            sandbox: None,
            exit_code: None,
        }
    }
}

impl From<ParseError> for BuildError {
    fn from(error: ParseError) -> Self {
        let code = match error.problem {
            Problem::Unsupported(_) => ErrorCode::UnsupportedInstruction,
            Problem::Invalid(_) | Problem::TooLarge { .. } | Problem::Expand(_) => {
                ErrorCode::DockerfileInvalid
            }
        };
        Self {
            line: Some(error.line),
            ..Error::refused(code, error.to_string()).into()
        }
    }
}

impl BuildError {
    /// A refusal of one line.
    pub(crate) fn at(line: u32, code: ErrorCode, message: impl std::fmt::Display) -> Self {
        Self {
            line: Some(line),
            ..Error::refused(code, format!("line {line}: {message}")).into()
        }
    }

    /// The same error, on a line unless it has one.
    pub(crate) fn on(mut self, line: u32) -> Self {
        self.line.get_or_insert(line);
        self
    }

    /// The last line of the answer.
    pub fn event(&self) -> BuildEvent {
        BuildEvent::Failed {
            error: ErrorBody {
                error: self.error.chain(),
                code: self.error.code(),
                hint: self.error.hint(),
                request_id: None,
            },
            line: self.line,
            sandbox: self.sandbox.clone(),
            exit_code: self.exit_code,
        }
    }
}
