//! Progress of a build, one line per step.

use std::time::Instant;

/// Destination of progress lines.
pub struct Progress {
    sink: Box<dyn Fn(&str)>,
}

impl Progress {
    /// Lines on standard error.
    pub fn stderr() -> Self {
        Self::to(|line| eprintln!("{line}"))
    }

    /// Nowhere.
    pub fn silent() -> Self {
        Self::to(|_| {})
    }

    /// To a function.
    pub fn to(sink: impl Fn(&str) + 'static) -> Self {
        Self {
            sink: Box::new(sink),
        }
    }

    /// One line.
    pub fn note(&self, line: &str) {
        (self.sink)(line);
    }

    /// Says that a long step begins; [`Step::done`] says how long it took.
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

/// A step under way.
#[must_use = "a step says when it is done"]
#[derive(Debug)]
pub struct Step<'a> {
    progress: &'a Progress,
    what: String,
    start: Instant,
}

impl Step<'_> {
    /// A line about what happens inside the step.
    pub fn note(&self, line: &str) {
        self.progress.note(&format!("  {line}"));
    }

    /// Ends the step; `detail` says what came out, such as "41 packages".
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
