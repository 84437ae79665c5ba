//! The code interpreter, on port 49999: contexts and streamed execution.
//!
//! A context is an interpreter of the agent. Each language has a default context, which starts at its first use; the one
//! of Python is the interpreter that the image has warmed up. An execution answers with one JSON object a line, all ASCII,
//! because the SDKs split and decode lines in ways that other characters break.
//!
//! [`run`] executes code; Python runs in IPython if the guest has it. [`script`] runs languages without an interpreter
//! that stays. [`lines`] turns results into lines, and [`printed`] output.

mod language;
mod lines;
mod printed;
mod run;
mod script;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{FromRequest, Path, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use axum::{Json, Router};
use forkd_agent_client::Client;
use forkd_guest_proto as guest;
use forkd_sandboxes::agent_limits;
use forkd_sandboxes::error::Error;
use forkd_sandboxes::sandbox::SandboxHandle;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::control::Sent;
use super::error::{Answer, Refusal};
use super::no_route;
use super::state::E2b;
use super::target::Reached;
use crate::guest::exec::environment;
use language::Language;

/// How long an interpreter may take to start.
const START_SECS: u64 = 120;
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

/// A context as the API shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Context {
    id: String,
    language: &'static str,
    cwd: String,
}

/// A context that was made through this plane.
#[derive(Debug, Clone)]
struct Made {
    name: String,
    language: Language,
    cwd: String,
}

/// The contexts that were made through this plane, in their order. The agent is the authority on which exist.
#[derive(Debug, Default)]
pub struct Contexts {
    made: Mutex<Vec<Made>>,
    /// Python contexts whose guest has no IPython.
    plain: Mutex<BTreeSet<String>>,
}

impl Contexts {
    fn find(&self, name: &str) -> Option<Made> {
        self.made
            .lock()
            .iter()
            .find(|made| made.name == name)
            .cloned()
    }

    /// The place of a context in lists: those that the image has brought along are first.
    fn place(&self, name: &str) -> usize {
        let made = self.made.lock();
        made.iter()
            .position(|made| made.name == name)
            .map_or(0, |at| at + 1)
    }

    fn add(&self, made: Made) {
        self.remove(&made.name);
        self.made.lock().push(made);
    }

    fn remove(&self, name: &str) {
        self.made.lock().retain(|made| made.name != name);
        self.plain.lock().remove(name);
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
        let made = self.e2b.of(&self.sandbox.id).contexts.find(&info.name);
        let (language, cwd) = match made {
            Some(made) => (made.language, made.cwd),
            None => (
                Language::from_agent(&info.language)?,
                "/home/user".to_owned(),
            ),
        };
        Some(Context {
            id: info.name.clone(),
            language: language.name(),
            cwd,
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
            env: environment(&self.sandbox.record().env, &own),
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
        state.contexts.add(Made {
            name: name.to_owned(),
            language,
            cwd,
        });
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
                let made = self.e2b.of(&self.sandbox.id).contexts.find(id);
                let language = made
                    .map(|made| made.language)
                    .or_else(|| Language::from_agent(&found.language));
                Ok((found.name, language.ok_or_else(|| not_found(id))?))
            }
            (None, language) => {
                let language = Language::parse(language.as_deref().unwrap_or("python"))?;
                let name = language.of_agent();
                let known = self.known().await?;
                if language.stays() && !known.iter().any(|found| found.name == name) {
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
    if !language.stays() {
        let name = language.name();
        return Err(Refusal::bad(format!(
            "{name} has no contexts: each execution is a process"
        )));
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
    let mut known = guest.known().await?;
    let state = guest.e2b.of(&guest.sandbox.id);
    known.sort_by_key(|info| state.contexts.place(&info.name));
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
    guest.e2b.of(&guest.sandbox.id).contexts.remove(&id);
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

async fn execute(
    State(e2b): State<Arc<E2b>>,
    reached: Reached,
    request: Request,
) -> Answer<Response> {
    let Sent(execution) = Sent::<Execution>::from_request(request, &()).await?;
    let guest = Guest::of(e2b, reached).await?;
    let (name, language) = guest.context(&execution).await?;
    let (lines, receiver) = mpsc::channel(WAITING);
    tokio::spawn(async move { guest.execute(name, language, execution, lines).await });
    let lines = tokio_stream::wrappers::ReceiverStream::new(receiver);
    let mut response = Body::from_stream(lines).into_response();
    let kind = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    Ok(response)
}
