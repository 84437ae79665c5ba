//! Executions: variables, the code, and the lines that it causes.
//!
//! Python runs in IPython if the guest has it: `cells.py` becomes a module of the context at its first execution, and each
//! execution is one call of that module. Without IPython the interpreter of the agent runs the code itself.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use bytes::Bytes;
use forkd_agent_client::Eval;
use forkd_guest_proto as guest;
use forkd_sandboxes::agent_limits;
use forkd_sandboxes::error::Error;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::language::Language;
use super::lines::{Cell, line, results};
use super::printed::Printed;
use super::{Execution, Guest, START_SECS};

/// How long an execution may run: the SDKs end it earlier by closing the connection.
const MAX_SECS: u64 = 24 * 3600;
/// Silence after which a stream says that it lives.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// The module of a context that runs cells.
const CELLS: &str = include_str!("cells.py");

/// A text as a literal of Python and JavaScript.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// Code that makes `cells.py` a module of the context.
fn load_cells() -> String {
    let source = literal(CELLS);
    format!(
        "import sys as _forkd_sys, types as _forkd_types\n\
         _forkd_new = _forkd_types.ModuleType(\"_forkd_cells\")\n\
         exec(compile({source}, \"<cells>\", \"exec\"), _forkd_new.__dict__)\n\
         _forkd_sys.modules[\"_forkd_cells\"] = _forkd_new"
    )
}

/// Code before and after an execution that gives it variables of its own.
fn with_variables(
    language: Language,
    variables: &BTreeMap<String, String>,
) -> Option<(String, String)> {
    if variables.is_empty() {
        return None;
    }
    // A JSON object of texts is a literal of both languages.
    let json = serde_json::to_string(variables).ok()?;
    match language {
        Language::Python => Some((
            format!(
                "import os as _forkd_os\n_forkd_env = {json}\n_forkd_old = {{k: _forkd_os.environ.get(k) for k in _forkd_env}}\n_forkd_os.environ.update(_forkd_env)"
            ),
            "for _forkd_k, _forkd_v in _forkd_old.items():\n    _forkd_os.environ.pop(_forkd_k, None) if _forkd_v is None else _forkd_os.environ.__setitem__(_forkd_k, _forkd_v)".to_owned(),
        )),
        Language::Node | Language::TypeScript => Some((
            format!(
                "globalThis._forkdEnv = {json}; globalThis._forkdOld = {{}}; for (const k in _forkdEnv) {{ _forkdOld[k] = process.env[k]; process.env[k] = _forkdEnv[k] }}"
            ),
            "for (const k in _forkdOld) { if (_forkdOld[k] === undefined) delete process.env[k]; else process.env[k] = _forkdOld[k] }".to_owned(),
        )),
        Language::Bash | Language::R => None,
    }
}

/// The way to the client. An error breaks the response off, as a sandbox that was killed does.
pub type Lines = mpsc::Sender<Result<Bytes, io::Error>>;

pub async fn send(lines: &Lines, line: Bytes) -> bool {
    lines.send(Ok(line)).await.is_ok()
}

/// The end of an execution.
enum Ended {
    Result(Box<guest::EvalResult>),
    /// The client has gone away.
    Abandoned,
    Failed(forkd_agent_client::Error),
}

fn broken(error: forkd_agent_client::Error) -> Value {
    let error = Error::agent("the execution did not come to its end")(error);
    json!({"type": "error", "name": "ExecutionError", "value": error.chain(), "traceback": ""})
}

impl Guest {
    /// Runs code and sends its lines to the end.
    pub async fn execute(
        &self,
        name: String,
        language: Language,
        execution: Execution,
        lines: Lines,
    ) {
        let mut variables = self.sandbox.record().env.clone();
        variables.extend(execution.env_vars.unwrap_or_default());
        let code = execution.code;
        let ended = match language {
            Language::Bash | Language::R => {
                self.run_script(language, code, &variables, &lines).await
            }
            Language::Python if !self.is_plain(&name) => {
                self.run_cell(&name, &code, &variables, &lines).await
            }
            _ => self.run(&name, language, &code, &variables, &lines).await,
        };
        match ended {
            // The SDKs tell a sandbox that was killed from an error of the code by a stream without an end.
            Err(error) if !self.sandbox.phase().answers() => {
                let _ = lines.send(Err(io::Error::other(error))).await;
                return;
            }
            Err(error) => drop(send(&lines, line(&broken(error))).await),
            Ok(()) => {}
        }
        send(&lines, line(&json!({"type": "end_of_execution"}))).await;
    }

    /// The context has no IPython.
    fn is_plain(&self, name: &str) -> bool {
        let state = self.e2b.of(&self.sandbox.id);
        state.contexts.plain.lock().contains(name)
    }

    /// Runs a cell in IPython. A context that has not got the module yet gets it, or is run plainly from now on.
    async fn run_cell(
        &self,
        name: &str,
        code: &str,
        variables: &BTreeMap<String, String>,
        lines: &Lines,
    ) -> Result<(), forkd_agent_client::Error> {
        let json = serde_json::to_string(variables).unwrap_or_else(|_| "{}".to_owned());
        let call = format!(
            "__import__(\"_forkd_cells\").run({}, {json})",
            literal(code)
        );
        for first in [true, false] {
            let mode = guest::EvalMode::Eval;
            let result = match self.evaluate(name, mode, call.clone(), lines).await {
                Ended::Result(result) => result,
                Ended::Abandoned => return Ok(()),
                Ended::Failed(error) => return Err(error),
            };
            let missing = |error: &guest::EvalError| {
                error.name == "ModuleNotFoundError" && error.message.contains("_forkd_cells")
            };
            if first && result.error.as_ref().is_some_and(missing) {
                if !self.load_cells(name).await? {
                    break;
                }
                continue;
            }
            let cell = result.json.as_ref().and_then(|json| json.parse().ok());
            let sent = match cell {
                Some(cell) => Cell::into_lines(cell),
                None => results(&result).iter().map(line).collect(),
            };
            for line in sent {
                if !send(lines, line).await {
                    break;
                }
            }
            return Ok(());
        }
        self.run(name, Language::Python, code, variables, lines)
            .await
    }

