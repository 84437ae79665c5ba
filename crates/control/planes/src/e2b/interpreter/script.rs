//! Languages without a resident interpreter: each execution is a process of its own.
//!
//! Bash has no value. A driver evaluates R: it prints as R does at its prompt, and leaves the value of the last
//! expression, or the error, in a file that this module reads and removes.

use std::collections::BTreeMap;

use forkd_guest_proto as guest;
use forkd_sandboxes::agent_limits;
use serde_json::{Value, json};

use super::Guest;
use super::language::Language;
use super::lines::line;
use super::printed::Printed;
use super::run::{Lines, send};
use crate::guest::exec::environment;

/// Evaluates the code of an R execution. Its arguments are this text, the code, and the path of the result.
const R_DRIVER: &str = include_str!("driver.R");
/// Bytes of a value or an error that are shown.
const MAX_RESULT: usize = 4 << 20;

/// The command of an execution, and the path of its result.
fn command(language: Language, code: String) -> (Vec<String>, Option<String>) {
    if language == Language::Bash {
        return (vec!["/bin/bash".into(), "-c".into(), code], None);
    }
    let path = format!("/tmp/.forkd-{:032x}", rand::random::<u128>());
    let start = "eval(parse(text = commandArgs(TRUE)[1]))";
    let words = ["Rscript", "--vanilla", "-e", start, R_DRIVER, &code, &path];
    (words.map(ToOwned::to_owned).into(), Some(path))
}

/// The line of a result that the driver has left: a letter for its kind, then its text.
fn shown(result: &[u8]) -> Option<Value> {
    let text = String::from_utf8_lossy(result);
    let text = text.trim_end_matches('\n');
    if let Some(value) = text.strip_prefix('V') {
        return Some(json!({"type": "result", "text": value, "is_main_result": true, "extra": {}}));
    }
    let message = text.strip_prefix('E')?;
    Some(json!({"type": "error", "name": "Error", "value": message, "traceback": message}))
}

fn exit_code(code: i32) -> Value {
    json!({"type": "error", "name": "ExitCode", "value": code.to_string(), "traceback": ""})
}

impl Guest {
    /// Runs code as a script in a process of its own.
    pub async fn run_script(
        &self,
        language: Language,
        code: String,
        variables: &BTreeMap<String, String>,
        lines: &Lines,
    ) -> Result<(), forkd_agent_client::Error> {
        let state = self.e2b.of(&self.sandbox.id);
        let user = state.users.find(&self.client, None).await.ok();
        let (argv, result) = command(language, code);
        let wish = guest::ExecRequest {
            argv,
            env: environment(&BTreeMap::new(), variables),
            cwd: user.as_ref().map(|user| user.home.clone()),
            user: user.map(|user| user.name),
            on_disconnect: guest::OnDisconnect::Kill,
            ..guest::ExecRequest::default()
        };
        let count = json!({"type": "number_of_executions", "execution_count": 1});
        send(lines, line(&count)).await;
        let mut exec = self.client.by(agent_limits::start()).exec(wish).await?;
        let mut texts = Printed::default();
        loop {
            let value = tokio::select! {
                output = exec.next_output() => match output? {
                    Some(output) => texts.of(output),
                    None => break,
                },
                () = texts.patience() => texts.rest(),
                () = lines.closed() => return Ok(()),
            };
            if let Some(value) = value
                && !send(lines, line(&value)).await
            {
                return Ok(());
            }
        }
        if let Some(value) = texts.rest() {
            send(lines, line(&value)).await;
        }
        let ended = exec.wait().await?;
        let found = match result {
            Some(path) => self.take_result(&path).await,
            None => None,
        };
        let failed = !ended.status.success();
        let value = found.or_else(|| failed.then(|| exit_code(ended.status.shell_code())));
        if let Some(value) = value {
            send(lines, line(&value)).await;
        }
        Ok(())
    }

    /// Reads and removes the file of a result. A program that was killed has left none.
    async fn take_result(&self, path: &str) -> Option<Value> {
        let calls = self.client.by(agent_limits::answer());
        let result = calls.read_file(path, MAX_RESULT).await.ok()?;
        let remove = guest::RemoveRequest {
            path: path.to_owned(),
            ..guest::RemoveRequest::default()
        };
        let _ = calls.remove(remove).await;
        shown(&result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_a_value_or_an_error() {
        assert_eq!(shown(b"V[1] 3\n").unwrap()["text"], "[1] 3");
        assert_eq!(shown(b"Eobject 'x' not found").unwrap()["type"], "error");
        assert_eq!(shown(b""), None);
    }

    #[test]
    fn code_is_an_argument_of_its_own() {
        let (argv, path) = command(Language::R, "-e '1'".into());
        assert_eq!(argv[5..], ["-e '1'".to_owned(), path.unwrap()]);
        let (argv, path) = command(Language::Bash, "pwd".into());
        assert_eq!((argv.last().unwrap().as_str(), path), ("pwd", None));
    }
}
