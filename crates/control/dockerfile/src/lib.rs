//! Parses Dockerfiles and `.dockerignore` files. Both come from strangers.
//!
//! ```text
//!   text ──lines──► logical lines with here-documents ──instruction──► Instruction ──stages──► Dockerfile
//!                                                            expand(variables) ──► the instruction to carry out
//! ```
//!
//! [`parse`] knows every instruction. An instruction or option that forkd does not carry out is refused here with its line
//! number, so a build never fails halfway for it. Nothing is expanded while parsing: the value of a variable is known
//! only when the instructions above have been carried out ([`Instruction::expanded`]).
//!
//! Every input is bounded ([`limits`]): bytes, lines, instructions, nesting of expansions and their results. Patterns are
//! matched in time proportional to the product of both lengths.

mod copy;
mod expand;
mod flags;
mod ignore;
mod instruction;
pub mod limits;
mod lines;
mod pattern;
mod run;
mod stages;
mod words;

pub use copy::{Copy, CopySource};
pub use expand::{ExpandError, Variables, expand};
pub use ignore::Ignore;
pub use instruction::{Command, Healthcheck, Instruction, Kind};
pub use pattern::Pattern;
pub use run::{Mount, MountKind, RunNetwork, RunStep};
pub use stages::{Dockerfile, Stage, parse};

use thiserror::Error;

/// Why a Dockerfile is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("line {line}: {problem}")]
pub struct ParseError {
    /// The first line of the instruction, from 1.
    pub line: u32,
    pub problem: Problem,
}

/// The reason of a refusal.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Problem {
    /// The text is not a Dockerfile.
    #[error("{0}")]
    Invalid(String),
    /// The text is a Dockerfile, and forkd does not carry this part out.
    #[error("{0}")]
    Unsupported(String),
    #[error("{what} exceeds the limit of {limit}")]
    TooLarge { what: &'static str, limit: usize },
    #[error(transparent)]
    Expand(#[from] ExpandError),
}

impl Problem {
    pub(crate) fn at(self, line: u32) -> ParseError {
        ParseError {
            line,
            problem: self,
        }
    }

    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self::Invalid(text.into())
    }

    pub(crate) fn unsupported(text: impl Into<String>) -> Self {
        Self::Unsupported(text.into())
    }
}

/// The first characters of a text, for messages.
pub(crate) fn shortened(text: &str) -> String {
    const SHOWN: usize = 60;
    let mut shown: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(SHOWN)
        .collect();
    if text.chars().nth(SHOWN).is_some() {
        shown.push('…');
    }
    shown
}
