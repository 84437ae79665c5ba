//! Between the boot of a parent and its cut: commands, services, warm-up, settling.
//!
//! The image declares a [`Preparation`], and a request may add a command and code. A step that fails ends the build: a
//! parent that is not prepared would hand its defect to every child. A parent that does not become calm is cut all the
//! same.

use std::collections::BTreeMap;
use std::time::Duration;

use forkd_agent_client::Calls;
use forkd_api::ErrorCode;
use forkd_formats::image::{Interpreter, Warmup};
use forkd_formats::prepare::{self, Command, Preparation, Service, Settle, WarmupStep};
use forkd_guest_proto as guest;
use forkd_guest_proto::{EvalMode, EvalRequest, ExecRequest, InterpStart};

use super::BuildRequest;
use super::assets::Assets;
use crate::error::Error;

/// The end of an output that a message carries.
const TAIL: usize = 1000;

/// Whether a preparation starts an interpreter of a language.
pub fn is_warm(preparation: &Preparation, language: Interpreter) -> bool {
    preparation.warmup.iter().any(|step| match step {
        WarmupStep::Interpreter(warmup) => warmup.interpreter == language,
        WarmupStep::Exec(_) => false,
    })
}

/// Prepares a parent for its cut.
pub async fn prepare(client: &Calls, request: &BuildRequest, assets: &Assets) -> Result<(), Error> {
    let preparation = &assets.prepare;
    for command in &preparation.run {
        run(client, command, "a command of the image").await?;
    }
    for service in &preparation.services {
        start(client, service).await?;
    }
    for step in &preparation.warmup {
        match step {
            WarmupStep::Interpreter(warmup) => warm(client, request, assets, warmup).await?,
            WarmupStep::Exec(command) => run(client, command, "the image's warm-up").await?,
        }
    }
    if preparation.warmup.is_empty() && preparation.services.is_empty() {
        // Every child would have to start it; a guest without one is as good.
        let python = InterpStart {
            language: "python".to_owned(),
            timeout_ms: Some(millis(request.timeout)),
            ..InterpStart::default()
        };
        if let Err(error) = client.interp_start(python).await {
            tracing::info!(error = crate::error::chain(&error), "no warm interpreter");
        }
    }
    if !request.warmup.is_empty() {
        let command = Command {
            exec: request.warmup.clone(),
            user: None,
            cwd: None,
            env: BTreeMap::new(),
            timeout_secs: u32::try_from(request.timeout.as_secs()).unwrap_or(u32::MAX),
        };
        run(client, &command, "the warm-up command").await?;
    }
    if let Some(code) = &request.warmup_code {
        evaluate(client, code).await?;
    }
    if let Some(settle) = preparation.settle {
        calm(client, settle).await?;
    }
    Ok(())
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn variables(env: &BTreeMap<String, String>) -> Vec<(String, Option<String>)> {
    env.iter()
        .map(|(key, value)| (key.clone(), Some(value.clone())))
        .collect()
}

/// Runs a command to its end. `what` names it in messages.
async fn run(client: &Calls, command: &Command, what: &str) -> Result<(), Error> {
    let request = ExecRequest {
        argv: command.exec.clone(),
        user: command.user.clone(),
        cwd: command.cwd.clone(),
        env: variables(&command.env),
        timeout_ms: Some(u64::from(command.timeout_secs) * 1000),
        ..ExecRequest::default()
    };
    let done = client
        .exec_capture(request)
        .await
        .map_err(|error| match error {
            // The agent works; the command does not.
            forkd_agent_client::Error::Agent(refused) => Error::refused(
                ErrorCode::InvalidRequest,
                format!("{what} cannot be run: {}", refused.message),
            ),
            other => Error::agent(format!("{what} could not be run"))(other),
        })?;
    if done.result.timed_out {
        return Err(Error::refused(
            ErrorCode::InvalidRequest,
            format!(
                "{what} did not end within {} s: {}",
                command.timeout_secs,
                command.exec.join(" ")
            ),
        ));
    }
    if done.result.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&done.stderr);
    let skip = stderr.chars().count().saturating_sub(TAIL);
    let tail: String = stderr.chars().skip(skip).collect();
    Err(Error::refused(
        ErrorCode::InvalidRequest,
        format!(
            "{what} ended with {:?}: {}",
            done.result.status,
            tail.trim()
        ),
    ))
}

