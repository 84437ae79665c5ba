//! Results of a command on several objects, one each.

use forkd_api::{ErrorBody, ErrorCode};
use forkd_rest_client::Error;
use serde::Serialize;

use crate::error::{CliResult, Exit, origin};
use crate::ui::Ui;

/// The result for one object.
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
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<String>,
    #[serde(skip)]
    origin: Option<String>,
}

impl Outcome {
    /// The result for the object of that name.
    pub fn new(name: String, result: Result<(), Error>) -> Self {
        let error = result.err();
        let body: Option<&ErrorBody> = error.as_ref().and_then(Error::body);
        Self {
            name,
            ok: error.is_none(),
            code: body.map(|body| body.code),
            hint: body.and_then(|body| body.hint.clone()),
            request_id: body.and_then(|body| body.request_id.clone()),
            origin: body.map(origin),
            error: error.map(|error| error.to_string()),
        }
    }

    fn line(&self) -> String {
        let name = &self.name;
        match (&self.error, &self.origin) {
            (None, _) => format!("✓ {name}"),
            (Some(error), None) => format!("✗ {name} ({error})"),
            (Some(error), Some(origin)) => format!("✗ {name} ({error}; {origin})"),
        }
    }
}

/// Prints one line per object, or a JSON list. Fails if the command failed for one of them.
pub fn show(outcomes: &[Outcome], json: bool, ui: &Ui) -> CliResult {
    if json {
        ui.json(&outcomes)?;
    } else {
        for one in outcomes {
            ui.line(one.line())?;
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
