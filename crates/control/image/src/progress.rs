//! Progress lines of a build.
//!
//! [`Progress`] sends lines to stderr, to a function, or nowhere. A [`Step`] reports its duration when it
//! ends.

use std::time::Instant;

/// The receiver of progress lines.
pub struct Progress {
    sink: Box<dyn Fn(&str)>,
}

impl Progress {
    /// Sends lines to stderr.
    pub fn stderr() -> Self {
        Self::to(|line| eprintln!("{line}"))
    }

    /// Drops all lines.
    pub fn silent() -> Self {
        Self::to(|_| {})
    }

    /// Calls a function for each line.
    pub fn to(sink: impl Fn(&str) + 'static) -> Self {
        Self {
            sink: Box::new(sink),
        }
    }

    /// Sends one line.
    pub fn note(&self, line: &str) {
        (self.sink)(line);
    }

    /// Announces a long step. [`Step::done`] reports its duration.
    pub fn step(&self, what: &str) -> Step<'_> {
        self.note(&format!("{what} …"));
        Step {
            progress: self,
            what: what.to_owned(),
            start: Instant::now(),
        }
    }
}

impl std::fmt::Debug for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Progress")
    }
}

/// A running step.
#[must_use = "a step says when it is done"]
#[derive(Debug)]
pub struct Step<'a> {
    progress: &'a Progress,
    what: String,
    start: Instant,
}

impl Step<'_> {
    /// Sends a line about the step.
    pub fn note(&self, line: &str) {
        self.progress.note(&format!("  {line}"));
    }

    /// Ends the step. `detail` describes the result, for example "41 packages".
    pub fn done(self, detail: &str) {
        let seconds = self.start.elapsed().as_secs_f64();
        let detail = if detail.is_empty() {
            String::new()
        } else {
            format!(" ({detail})")
        };
        self.progress
            .note(&format!("{}{detail} … {seconds:.1} s", self.what));
    }
}