    /// Loads the module that runs cells; false if the guest has no IPython.
    async fn load_cells(&self, name: &str) -> Result<bool, forkd_agent_client::Error> {
        let loaded = self
            .client
            .by(agent_limits::command(START_SECS))
            .eval(own_code(name, load_cells(), START_SECS))
            .await?;
        let Some(error) = loaded.result.error else {
            return Ok(true);
        };
        tracing::debug!(sandbox = %self.sandbox.id, error.message, "no IPython in the context");
        let state = self.e2b.of(&self.sandbox.id);
        state.contexts.plain.lock().insert(name.to_owned());
        Ok(false)
    }

    /// Runs a part of the plane's own code, without output.
    async fn run_quietly(&self, name: &str, code: String) {
        let calls = self.client.by(agent_limits::command(10));
        if let Err(error) = calls.eval(own_code(name, code, 10)).await {
            tracing::debug!(sandbox = %self.sandbox.id, %error, "variables of an execution");
        }
    }

    /// Runs code in the interpreter of the agent.
    async fn run(
        &self,
        name: &str,
        language: Language,
        code: &str,
        variables: &BTreeMap<String, String>,
        lines: &Lines,
    ) -> Result<(), forkd_agent_client::Error> {
        let around = with_variables(language, variables);
        if let Some((set, _)) = &around {
            self.run_quietly(name, set.clone()).await;
        }
        let mode = guest::EvalMode::default();
        let ended = self.evaluate(name, mode, code.to_owned(), lines).await;
        if let Some((_, reset)) = around {
            self.run_quietly(name, reset).await;
        }
        match ended {
            Ended::Result(result) => {
                let count =
                    json!({"type": "number_of_executions", "execution_count": result.count});
                for value in std::iter::once(count).chain(results(&result)) {
                    if !send(lines, line(&value)).await {
                        break;
                    }
                }
                Ok(())
            }
            Ended::Abandoned => Ok(()),
            Ended::Failed(error) => Err(error),
        }
    }

    /// Evaluates code and sends what it prints. Code whose client goes away is interrupted.
    async fn evaluate(
        &self,
        name: &str,
        mode: guest::EvalMode,
        code: String,
        lines: &Lines,
    ) -> Ended {
        let request = guest::EvalRequest {
            interp: Some(name.to_owned()),
            mode,
            code,
            timeout_ms: Some(MAX_SECS * 1000),
            ..guest::EvalRequest::default()
        };
        let calls = self.client.by(agent_limits::command(MAX_SECS));
        let ended = match calls.eval_stream(request).await {
            Ok(eval) => forward(eval, lines).await,
            Err(error) => Ended::Failed(error),
        };
        if let Ended::Abandoned = ended {
            let calls = self.client.by(agent_limits::answer());
            let _ = calls.interp_interrupt(name).await;
        }
        ended
    }
}

/// A request to run the plane's own code.
fn own_code(name: &str, code: String, seconds: u64) -> guest::EvalRequest {
    guest::EvalRequest {
        interp: Some(name.to_owned()),
        mode: guest::EvalMode::Exec,
        code,
        timeout_ms: Some(seconds * 1000),
        ..guest::EvalRequest::default()
    }
}

/// Sends the output of an execution to its end.
async fn forward(mut eval: Eval, lines: &Lines) -> Ended {
    let mut texts = Printed::default();
    loop {
        let silent = Instant::now() + KEEPALIVE;
        let output = tokio::select! {
            output = eval.next_output() => output,
            () = sleep_until(silent) => {
                if !send(lines, line(&json!({"type": "keepalive"}))).await {
                    return Ended::Abandoned;
                }
                continue;
            }
            () = texts.patience() => {
                if let Some(value) = texts.rest()
                    && !send(lines, line(&value)).await
                {
                    return Ended::Abandoned;
                }
                continue;
            }
            () = lines.closed() => return Ended::Abandoned,
        };
        match output {
            Ok(None) => break,
            Err(error) => return Ended::Failed(error),
            Ok(Some(output)) => {
                if let Some(value) = texts.of(output)
                    && !send(lines, line(&value)).await
                {
                    return Ended::Abandoned;
                }
            }
        }
    }
    if let Some(value) = texts.rest()
        && !send(lines, line(&value)).await
    {
        return Ended::Abandoned;
    }
    match eval.wait().await {
        Ok(result) => Ended::Result(Box::new(result)),
        Err(error) => Ended::Failed(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_a_literal_in_the_calls() {
        assert_eq!(literal("a\n\"b\""), r#""a\n\"b\"""#);
        assert!(load_cells().contains("_forkd_cells"));
        let (set, _) = with_variables(Language::Node, &[("A".into(), "1".into())].into()).unwrap();
        assert!(set.contains(r#"{"A":"1"}"#));
    }
}
