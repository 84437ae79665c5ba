//! One line for an error and its causes.

use std::error::Error;
use std::fmt::Write;

/// Joins the message of an error and of each `source()` below it with `": "`.
///
/// Errors in this workspace do not repeat their source in their own message, so the chain names each cause once.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        // Writing to a `String` does not fail.
        let _ = write!(text, ": {cause}");
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{name}")]
    struct Link {
        name: &'static str,
        source: Option<Box<Link>>,
    }

    #[test]
    fn every_cause_appears_once_in_order() {
        let inner = Link {
            name: "disk full",
            source: None,
        };
        assert_eq!(chain(&inner), "disk full");
        let outer = Link {
            name: "cannot write a",
            source: Some(Box::new(inner)),
        };
        assert_eq!(chain(&outer), "cannot write a: disk full");
    }
}
