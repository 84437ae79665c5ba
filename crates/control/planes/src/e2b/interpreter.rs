//! The code interpreter, on port 49999: contexts and streamed execution.
//!
//! A context is an interpreter of the agent. Each language has a default context, which starts at its first use; the one
//! of Python is the interpreter that the image has warmed up. An execution answers with one JSON object a line, all ASCII,
//! because the SDKs split and decode lines in ways that other characters break.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequest, Path, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use axum::{Json, Router};
use bytes::Bytes;
use forkd_agent_client::{Client, Eval, Output};
use forkd_guest_proto as guest;
use forkd_sandboxes::agent_limits;
use forkd_sandboxes::error::Error;
use forkd_sandboxes::sandbox::SandboxHandle;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::control::Sent;
use super::error::{Answer, Refusal};
use super::no_route;
use super::state::E2b;
use super::target::Reached;
use super::text;
use crate::guest::exec::environment;

/// How long an interpreter may take to start.
const START_SECS: u64 = 120;
/// How long an execution may run: the SDKs end it earlier by closing the connection.
const MAX_SECS: u64 = 24 * 3600;
/// Silence after which a stream says that it lives.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// Lines that may wait for a slow client.
const WAITING: usize = 64;
/// Contexts of one sandbox.
const MAX_CONTEXTS: usize = 64;

/// The routes of the interpreter.
pub fn router() -> Router<Arc<E2b>> {
    Router::new()
        .route("/health", get(health))
        .route("/execute", post(execute))
        .route("/contexts", get(list).post(create))
        .route("/contexts/{id}", delete(remove))
        .route("/contexts/{id}/restart", post(restart))
        .method_not_allowed_fallback(no_route)
        .fallback(no_route)
}

async fn health(_reached: Reached) -> &'static str {
    "OK"
}

/// A language that the agent has an interpreter for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Language {
    Python,
    Node,
    /// A shell for each execution.
    Bash,
}

impl Language {
    fn parse(text: &str) -> Answer<Self> {
        match text.to_ascii_lowercase().as_str() {
            "python" | "python3" => Ok(Self::Python),
            "javascript" | "js" | "node" => Ok(Self::Node),
            "bash" | "sh" => Ok(Self::Bash),
            _ => {
                let shown: String = text.chars().take(40).collect();
                Err(Refusal::bad(format!(
                    "{shown:?} is not a language of this sandbox: python, javascript or bash"
                )))
            }
        }
    }

    /// The name that the SDKs use.
    fn name(self) -> &'static str {
        match self {
            Self::Python => "python",
            Self::Node => "javascript",
            Self::Bash => "bash",
        }
    }

    /// The name that the agent uses.
    fn of_agent(self) -> &'static str {
        match self {
            Self::Python => "python",
            Self::Node => "node",
            Self::Bash => "bash",
        }
    }

    fn from_agent(name: &str) -> Option<Self> {
        match name {
            "python" => Some(Self::Python),
            "node" => Some(Self::Node),
            _ => None,
        }
    }
}

/// A context as the API shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Context {
    id: String,
    language: &'static str,
    cwd: String,
}

/// The contexts that were made through this plane, with their directories. The agent is the authority on which exist.
#[derive(Debug, Default)]
pub struct Contexts(parking_lot::Mutex<BTreeMap<String, String>>);

