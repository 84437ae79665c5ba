//! What became of each of several objects.

use forkd_api::ErrorCode;
use forkd_client::Error;
use serde::Serialize;

use crate::error::{CliResult, Exit};
use crate::ui::Ui;

/// What became of one.
#[derive(Debug, Serialize)]
pub struct Outcome {
    name: String,
    ok: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<ErrorCode>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<String>,
}

impl Outcome {
    /// Of the object of that name.
    pub fn new(name: String, result: Result<(), Error>) -> Self {
        let error = result.err();
        Self {
            name,
            ok: error.is_none(),
            code: error.as_ref().and_then(Error::code),
            hint: error.as_ref().and_then(|e| e.hint().map(str::to_owned)),
            error: error.map(|error| error.to_string()),
        }
    }
}

/// Prints a line for each, or a list. It is a failure if one is.
pub fn show(outcomes: &[Outcome], json: bool, ui: &Ui) -> CliResult {
    if json {
        ui.json(&outcomes)?;
    } else {
        for one in outcomes {
            match &one.error {
                None => ui.line(format_args!("✓ {}", one.name))?,
                Some(error) => ui.line(format_args!("✗ {} ({error})", one.name))?,
            }
            if let Some(hint) = &one.hint {
                ui.aside(hint);
            }
        }
    }
    Ok(if outcomes.iter().all(|one| one.ok) {
        Exit::OK
    } else {
        Exit::FAILURE
    })
}
