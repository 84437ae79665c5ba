//! A tool call that fails: a code for programs, a sentence and a hint for the model.

use forkd_api::ErrorCode;
use serde::Serialize;

/// Why a tool call failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Refusal {
    /// A sentence for the model.
    pub error: String,
    /// The error code of the REST API, for programs.
    pub code: &'static str,
    /// A remedy that the model can try.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

impl Refusal {
    /// A refusal with a code of the REST API.
    pub fn new(code: ErrorCode, error: impl Into<String>) -> Self {
        Self {
            error: error.into(),
            code: code.as_str(),
            hint: None,
        }
    }

    /// A refusal of the arguments.
    pub fn invalid(error: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidRequest, error)
    }

    /// Sets the hint for the model.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl From<forkd_rest_client::Error> for Refusal {
    fn from(error: forkd_rest_client::Error) -> Self {
        let mut text = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(cause) = source {
            text.push_str(&format!(": {cause}"));
            source = cause.source();
        }
        match error.body() {
            Some(body) => Self {
                error: text,
                code: body.code.as_str(),
                hint: body.hint.clone(),
            },
            None => Self {
                error: text,
                code: "daemon_unreachable",
                hint: Some("start the daemon, or check FORKD_URL and FORKD_TOKEN".to_owned()),
            },
        }
    }
}
