//! Runs programs of the host: apt, mmdebstrap, dpkg-deb, e2fsck.
//!
//! A program gets SIGTERM when this process dies, so a killed build leaves no process. Errors contain the
//! last lines of the program's stderr.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, ExitStatus, Stdio};

use thiserror::Error;

/// Lines of stderr that an error contains.
const TAIL_LINES: usize = 12;

/// Upper bound on the output of a program whose output is parsed.
const MAX_OUTPUT: u64 = 64 << 20;

/// The program that binds the life of a child process to ours.
const WRAPPER: &str = "setpriv";
/// Its exit code if the program does not exist.
const NOT_FOUND: i32 = 127;

/// Why a program of the host failed.
#[derive(Debug, Error)]
pub enum ToolError {
    #[error("{program} is not installed")]
    Missing { program: String },
    /// It could not be started, or its output could not be read.
    #[error("{program} could not be run")]
    Run {
        program: String,
        #[source]
        source: std::io::Error,
    },
    #[error("{program} failed ({status}): {tail}")]
    Failed {
        program: String,
        status: ExitStatus,
        /// The last lines of stderr.
        tail: String,
    },
}

impl ToolError {
    /// The last lines of stderr, if the program ran.
    pub fn tail(&self) -> &str {
        match self {
            Self::Failed { tail, .. } => tail,
            Self::Missing { .. } | Self::Run { .. } => "",
        }
    }
}

/// Runs a program to its end and returns its stdout.
pub fn output(command: &mut Command) -> Result<String, ToolError> {
    output_with(command, &mut |_| {})
}

/// Like [`output`], and calls `line` for every line of stderr as it arrives.
pub fn output_with(command: &mut Command, line: &mut dyn FnMut(&str)) -> Result<String, ToolError> {
    let program = name_of(command);
    let run_error = |source: std::io::Error| match source.kind() {
        std::io::ErrorKind::NotFound => ToolError::Missing {
            program: program.clone(),
        },
        _ => ToolError::Run {
            program: program.clone(),
            source,
        },
    };
    let mut child = command
        .env("LC_ALL", "C.UTF-8")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(run_error)?;
    let stdout = child.stdout.take();
    let reader = std::thread::spawn(move || {
        let mut text = Vec::new();
        if let Some(stdout) = stdout {
            stdout.take(MAX_OUTPUT).read_to_end(&mut text)?;
        }
        Ok::<_, std::io::Error>(text)
    });
    let mut tail = VecDeque::new();
    if let Some(stderr) = child.stderr.take() {
        for piece in BufReader::new(stderr).split(b'\n') {
            let piece = piece.map_err(run_error)?;
            let text = String::from_utf8_lossy(&piece);
            let text = text.trim();
            if text.is_empty() {
                continue;
            }
            line(text);
            if tail.len() == TAIL_LINES {
                tail.pop_front();
            }
            tail.push_back(text.to_owned());
        }
    }
    let status = child.wait().map_err(run_error)?;
    let text = reader
        .join()
        .unwrap_or_else(|_| Err(std::io::Error::other("the reader of its output panicked")))
        .map_err(run_error)?;
    if status.code() == Some(NOT_FOUND) && tail.iter().any(|line| line.starts_with(WRAPPER)) {
        return Err(ToolError::Missing { program });
    }
    if !status.success() {
        return Err(ToolError::Failed {
            program,
            status,
            tail: Vec::from(tail).join("; "),
        });
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// A command that gets SIGTERM when this process dies, so that a killed build leaves no process.
pub fn bound_to_us(program: &str) -> Command {
    let mut command = Command::new(WRAPPER);
    command.args(["--pdeathsig", "TERM", "--", program]);
    command
}

/// The program behind the wrapper.
fn name_of(command: &Command) -> String {
    let program = command.get_program();
    let mut arguments = command.get_args();
    let wrapped = if program == WRAPPER {
        arguments.nth(3)
    } else {
        None
    };
    wrapped.unwrap_or(program).to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_is_named() {
        let error = output(&mut Command::new("no-such-program-here")).unwrap_err();
        assert!(
            matches!(error, ToolError::Missing { program } if program == "no-such-program-here")
        );
    }

    #[test]
    fn a_missing_program_is_named_behind_the_wrapper_too() {
        let error = output(&mut bound_to_us("no-such-program-here")).unwrap_err();
        assert!(
            matches!(&error, ToolError::Missing { program } if program == "no-such-program-here"),
            "{error:?}"
        );
        let error = output(bound_to_us("sh").args(["-c", "exit 127"])).unwrap_err();
        assert!(matches!(&error, ToolError::Failed { program, .. } if program == "sh"));
    }

    #[test]
    fn a_failure_carries_the_last_words() {
        let error =
            output(Command::new("sh").args(["-c", "echo out; echo why >&2; exit 3"])).unwrap_err();
        assert_eq!(error.tail(), "why");
        assert!(error.to_string().contains("exit status: 3"));
    }

    #[test]
    fn standard_error_arrives_line_by_line() {
        let mut lines = Vec::new();
        let text = output_with(
            Command::new("sh").args(["-c", "echo a >&2; echo answer; echo b >&2"]),
            &mut |line| lines.push(line.to_owned()),
        )
        .unwrap();
        assert_eq!(text, "answer\n");
        assert_eq!(lines, ["a", "b"]);
    }
}
