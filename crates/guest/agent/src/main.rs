//! The program that is PID 1 inside a guest: it brings the guest up and then does what the host asks for.
//!
//! Everything runs on one thread, in an event loop that sleeps until something happens: a guest that does
//! nothing must cost nothing. Work that can block for long (files) goes to short-lived helper threads.
#![cfg_attr(not(test), no_main)]

mod agent;
mod args;
mod conn;
mod dial;
mod error;
mod files;
mod process;
mod sys;
mod transport;

use std::rc::Rc;
use std::time::Duration;

use agent::{Agent, Role};
use args::Args;
use transport::Listener;

/// How many helper threads there may be.
const MAX_HELPERS: usize = 8;

/// Runs the agent. Returns the exit status of an agent that is an ordinary process.
#[cfg_attr(test, allow(dead_code))]
fn start() -> i32 {
    sys::prepare_self();
    let args = match Args::parse(std::env::args_os().skip(1)) {
        Ok(args) => args,
        Err(message) => {
            eprintln!("forkd-agent: {message}");
            return 2;
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(MAX_HELPERS)
        .thread_keep_alive(Duration::from_millis(500))
        .thread_stack_size(256 * 1024)
        .build();
    let result = runtime.and_then(|runtime| {
        let local = tokio::task::LocalSet::new();
        local.block_on(&runtime, serve(args))
    });
    match result {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("forkd-agent: {error}");
            1
        }
    }
}

async fn serve(args: Args) -> std::io::Result<()> {
    let agent = Rc::new(Agent::new(Role::Process, None));
    let mut listener = Listener::bind(&args.listen).await?;
    let token: Option<Rc<str>> = args.token.map(Into::into);
    let reaper = Rc::clone(&agent.reaper);
    tokio::task::spawn_local(async move { reaper.run().await });
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
