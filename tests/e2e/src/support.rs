//! Helpers that several scenarios use: warm parents, freezing, a network back end without a reader.

use std::os::fd::OwnedFd;

use anyhow::{Context, ensure};
use forkd_guest_proto::{InterpStart, QuiesceRequest, Warmup};
use forkd_testkit::{BootOptions, Frozen, Kit, Vm};
use forkd_vmm_proto::{NetBackend, VmmError};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

/// Boots a VM and warms up a Python interpreter with NumPy, as the recipe does.
pub async fn warm_python(kit: &Kit, options: BootOptions) -> anyhow::Result<Vm> {
    let vm = kit.boot(options).await?;
    let info = vm
        .agent()
        .await?
        .interp_start(InterpStart {
            language: "python".into(),
            warmup: Warmup {
                imports: vec!["numpy as np".into(), "random".into(), "os".into()],
                code: "_ = (np.ones((8, 8)) @ np.ones((8, 8))).sum()".into(),
            },
            ..Default::default()
        })
        .await?;
    ensure!(info.warmup_error.is_none(), "{info:?}");
    Ok(vm)
}

/// Quiesces a VM and freezes it.
pub async fn freeze(vm: Vm) -> anyhow::Result<Frozen> {
    vm.agent().await?.quiesce(QuiesceRequest::default()).await?;
    vm.freeze().await
}

/// A network device whose other end is never read. Keep that end as long as the VM.
pub fn deaf_network() -> anyhow::Result<(OwnedFd, (NetBackend, OwnedFd))> {
    let (near, far) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    Ok((near, (NetBackend::Socket, far)))
}

/// The VMM's error in an error of the kit.
pub fn vmm_error(error: &anyhow::Error) -> anyhow::Result<&VmmError> {
    error
        .chain()
        .find_map(|cause| cause.downcast_ref::<VmmError>())
        .with_context(|| format!("not a word of the VMM: {error:?}"))
}
