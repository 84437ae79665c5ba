//! `forkd forward`: local ports that lead to ports of a sandbox, until the command ends.

use std::io;
use std::net::SocketAddr;

use anyhow::Context;
use forkd_rest_client::Client;
use serde_json::json;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::args::ForwardArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliError, CliResult};
use crate::signals::Stop;
use crate::ui::Ui;

/// Runs `forkd forward`.
pub fn run(args: &ForwardArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        let mut stop = Stop::listen()?;
        // A sandbox that does not exist is an error now, not at the first connection.
        client.sandbox(&args.id).await.map_err(failed)?;
        let mut doors = JoinSet::new();
        for pair in &args.ports {
            let listener = bind(pair.local).await?;
            let local = listener.local_addr()?;
            if args.json {
                ui.json(&json!({ "local": local.to_string(), "port": pair.port }))?;
            } else {
                ui.line(format_args!("{local} -> port {} of {}", pair.port, args.id))?;
            }
            let (client, id) = (client.clone(), args.id.clone());
            doors.spawn(accept(client, id, pair.port, listener));
        }
        Ok(stop.asked().await)
    })
}

async fn bind(local: SocketAddr) -> Result<TcpListener, CliError> {
    let bound = TcpListener::bind(local).await;
    let bound = bound.with_context(|| format!("cannot listen on {local}"));
    bound.map_err(|error| CliError::from(error).with_hint("choose another local port, or 0"))
}

async fn accept(client: Client, id: String, port: u16, listener: TcpListener) {
    let mut open = JoinSet::new();
    loop {
        let Ok((local, _)) = listener.accept().await else {
            continue;
        };
        let _ = local.set_nodelay(true);
        let (client, id) = (client.clone(), id.clone());
        open.spawn(async move {
            if let Err(problem) = carry(&client, &id, port, local).await {
                eprintln!("port {port}: {problem}");
            }
        });
        while open.try_join_next().is_some() {}
    }
}

/// Carries one connection to a port of a sandbox. A connection that breaks is reset, so that the local program does not
/// take it for complete.
async fn carry(client: &Client, id: &str, port: u16, mut local: TcpStream) -> Result<(), String> {
    let done = match client.connect_port(id, port).await {
        Ok(mut guest) => copy_bidirectional(&mut local, &mut guest)
            .await
            .map(drop)
            .map_err(|error: io::Error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    if done.is_err() {
        let now = Some(std::time::Duration::ZERO);
        let _ = rustix::net::sockopt::set_socket_linger(&local, now);
    }
    done
}
