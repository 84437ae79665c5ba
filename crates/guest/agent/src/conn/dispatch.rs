//! Maps each request to the function that carries it out.

use std::rc::Rc;

use forkd_guest_proto::{AgentError, ErrorCode, MAX_PAYLOAD, Outcome, Request};
use serde::Serialize;

use super::stream::{EarlyEnd, Stream};
use crate::agent::Agent;
use crate::files::archive;
use crate::{clock, files, identity, interp, metrics, net, process, quiesce, service, volume};

/// The payload of a successful response, or why there is none.
pub type Reply = Result<Vec<u8>, AgentError>;

/// Runs a request to its end. `None` when the connection is gone and no response can be sent. A request that ends
/// early is dropped; what it holds cleans up after itself.
pub async fn run(agent: &Rc<Agent>, stream: &Rc<Stream>, request: Request) -> Option<Vec<u8>> {
    let reply = tokio::select! {
        reply = carry_out(agent, stream, request) => reply,
        end = stream.early_end() => match end {
            EarlyEnd::Lost => return None,
            EarlyEnd::Cancelled => Err(AgentError::new(ErrorCode::Cancelled, "cancelled by the host")),
        },
    };
    let payload = reply.and_then(|payload| {
        if payload.len() > MAX_PAYLOAD {
            return Err(AgentError::new(ErrorCode::Limit, "the answer is too large"));
        }
        Ok(payload)
    });
    Some(payload.unwrap_or_else(|error| {
        serde_json::to_vec(&Outcome::<()>::Error(error)).unwrap_or_default()
    }))
}

fn ok<T: Serialize>(result: Result<T, AgentError>) -> Reply {
    serde_json::to_vec(&Outcome::Ok(result?)).map_err(|error| {
        AgentError::new(
            ErrorCode::Internal,
            format!("cannot write the answer: {error}"),
        )
    })
}

async fn carry_out(agent: &Rc<Agent>, stream: &Rc<Stream>, request: Request) -> Reply {
    match request {
        Request::Ping => ok(Ok(agent.pong())),
        Request::Exec(exec) if exec.background => ok(process::start(agent, &exec)),
        Request::Exec(exec) => ok(process::exec(agent, stream, &exec).await),
        Request::Processes => ok(Ok(agent.processes.list())),
        Request::Attach(attach) => ok(process::attach(agent, stream, &attach).await),
        Request::Input(input) => ok(process::input(agent, stream, input).await),
        Request::Signal(signal) => ok(agent.processes.signal(&signal)),
        Request::Wait { process } => ok(process::wait(agent, process).await),
        Request::Forget { process } => ok(agent.processes.forget(process)),
        Request::Resize {
            process,
            rows,
            cols,
        } => ok(agent.processes.resize(process, rows, cols)),
        Request::Read(read) => ok(files::read(stream, read).await),
        Request::Write(write) => ok(files::write(stream, write).await),
        Request::Stat(stat) => ok(files::stat(stat).await),
        Request::List(list) => ok(files::list(stream, list).await),
        Request::Mkdir(mkdir) => ok(files::mkdir(mkdir).await),
        Request::Rename(rename) => ok(files::rename(rename).await),
        Request::Remove(remove) => ok(files::remove(remove).await),
        Request::SetAttr(set) => ok(files::set_attr(set).await),
        Request::Pack(pack) => ok(archive::pack(stream, pack).await),
        Request::Unpack(unpack) => ok(archive::unpack(stream, unpack).await),
        Request::Mount(mount) => {
            agent.may_change_machine()?;
            ok(crate::mounting::mount(mount).await)
        }
        Request::Unmount(unmount) => {
            agent.may_change_machine()?;
            ok(crate::mounting::unmount(unmount).await)
        }
        Request::KillAll => ok(agent.kill_all().await),
        Request::Watch(watch) => ok(files::watch(stream, watch).await),
        Request::Dial(dial) => ok(crate::dial::dial(stream, dial).await),
        Request::InterpStart(start) => ok(agent.interps.start(*start).await),
        Request::InterpList => ok(Ok(agent.interps.list())),
        Request::InterpInterrupt(name) => ok(agent.interps.interrupt(&name).await),
        Request::InterpRestart(name) => ok(agent.interps.restart(&name).await),
        Request::InterpStop(name) => ok(agent.interps.stop(&name).await),
        Request::Eval(eval) => ok(interp::eval(agent, stream, eval).await),
        Request::ServiceStart(start) => ok(agent.services.start(*start).await),
        Request::Services => ok(Ok(agent.services.list())),
        Request::Settle(settle) => ok(service::settle(settle).await),
        Request::Clock(clock) => {
            if clock.changes_time() {
                agent.may_change_machine()?;
            }
            ok(clock::clock(clock))
        }
        Request::Identity(identity) => ok(identity::apply(agent, *identity).await),
        Request::Metrics => ok(Ok(metrics::read())),
        Request::Network(network) => {
            agent.may_change_machine()?;
            ok(net::configure(&network))
        }
        Request::ResetConnections => {
            agent.may_change_machine()?;
            ok(Ok(identity::reset_connections()))
        }
        Request::MountVolume(mount) => {
            agent.may_change_machine()?;
            ok(volume::mount_disk(mount).await)
        }
        Request::HoldVolume(hold) => {
            agent.may_change_machine()?;
            ok(volume::hold(hold).await)
        }
        Request::Quiesce(quiesce) => ok(quiesce::quiesce(agent, &quiesce).await),
        Request::Freeze(freeze) => ok(agent.freeze(freeze).await),
        Request::Thaw => ok(agent.thaw()),
        Request::Shutdown(shutdown) => {
            agent.shutdown.set(Some(shutdown));
            ok(Ok(()))
        }
    }
}
