//! The server on standard input and output of this process.

use rmcp::ServiceExt;
use rmcp::service::RoleServer;
use rmcp::transport::async_rw::AsyncRwTransport;
use rmcp::transport::stdio_pipes;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::server::Tools;

/// The longest message of a client, in bytes: a file of 1 MiB in base64, and room for the rest.
const MAX_MESSAGE: usize = 4 << 20;

/// Why the server ended early.
#[derive(Debug, Error)]
pub enum Error {
    /// The client did not begin as the protocol asks.
    #[error("the client does not speak the Model Context Protocol")]
    Start(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The task of the server failed.
    #[error("the server failed")]
    Task(#[from] tokio::task::JoinError),
}

/// Serves until standard input ends. Commands of unanswered calls are killed then.
pub async fn serve(tools: Tools) -> Result<(), Error> {
    let (input, output) = stdio_pipes();
    serve_on(tools, input, output).await
}

/// Serves until `input` ends.
pub async fn serve_on(
    tools: Tools,
    input: impl AsyncRead + Send + Unpin + 'static,
    output: impl AsyncWrite + Send + Unpin + 'static,
) -> Result<(), Error> {
    let transport: AsyncRwTransport<RoleServer, _, _> =
        AsyncRwTransport::new(input, output).with_max_line_length(MAX_MESSAGE);
    let running = tools
        .serve(transport)
        .await
        .map_err(|error| Error::Start(Box::new(error)))?;
    running.waiting().await?;
    Ok(())
}
