//! Connections to a port of a guest.

use forkd_agent_client::{Calls, Dialled, DialledIo, Error as AgentError};
use forkd_api::ErrorCode;
use forkd_guest_proto::DialRequest;
use forkd_net_proto::GUEST_ADDRESS;
use tokio::io::{AsyncRead, AsyncWrite, copy_bidirectional};

use crate::agent_limits;
use crate::error::Error;
use crate::sandbox::SandboxHandle;

/// Connects to a port of a guest. The connection breaks at the next roll-back of the sandbox.
pub async fn dial(sandbox: &SandboxHandle, port: u16) -> Result<DialledIo, Error> {
    let era = sandbox.era();
    let dialling = async {
        let client = sandbox.agent().await?;
        connect(&client.by(agent_limits::answer()), port).await
    };
    let dialled = tokio::select! {
        dialled = dialling => dialled?,
        () = era.cancelled() => return Err(Error::hinted(
            ErrorCode::PortClosed,
            format!("sandbox {} was rolled back", sandbox.id),
            "connect again",
        )),
    };
    Ok(dialled.into_io(era.cancelled_owned()))
}

/// Connects to the first address of the guest on which something listens.
async fn connect(calls: &Calls, port: u16) -> Result<Dialled, Error> {
    let own = std::net::Ipv4Addr::from(GUEST_ADDRESS);
    let addresses = [
        format!("127.0.0.1:{port}"),
        format!("[::1]:{port}"),
        format!("{own}:{port}"),
    ];
    let mut refusal = None;
    for address in addresses {
        match calls.dial(DialRequest::Tcp(address)).await {
            Ok(dialled) => return Ok(dialled),
            Err(error) if is_refusal(&error) => refusal = Some(error),
            // A guest without IPv6 or without a network device does not have the address; 127.0.0.1 it has.
            Err(AgentError::Agent(_)) if refusal.is_some() => {}
            Err(error) => {
                let action = format!("port {port} of the guest cannot be reached");
                return Err(Error::agent(action)(error));
            }
        }
    }
    Err(Error::refused(
        ErrorCode::PortClosed,
        format!("nothing listens on port {port} of the guest"),
    ))
}

fn is_refusal(error: &AgentError) -> bool {
    let refused = rustix::io::Errno::CONNREFUSED.raw_os_error();
    matches!(error, AgentError::Agent(answer) if answer.errno == Some(refused))
}

/// Carries bytes both ways until both sides are at their end. An error is a connection that broke: the caller must not
/// let it look like a normal end.
pub async fn relay(
    mut client: impl AsyncRead + AsyncWrite + Unpin,
    mut guest: DialledIo,
) -> std::io::Result<()> {
    copy_bidirectional(&mut client, &mut guest).await.map(drop)
}