/// Starts a service and waits until it is ready.
async fn start(client: &Calls, service: &Service) -> Result<(), Error> {
    let ready = service.ready.iter().map(|condition| match condition {
        prepare::Ready::Port(port) => guest::Readiness::Port(*port),
        prepare::Ready::File(path) => guest::Readiness::File(path.clone()),
        prepare::Ready::Exec(exec) => guest::Readiness::Exec(exec.clone()),
        prepare::Ready::Log(text) => guest::Readiness::Log(text.clone()),
    });
    let request = guest::ServiceStart {
        name: service.name.clone(),
        argv: service.exec.clone(),
        env: variables(&service.env),
        cwd: service.cwd.clone(),
        user: service.user.clone(),
        restart: match service.restart {
            prepare::Restart::Never => guest::Restart::Never,
            prepare::Restart::OnFailure => guest::Restart::OnFailure,
            prepare::Restart::Always => guest::Restart::Always,
        },
        ready: ready.collect(),
        timeout_ms: Some(u64::from(service.timeout_secs) * 1000),
    };
    match client.service_start(request).await {
        Ok(_) => Ok(()),
        Err(forkd_agent_client::Error::Agent(refused)) => Err(Error::refused(
            ErrorCode::AgentFailed,
            format!("a service of the image does not start: {}", refused.message),
        )),
        Err(other) => Err(Error::agent("a service of the image could not be started")(
            other,
        )),
    }
}

/// Starts an interpreter, which stays.
async fn warm(
    client: &Calls,
    request: &BuildRequest,
    assets: &Assets,
    warmup: &Warmup,
) -> Result<(), Error> {
    let started = client
        .interp_start(InterpStart {
            language: warmup.interpreter.name().to_owned(),
            env: variables(&assets.env),
            warmup: guest::Warmup {
                imports: warmup.imports.clone(),
                code: warmup.code.clone(),
            },
            timeout_ms: Some(millis(request.timeout)),
            ..InterpStart::default()
        })
        .await
        .map_err(Error::agent("the interpreter could not be warmed up"))?;
    let Some(error) = started.warmup_error else {
        return Ok(());
    };
    Err(Error::refused(
        ErrorCode::AgentFailed,
        format!(
            "the image's warm-up raised {}: {}",
            error.name, error.message
        ),
    ))
}

/// Runs the code of a request in the interpreter of Python.
async fn evaluate(client: &Calls, code: &str) -> Result<(), Error> {
    let done = client
        .eval(EvalRequest {
            code: code.to_owned(),
            mode: EvalMode::Auto,
            ..EvalRequest::default()
        })
        .await
        .map_err(Error::agent("the warm-up code could not be run"))?;
    let Some(error) = done.result.error else {
        return Ok(());
    };
    Err(Error::refused(
        ErrorCode::InvalidRequest,
        format!("the warm-up code raised {}: {}", error.name, error.message),
    ))
}

/// Waits until the parent has little to do. Work in progress would be repeated by every child.
async fn calm(client: &Calls, settle: Settle) -> Result<(), Error> {
    let report = client
        .settle(guest::SettleRequest {
            busy_percent: settle.busy_percent,
            for_ms: settle.for_ms.into(),
            timeout_ms: u64::from(settle.timeout_secs) * 1000,
        })
        .await
        .map_err(Error::agent("the parent could not be watched"))?;
    if report.calm {
        tracing::debug!(took_ms = report.took_ms, "the parent is calm");
    } else {
        tracing::warn!(
            busy_percent = report.busy_percent,
            "the parent is cut although it is busy"
        );
    }
    Ok(())
}
