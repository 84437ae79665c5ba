//! Makes a child a machine of its own.
//!
//! A child wakes up as an exact copy of its parent and of its siblings. [`apply`] changes the state that must differ:
//! random number generators, names, addresses, connections and the clock. The host lets no request in before that.
//!
//! The random number generators are the one part that must not fail: [`apply`] returns an error, and the host discards
//! the child. Every other failure is a warning in the report.

mod connections;
mod hooks;
mod names;
mod reset;

pub use names::keep_in_memory;

use std::time::{Duration, Instant};

use forkd_guest_proto::{AgentError, IdentityReport, IdentityRequest, Reset, ResetReport};
use rustix::time::ClockId;

use crate::agent::{Agent, Role, run_directory};
use crate::{clock, error, files, net, sys};

/// How long hooks may take together.
const HOOK_TIME: Duration = Duration::from_secs(5);
/// The least fresh bytes that make a difference.
const MIN_ENTROPY: usize = 32;

/// Makes the guest a machine of its own. A generator that keeps the state it shares with the child's siblings is an
/// error: such a child must not be used.
pub async fn apply(agent: &Agent, request: IdentityRequest) -> Result<IdentityReport, AgentError> {
    let start = Instant::now();
    let plan = Plan::parse(request)?;
    let mut report = IdentityReport::default();
    let mut warnings = Vec::new();
    if agent.role != Role::Process {
        change_machine(&plan, &mut report, &mut warnings)?;
    }
    publish_generation(&plan.generation, &mut warnings);
    plan.generation
        .clone_into(&mut agent.generation.borrow_mut());
    report.generation.clone_from(&plan.generation);
    // After the kernel: OpenSSL in an interpreter takes part of its new seed from there. The requests are in the sockets
    // before the interpreters run again.
    let reseeding = match plan.entropy.as_slice() {
        [] => None,
        entropy => Some(agent.interps.begin_reseed(entropy).await),
    };
    report.thawed = agent.thaw()?.was_frozen;
    if let Some(reseeding) = reseeding {
        report.interpreters = reseeding.finish().await?;
    }
    report.hooks = hooks::run(agent, &plan.generation, plan.hook_time).await;
    report.warnings = warnings;
    report.unix_ns = Some(clock::now(ClockId::Realtime));
    report.took_us = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
    Ok(report)
}

/// Breaks every connection to elsewhere. For a guest whose network engine was replaced: no peer would end connections
/// on which the guest only waits.
pub fn reset_connections() -> ResetReport {
    ResetReport {
        connections_reset: connections::reset_inherited(),
    }
}

/// A request that makes sense.
struct Plan {
    generation: String,
    entropy: Vec<u8>,
    request: IdentityRequest,
    hook_time: Duration,
}

impl Plan {
    fn parse(request: IdentityRequest) -> Result<Self, AgentError> {
        let entropy = hex::decode(&request.entropy)
            .map_err(|_| error::bad("the entropy is not hexadecimal"))?;
        if !entropy.is_empty() && !(MIN_ENTROPY..=4096).contains(&entropy.len()) {
            return Err(error::bad(format!(
                "the entropy has {} bytes, not {MIN_ENTROPY} to 4096",
                entropy.len()
            )));
        }
        if request.generation.len() > 256 || request.generation.contains(['\n', '\0']) {
            return Err(error::bad("the generation is one line of up to 256 bytes"));
        }
        if let Some(name) = &request.hostname
            && !names::is_hostname(name)
        {
            return Err(error::bad(format!("{name:?} cannot be a host name")));
        }
        if let Some(id) = &request.machine_id
            && !(id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit()))
        {
            return Err(error::bad("a machine id has 32 hexadecimal digits"));
        }
        Ok(Self {
            generation: request.generation.clone(),
            entropy,
            hook_time: request
                .hook_timeout_ms
                .map_or(HOOK_TIME, Duration::from_millis),
            request,
        })
    }
}

fn change_machine(
    plan: &Plan,
    report: &mut IdentityReport,
    warnings: &mut Vec<String>,
) -> Result<(), AgentError> {
    let mut note = |error: AgentError| warnings.push(error.message);
    let request = &plan.request;
    // First the clock, since the time in the request is that of its sending.
    if let Some(unix_ns) = request.unix_ns {
        match clock::set(unix_ns) {
            Ok(step) => report.clock_step_ns = Some(step),
            Err(error) => note(error),
        }
    }
    if !plan.entropy.is_empty() {
        sys::add_entropy(&plan.entropy)
            .map_err(|error| error::io("cannot reseed the kernel's random numbers", &error))?;
        report.reseeded = true;
    }
    // Connections go before the addresses do: with them the peer would see packets of a stranger.
    if !request.keep_connections {
        report.connections_reset = connections::reset_inherited();
        report.reset_by = (report.connections_reset > 0).then_some(Reset::Disconnect);
    }
    if let Some(network) = &request.network
        && let Err(error) = net::configure(network)
    {
        note(error);
    }
    // A machine that gets the name it has is resumed, not forked: it goes on with the same boot.
    let resumed = request.hostname.as_deref() == Some(&hostname());
    if let Some(name) = &request.hostname
        && let Err(error) = names::set_hostname(name)
    {
        note(error);
    }
    report.hostname = hostname();
    match names::set_machine_id(request.machine_id.as_deref()) {
        Ok(id) => report.machine_id = id,
        Err(error) => note(error),
    }
    match names::boot_id(resumed) {
        Ok(id) => report.boot_id = Some(id),
        Err(error) => note(error),
    }
    Ok(())
}

fn hostname() -> String {
    let names = rustix::system::uname();
    names.nodename().to_string_lossy().into_owned()
}

fn publish_generation(generation: &str, warnings: &mut Vec<String>) {
    let path = run_directory().join("generation");
    if let Err(error) = files::replace(&path, format!("{generation}\n").as_bytes()) {
        warnings.push(format!("cannot write {}: {error}", path.display()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_are_checked_before_anything_changes() {
        let ok = IdentityRequest {
            entropy: "ab".repeat(32),
            hostname: Some("child-1".into()),
            ..Default::default()
        };
        assert!(Plan::parse(ok).is_ok());
        let wrong = [
            IdentityRequest {
                entropy: "zz".repeat(32),
                ..Default::default()
            },
            IdentityRequest {
                entropy: "ab".repeat(31),
                ..Default::default()
            },
            IdentityRequest {
                generation: "a\nb".into(),
                ..Default::default()
            },
            IdentityRequest {
                hostname: Some("a b".into()),
                ..Default::default()
            },
            IdentityRequest {
                machine_id: Some("12".into()),
                ..Default::default()
            },
        ];
        for request in wrong {
            assert!(Plan::parse(request).is_err());
        }
    }
}