impl Contexts {
    fn map(&self) -> parking_lot::MutexGuard<'_, BTreeMap<String, String>> {
        self.0.lock()
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct NewContext {
    language: Option<String>,
    cwd: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Execution {
    code: String,
    context_id: Option<String>,
    language: Option<String>,
    env_vars: Option<BTreeMap<String, String>>,
}

/// A guest and the user of its interpreters.
struct Guest {
    e2b: Arc<E2b>,
    sandbox: Arc<SandboxHandle>,
    client: Client,
}

fn not_found(id: &str) -> Refusal {
    let id: String = id.chars().take(80).collect();
    Refusal::new(StatusCode::NOT_FOUND, format!("Context {id} not found"))
}

impl Guest {
    async fn of(e2b: Arc<E2b>, reached: Reached) -> Answer<Self> {
        let client = reached.sandbox.agent().await?;
        Ok(Self {
            e2b,
            sandbox: reached.sandbox,
            client,
        })
    }

    /// The interpreters of the agent.
    async fn known(&self) -> Answer<Vec<guest::InterpInfo>> {
        Ok(self
            .client
            .by(agent_limits::answer())
            .interp_list()
            .await
            .map_err(Error::agent("the interpreters cannot be listed"))?)
    }

    async fn find(&self, id: &str) -> Answer<guest::InterpInfo> {
        let known = self.known().await?;
        known
            .into_iter()
            .find(|found| found.name == id)
            .ok_or_else(|| not_found(id))
    }

    fn shown(&self, info: &guest::InterpInfo) -> Option<Context> {
        let language = Language::from_agent(&info.language)?;
        let state = self.e2b.of(&self.sandbox.id);
        let cwd = state.contexts.map().get(&info.name).cloned();
        Some(Context {
            id: info.name.clone(),
            language: language.name(),
            cwd: cwd.unwrap_or_else(|| "/home/user".to_owned()),
        })
    }

    /// Starts an interpreter for the default user of the guest.
    async fn start(
        &self,
        language: Language,
        name: &str,
        cwd: Option<&str>,
    ) -> Answer<guest::InterpInfo> {
        let state = self.e2b.of(&self.sandbox.id);
        let user = state
            .users
            .find(&self.client, None)
            .await
            .map_err(|error| Refusal::bad(error.to_string()))?;
        let cwd = super::envd::paths::resolve(cwd.unwrap_or_default(), &user)
            .ok_or_else(|| Refusal::bad("the working directory is not a path"))?;
        let own = BTreeMap::new();
        let wish = guest::InterpStart {
            name: Some(name.to_owned()),
            language: language.of_agent().to_owned(),
            env: environment(&self.sandbox.record().environment(), &own),
            cwd: Some(cwd.clone()),
            user: Some(user.name),
            timeout_ms: Some(START_SECS * 1000),
            ..guest::InterpStart::default()
        };
        let started = self
            .client
            .by(agent_limits::command(START_SECS))
            .interp_start(wish)
            .await
            .map_err(Error::agent("the interpreter could not be started"))?;
        state.contexts.map().insert(name.to_owned(), cwd);
        Ok(started)
    }

    /// The interpreter of an execution.
    async fn context(&self, request: &Execution) -> Answer<(String, Language)> {
        match (&request.context_id, &request.language) {
            (Some(_), Some(_)) => Err(Refusal::bad(
                "Only one of context_id or language can be provided",
            )),
            (Some(id), None) => {
                let found = self.find(id).await?;
                let language =
                    Language::from_agent(&found.language).ok_or_else(|| not_found(id))?;
                Ok((found.name, language))
            }
            (None, language) => {
                let language = Language::parse(language.as_deref().unwrap_or("python"))?;
                let name = language.of_agent();
                let known = self.known().await?;
                if language != Language::Bash && !known.iter().any(|found| found.name == name) {
                    self.start(language, name, None).await?;
                }
                Ok((name.to_owned(), language))
            }
        }
    }
}

async fn create(
    State(e2b): State<Arc<E2b>>,
    reached: Reached,
    Sent(request): Sent<NewContext>,
) -> Answer<Json<Context>> {
    let guest = Guest::of(e2b, reached).await?;
    let language = Language::parse(request.language.as_deref().unwrap_or("python"))?;
    if language == Language::Bash {
        return Err(Refusal::bad(
            "bash has no contexts: each execution is a shell",
        ));
    }
    if guest.known().await?.len() >= MAX_CONTEXTS {
        return Err(Refusal::new(
            StatusCode::TOO_MANY_REQUESTS,
            format!("a sandbox has at most {MAX_CONTEXTS} contexts"),
        ));
    }
    let name = format!(
        "{:016x}{:016x}",
        rand::random::<u64>(),
        rand::random::<u64>()
    );
    let info = guest.start(language, &name, request.cwd.as_deref()).await?;
    guest.shown(&info).map(Json).ok_or_else(|| not_found(&name))
}

async fn list(State(e2b): State<Arc<E2b>>, reached: Reached) -> Answer<Json<Vec<Context>>> {
    let guest = Guest::of(e2b, reached).await?;
    let known = guest.known().await?;
    Ok(Json(
        known.iter().filter_map(|info| guest.shown(info)).collect(),
    ))
}

async fn remove(
    State(e2b): State<Arc<E2b>>,
    Path(id): Path<String>,
    reached: Reached,
) -> Answer<Json<Value>> {
    let guest = Guest::of(e2b, reached).await?;
    let found = guest.find(&id).await?;
    guest
        .client
        .by(agent_limits::answer())
        .interp_stop(&found.name)
        .await
        .map_err(Error::agent("the context could not be removed"))?;
    guest.e2b.of(&guest.sandbox.id).contexts.map().remove(&id);
    Ok(Json(json!({})))
}

async fn restart(
    State(e2b): State<Arc<E2b>>,
    Path(id): Path<String>,
    reached: Reached,
) -> Answer<Json<Value>> {
    let guest = Guest::of(e2b, reached).await?;
    let found = guest.find(&id).await?;
    guest
        .client
        .by(agent_limits::command(START_SECS))
        .interp_restart(&found.name)
        .await
        .map_err(Error::agent("the context could not be restarted"))?;
    Ok(Json(json!({})))
}

/// One line of a stream, with every character above ASCII escaped.
fn line(value: &Value) -> Bytes {
    let text = value.to_string();
    let mut line = String::with_capacity(text.len() + 1);
    for character in text.chars() {
        if character < '\u{7f}' {
            line.push(character);
            continue;
        }
        for unit in character.encode_utf16(&mut [0; 2]) {
            line.push_str(&format!("\\u{unit:04x}"));
        }
    }
    line.push('\n');
    line.into()
}

/// Text that comes in pieces which may end within a character.
#[derive(Debug, Default)]
struct Texts {
    rest: Vec<u8>,
}

impl Texts {
    /// The text that is whole with these bytes.
    fn push(&mut self, bytes: &[u8]) -> String {
        self.rest.extend_from_slice(bytes);
        let whole = match std::str::from_utf8(&self.rest) {
            Ok(_) => self.rest.len(),
            // The end may be the beginning of a character.
            Err(error) if error.error_len().is_none() => error.valid_up_to(),
            Err(_) => self.rest.len(),
        };
        let tail = self.rest.split_off(whole);
        let text = String::from_utf8_lossy(&self.rest).into_owned();
        self.rest = tail;
        text
    }
}

/// The fields of a result by their media types.
const FIELDS: &[(&str, &str)] = &[
    ("text/plain", "text"),
    ("text/html", "html"),
    ("text/markdown", "markdown"),
    ("image/svg+xml", "svg"),
    ("image/png", "png"),
    ("image/jpeg", "jpeg"),
    ("application/pdf", "pdf"),
    ("text/latex", "latex"),
    ("application/json", "json"),
    ("application/javascript", "javascript"),
    ("e2b/data", "data"),
    ("e2b/chart", "chart"),
];

/// The text of a value: a string without the quotes that the language prints.
fn plain(repr: &str, json: Option<&guest::JsonText>) -> String {
    let quoted = |quote: char| {
        let inner = repr.strip_prefix(quote)?.strip_suffix(quote)?;
        Some(inner).filter(|inner| !inner.contains(['\\', quote]))
    };
    match json.and_then(|json| json.parse::<String>().ok()) {
        Some(text) => text,
        None => quoted('\'').unwrap_or(repr).to_owned(),
    }
}

/// The lines for a result.
fn results(result: &guest::EvalResult) -> Vec<Value> {
    let mut lines = Vec::new();
    let shown: Map<String, Value> = result
        .display
        .as_ref()
        .and_then(|display| display.parse().ok())
        .unwrap_or_default();
    let mut fields = Map::new();
    if let Some(repr) = &result.repr {
        fields.insert("text".into(), plain(repr, result.json.as_ref()).into());
    }
    for (media, field) in FIELDS {
        if let Some(value) = shown.get(*media) {
            fields.insert((*field).to_owned(), value.clone());
        }
    }
    if !fields.is_empty() {
        fields.insert("type".into(), "result".into());
        fields.insert("is_main_result".into(), result.repr.is_some().into());
        fields.insert("extra".into(), json!({}));
        lines.push(Value::Object(fields));
    }
    if let Some(error) = &result.error {
        lines.push(json!({
            "type": "error",
            "name": error.name,
            "value": error.message,
            "traceback": error.traceback,
        }));
    } else if result.timed_out {
        lines.push(json!({
            "type": "error",
            "name": "TimeoutError",
            "value": "the execution took too long",
            "traceback": "",
        }));
    }
    lines
}

/// The code of an execution with variables of its own. They hold for this execution only.
fn with_variables(
    language: Language,
    code: &str,
    variables: &BTreeMap<String, String>,
) -> Option<(String, String)> {
    if variables.is_empty() {
        return None;
    }
    let json = serde_json::to_string(variables).ok()?;
    // A JSON object of texts is a literal of both languages.
    let (set, reset) = match language {
        Language::Python => (
            format!(
                "import os as _forkd_os\n_forkd_env = {json}\n_forkd_old = {{k: _forkd_os.environ.get(k) for k in _forkd_env}}\n_forkd_os.environ.update(_forkd_env)"
            ),
            "for _forkd_k, _forkd_v in _forkd_old.items():\n    _forkd_os.environ.pop(_forkd_k, None) if _forkd_v is None else _forkd_os.environ.__setitem__(_forkd_k, _forkd_v)".to_owned(),
        ),
        Language::Node => (
            format!(
                "globalThis._forkdEnv = {json}; globalThis._forkdOld = {{}}; for (const k in _forkdEnv) {{ _forkdOld[k] = process.env[k]; process.env[k] = _forkdEnv[k] }}"
            ),
            "for (const k in _forkdOld) { if (_forkdOld[k] === undefined) delete process.env[k]; else process.env[k] = _forkdOld[k] }".to_owned(),
        ),
        Language::Bash => return None,
    };
    let _ = code;
    Some((set, reset))
}

async fn execute(
    State(e2b): State<Arc<E2b>>,
    reached: Reached,
    request: Request,
) -> Answer<Response> {
    let Sent(execution) = Sent::<Execution>::from_request(request, &()).await?;
    let guest = Guest::of(e2b, reached).await?;
    let (name, language) = guest.context(&execution).await?;
    let (lines, receiver) = mpsc::channel(WAITING);
    tokio::spawn(async move {
        match language {
            Language::Bash => guest.run_shell(execution, &lines).await,
            _ => guest.run(name, language, execution, &lines).await,
        }
        let _ = lines.send(line(&json!({"type": "end_of_execution"}))).await;
    });
    let lines = tokio_stream::wrappers::ReceiverStream::new(receiver);
    let lines = futures::StreamExt::map(lines, Ok::<_, std::convert::Infallible>);
    let mut response = Body::from_stream(lines).into_response();
    let kind = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    Ok(response)
}

fn printed(kind: &str, text: &str) -> Value {
    let now = forkd_sandboxes::clock::unix_ms();
    json!({"type": kind, "text": text, "timestamp": text::time_ms(now)})
}

fn broken(error: forkd_agent_client::Error) -> Value {
    let error = Error::agent("the execution did not come to its end")(error);
    json!({"type": "error", "name": "ExecutionError", "value": error.chain(), "traceback": ""})
}

type Lines = mpsc::Sender<Bytes>;

impl Guest {
    /// Runs a part of the plane's own code, without output.
    async fn run_quietly(&self, name: &str, code: String) {
        let request = guest::EvalRequest {
            interp: Some(name.to_owned()),
            mode: guest::EvalMode::Exec,
            code,
            timeout_ms: Some(10_000),
            ..guest::EvalRequest::default()
        };
        let calls = self.client.by(agent_limits::command(10));
        if let Err(error) = calls.eval(request).await {
            tracing::debug!(sandbox = %self.sandbox.id, %error, "variables of an execution");
        }
    }

    async fn run(&self, name: String, language: Language, execution: Execution, lines: &Lines) {
        let variables = execution.env_vars.unwrap_or_default();
        let around = with_variables(language, &execution.code, &variables);
        if let Some((set, _)) = &around {
            self.run_quietly(&name, set.clone()).await;
        }
        let request = guest::EvalRequest {
            interp: Some(name.clone()),
            code: execution.code,
            timeout_ms: Some(MAX_SECS * 1000),
            ..guest::EvalRequest::default()
        };
        let started = self
            .client
            .by(agent_limits::command(MAX_SECS))
            .eval_stream(request)
            .await;
        match started {
            Ok(eval) => {
                if !forward(eval, lines).await {
                    // The client has gone away: nothing waits for the rest.
                    let calls = self.client.by(agent_limits::answer());
                    let _ = calls.interp_interrupt(&name).await;
                }
            }
            Err(error) => drop(lines.send(line(&broken(error))).await),
        }
        if let Some((_, reset)) = around {
            self.run_quietly(&name, reset).await;
        }
    }

    /// Runs code as a script of a shell.
    async fn run_shell(&self, execution: Execution, lines: &Lines) {
        let state = self.e2b.of(&self.sandbox.id);
        let user = state.users.find(&self.client, None).await.ok();
        let variables = execution.env_vars.unwrap_or_default();
        let wish = guest::ExecRequest {
            argv: vec!["/bin/bash".into(), "-c".into(), execution.code],
            env: environment(&self.sandbox.record().environment(), &variables),
            cwd: user.as_ref().map(|user| user.home.clone()),
            user: user.map(|user| user.name),
            on_disconnect: guest::OnDisconnect::Kill,
            ..guest::ExecRequest::default()
        };
        let count = json!({"type": "number_of_executions", "execution_count": 1});
        let _ = lines.send(line(&count)).await;
        let mut exec = match self.client.by(agent_limits::start()).exec(wish).await {
            Ok(exec) => exec,
            Err(error) => return drop(lines.send(line(&broken(error))).await),
        };
        let (mut out, mut err) = (Texts::default(), Texts::default());
        loop {
            let output = tokio::select! {
                output = exec.next_output() => output,
                () = lines.closed() => return,
            };
            let value = match output {
                Ok(Some(Output::Stdout(bytes))) => printed("stdout", &out.push(&bytes)),
                Ok(Some(Output::Stderr(bytes))) => printed("stderr", &err.push(&bytes)),
                Ok(Some(Output::Lost { .. })) => continue,
                Ok(None) => break,
                Err(error) => return drop(lines.send(line(&broken(error))).await),
            };
            if lines.send(line(&value)).await.is_err() {
                return;
            }
        }
        if let Ok(ended) = exec.wait().await
            && !ended.status.success()
        {
            let value = json!({
                "type": "error",
                "name": "ExitCode",
                "value": ended.status.shell_code().to_string(),
                "traceback": "",
            });
            let _ = lines.send(line(&value)).await;
        }
    }
}

/// Sends the lines of an execution; false if the client has gone away.
async fn forward(mut eval: Eval, lines: &Lines) -> bool {
    let (mut out, mut err) = (Texts::default(), Texts::default());
    let mut waiting = Vec::new();
    loop {
        let silent = Instant::now() + KEEPALIVE;
        let output = tokio::select! {
            output = eval.next_output() => output,
            () = sleep_until(silent) => {
                if lines.send(line(&json!({"type": "keepalive"}))).await.is_err() {
                    return false;
                }
                continue;
            }
            () = lines.closed() => return false,
        };
        let value = match output {
            Ok(Some(Output::Stdout(bytes))) => printed("stdout", &out.push(&bytes)),
            Ok(Some(Output::Stderr(bytes))) => printed("stderr", &err.push(&bytes)),
            Ok(Some(Output::Lost { .. })) => continue,
            Ok(None) => break,
            Err(error) => {
                waiting.push(broken(error));
                return send_all(waiting, lines).await;
            }
        };
        if lines.send(line(&value)).await.is_err() {
            return false;
        }
    }
    match eval.wait().await {
        Ok(result) => {
            waiting.push(json!({"type": "number_of_executions", "execution_count": result.count}));
            waiting.extend(results(&result));
        }
        Err(error) => waiting.push(broken(error)),
    }
    send_all(waiting, lines).await
}

async fn send_all(values: Vec<Value>, lines: &Lines) -> bool {
    for value in values {
        if lines.send(line(&value)).await.is_err() {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_ascii_and_mean_the_same() {
        let value = json!({"text": "é \u{2028}\u{7f}😀\n"});
        let line = line(&value);
        assert!(line.is_ascii() && line.ends_with(b"\n"));
        assert_eq!(line.iter().filter(|b| **b == b'\n').count(), 1);
        assert_eq!(serde_json::from_slice::<Value>(&line).unwrap(), value);
    }

    #[test]
    fn characters_that_are_cut_come_whole() {
        let mut texts = Texts::default();
        let bytes = "aé😀".as_bytes();
        let mut found = String::new();
        for byte in bytes {
            found += &texts.push(&[*byte]);
        }
        assert_eq!(found, "aé😀");
        assert_eq!(Texts::default().push(&[b'a', 0xff, b'b']), "a\u{fffd}b");
    }

    #[test]
    fn a_result_has_the_fields_of_the_sdks() {
        let result: guest::EvalResult = serde_json::from_str(
            r#"{"repr":"'x'","json":"x","display":{"image/png":"AA","text/html":"<b>"},"error":{"name":"E","message":"m","traceback":"t"}}"#,
        )
        .unwrap();
        let lines = results(&result);
        assert_eq!(lines[0]["text"], "x");
        assert_eq!(lines[0]["png"], "AA");
        assert_eq!(lines[0]["html"], "<b>");
        assert_eq!(lines[0]["is_main_result"], true);
        assert_eq!(lines[1]["name"], "E");
        assert_eq!(results(&guest::EvalResult::default()), [] as [Value; 0]);
    }

    #[test]
    fn languages_have_the_names_of_the_sdks() {
        assert_eq!(Language::parse("JS").unwrap(), Language::Node);
        assert_eq!(Language::parse("python").unwrap().name(), "python");
        assert!(Language::parse("java").is_err());
    }
}
