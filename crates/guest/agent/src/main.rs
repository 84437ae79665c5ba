//! The program that is PID 1 inside a guest: it brings the guest up and then carries out requests of the host.
//!
//! Everything runs on one thread, in an event loop that sleeps until something happens: a guest that does
//! nothing must cost nothing. Work that can block for long (files) goes to short-lived helper threads.
#![cfg_attr(not(test), no_main)]

mod agent;
mod args;
mod boot;
mod button;
mod clock;
mod conn;
mod dial;
mod error;
mod files;
mod identity;
mod interp;
mod metrics;
mod mounting;
mod net;
mod process;
mod procfs;
mod quiesce;
mod ready;
mod service;
mod shutdown;
mod sys;
mod transport;
mod user_group;
mod volume;

use std::rc::Rc;
use std::time::Duration;

use agent::{Agent, Role};
use args::Args;
use transport::{Address, Listener};
use user_group::UserGroup;

/// How many helper threads there may be.
const MAX_HELPERS: usize = 8;

/// Runs the agent. Returns the exit status of an agent that is an ordinary process.
#[cfg_attr(test, allow(dead_code))]
fn start() -> i32 {
    sys::prepare_self();
    let plan = if boot::is_first_process() {
        Plan::boot()
    } else {
        Plan::from_arguments()
    };
    let plan = match plan {
        Ok(plan) => plan,
        Err(message) => return give_up(&message),
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(MAX_HELPERS)
        .thread_keep_alive(Duration::from_millis(500))
        .thread_stack_size(256 * 1024)
        .build();
    let result = runtime.and_then(|runtime| {
        let local = tokio::task::LocalSet::new();
        local.block_on(&runtime, serve(plan))
    });
    match result {
        Ok(()) => 0,
        Err(error) => give_up(&error.to_string()),
    }
}

/// A first process must not return: the kernel would panic without saying why.
#[cfg_attr(test, allow(dead_code))]
fn give_up(message: &str) -> i32 {
    boot::say(message);
    if boot::is_first_process() {
        shutdown::power_off_now();
    }
    1
}

/// The set-up of this agent.
struct Plan {
    role: Role,
    listen: Address,
    token: Option<String>,
    cgroup: Option<UserGroup>,
}

#[cfg_attr(test, allow(dead_code))]
impl Plan {
    fn boot() -> Result<Self, String> {
        let booted = boot::bring_up().map_err(|error| error.to_string())?;
        Ok(Self {
            role: booted.role,
            listen: booted.listen,
            token: booted.token,
            cgroup: booted.cgroup,
        })
    }

    fn from_arguments() -> Result<Self, String> {
        let args = Args::parse(std::env::args_os().skip(1))?;
        let role = Role::Process;
        Ok(Self {
            role,
            listen: args.listen,
            token: args.token,
            cgroup: args
                .cgroup
                .map(|path| {
                    UserGroup::open(&path)
                        .map_err(|error| format!("cannot use {}: {error}", path.display()))
                })
                .transpose()?,
        })
    }
}

#[cfg_attr(test, allow(dead_code))]
async fn serve(plan: Plan) -> std::io::Result<()> {
    let agent = Rc::new(Agent::new(plan.role, plan.cgroup));
    let reaper = Rc::clone(&agent.reaper);
    tokio::task::spawn_local(async move { reaper.run().await });
    shutdown::on_signals(&agent)?;
    boot::finish(plan.role, &agent.reaper).await;
    button::watch(&agent);
    let mut listener = Listener::bind(&plan.listen).await?;
    if matches!(plan.listen, Address::Vsock(_)) {
        tokio::task::spawn_local(ready::say_ready());
    }
    let token: Option<Rc<str>> = plan.token.map(Into::into);
    loop {
        match listener.accept().await {
            Ok(io) => {
                tokio::task::spawn_local(conn::serve(Rc::clone(&agent), io, token.clone()));
            }
            // Out of descriptors or memory: what runs will give some back.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}
