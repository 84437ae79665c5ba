//! Tells the host that the agent listens.

use forkd_guest_proto::READY_PORT;
use tokio_vsock::{VMADDR_CID_HOST, VsockAddr, VsockStream};

/// Connects to the host once. That the host sees it is all it is for, so what comes of it does not matter.
pub async fn say_ready() {
    let _ = VsockStream::connect(VsockAddr::new(VMADDR_CID_HOST, READY_PORT)).await;
}
