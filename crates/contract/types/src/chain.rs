//! One line for an error and its causes.

use std::error::Error;

/// Joins the message of an error and of each `source()` below it with `": "`.
///
/// Errors of this workspace do not repeat their source in their message, but some of other crates do. A cause that the
/// text ends with already is left out.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let message = cause.to_string();
        if !text.ends_with(&message) {
            text.push_str(": ");
            text.push_str(&message);
        }
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
        let repeating = Link {
            name: "failed: cannot write a",
            source: Some(Box::new(outer)),
        };
        assert_eq!(chain(&repeating), "failed: cannot write a: disk full");
    }
}
