//! One parent, from boot to snapshot.
//!
//! [`make`] boots a VM, waits for its agent, warms it up, cuts it and stores the cut. The parent has an owner like any
//! sandbox, but is not registered: no request can name it.

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_agent_client::{Calls, Client, Deadline};
use forkd_api::{ErrorCode, SnapshotInfo};
use forkd_formats::image::Interpreter;
use forkd_guest_proto::{EvalMode, EvalRequest, ExecRequest, FreezeRequest, QuiesceRequest};
use forkd_store::{Cpu, Ingested, Source};
use forkd_types::{Engine, SandboxId, Tag};
use forkd_vmm_link::Vmm;
use forkd_vmm_proto::spawn::Limits;
use forkd_vmm_proto::{Event, LINUX_CMDLINE};
use tokio_util::sync::CancellationToken;

use super::assets::{Assets, HostFile, RootDisk};
use super::{BuildRequest, cancelled, prepare};
use crate::app::App;
use crate::clock;
use crate::error::Error;
use crate::launch::{self, BootInput, VmFiles};
use crate::ops::volumes;
use crate::ops::writing::Claimed;
use crate::sandbox::birth::EPOCH;
use crate::sandbox::cut::{AboutParent, cut_parent};
use crate::sandbox::layers::vm_files;
use crate::sandbox::owner::SandboxOwner;
use crate::state::{DiskStack, SandboxRecord};

/// The serial number of the root disk in the guest.
const SERIAL: &str = "root";
/// Disks that a parent boots with.
const ROOT_DISKS: usize = 1;
/// How long the processes of a parent may take to freeze, in milliseconds. A warm-up may leave one that waits for a disk.
const FREEZE_MS: u64 = 30_000;
/// How long the agent of a parent that says it is ready may take to answer.
const CONNECT: Duration = Duration::from_secs(60);

/// A parent with its VM. It has an owner like any sandbox, but is not registered: no request can name it.
struct Parent {
    owner: SandboxOwner,
    files: VmFiles,
    started: Instant,
}

/// Boots a parent, warms it up, cuts it and stores the cut.
pub async fn make(
    app: &Arc<App>,
    request: &BuildRequest,
    claim: Claimed,
    cancel: &CancellationToken,
    assets: Assets,
) -> (Result<SnapshotInfo, Error>, Option<Claimed>) {
    let id = SandboxId::from_parts(clock::unix(), rand::random());
    let tag = claim.tag().clone();
    let mut claim = Some(claim);
    let building = build_vm(app, request, &id, &mut claim, &assets);
    let result = tokio::select! {
        biased;
        () = cancel.cancelled() => Err(cancelled(&tag)),
        result = tokio::time::timeout(request.timeout, building) => match result {
            Ok(result) => result,
            Err(_) => Err(Error::Timeout {
                what: "the build of the parent".to_owned(),
                seconds: request.timeout.as_secs(),
            }),
        },
    };
    let console = console_tail(app, &id);
    if let Err(error) = app.launcher.kill(&id).await {
        tracing::warn!(sandbox = %id, error = crate::error::chain(&error), "the parent's VMM was not ended");
    }
    let removed = app
        .blocking(move |app| {
            app.dirs.remove(&id);
            Ok(())
        })
        .await;
    let result = result.map_err(|error| with_console(error, &console));
    (result.and_then(|info| removed.map(|()| info)), claim)
}

async fn build_vm(
    app: &Arc<App>,
    request: &BuildRequest,
    id: &SandboxId,
    claim: &mut Option<Claimed>,
    assets: &Assets,
) -> Result<SnapshotInfo, Error> {
    let engine = launch::engine::for_parent(&app.launcher, request.engine).await?;
    let base = ingest_base(app, assets).await?;
    let tag = claim.as_ref().ok_or(Error::Task)?.tag().clone();
    let mut record = record(id.clone(), tag, engine, assets, &base);
    volumes::check_parent(&request.volumes, &record)?;
    let wishes = &request.volumes;
    // The leases keep the content until the owner of the parent has one.
    let leases = volumes::give(app, wishes, std::slice::from_mut(&mut record)).await?;
    let mut parent = Parent::launch(app, record, assets).await?;
    drop(leases);
    parent.boot(assets, &base).await?;
    volumes::attach(&parent.owner, ROOT_DISKS, &parent.files).await?;
    let client = parent.agent().await?;
    volumes::mount(&client, &parent.owner.sandbox.record(), ROOT_DISKS).await?;
    // One deadline for all calls, which is that of the request.
    let client = client.by(Deadline::within(request.timeout));
    prepare::prepare(&client, request, assets).await?;
    let about = AboutParent {
        ready_us: clock::micros(parent.started.elapsed()),
        labels: request.labels.clone(),
    };
    metrics::histogram!("forkd_parent_ready_seconds")
        .record(parent.started.elapsed().as_secs_f64());
    parent.describe(&client, assets).await?;
    warm_exec(&client).await;
    client
        .quiesce(QuiesceRequest::default())
        .await
        .map_err(Error::agent("the parent could not be prepared for the cut"))?;
    // Children thaw their processes once their identity is in force. The parent is not needed after the cut.
    client
        .freeze(FreezeRequest {
            timeout_ms: Some(FREEZE_MS),
        })
        .await
        .map_err(Error::agent(
            "the processes of the parent could not be frozen",
        ))?;
    client.close();
    drop(client);
    let owned = claim.take().ok_or(Error::Task)?;
    if owned.forbid_cancel() {
        let error = cancelled(owned.tag());
        *claim = Some(owned);
        return Err(error);
    }
    let (done, given_back) = cut_parent(&mut parent.owner, owned, about).await;
    *claim = Some(given_back);
    Ok(done?.info)
}

/// The end of what a parent printed, for the one who asks why it did not come up.
fn console_tail(app: &App, id: &SandboxId) -> String {
    let bytes = std::fs::read(app.dirs.console(id)).unwrap_or_default();
    let tail = bytes
        .get(bytes.len().saturating_sub(600)..)
        .unwrap_or_default();
    String::from_utf8_lossy(tail)
        .chars()
        .filter(|c| !c.is_control() || *c == '\n')
        .collect()
}

fn with_console(error: Error, console: &str) -> Error {
    if console.is_empty() {
        return error;
    }
    let hint = format!("the end of the parent's console: {}", console.trim());
    match error.code() {
        code @ (ErrorCode::Timeout | ErrorCode::SandboxGone | ErrorCode::AgentUnreachable) => {
            Error::hinted(code, error.chain(), hint)
        }
        _ => error,
    }
}

async fn ingest_base(app: &Arc<App>, assets: &Assets) -> Result<Ingested, Error> {
    let disk = assets.disk.clone();
    app.blocking(move |app| {
        let ingested = match &disk {
            RootDisk::Installed(path) => match app.store.ingest_own(path) {
                Ok(linked) => Ok(linked),
                // Another file system does not share names; then it is copied.
                Err(_) => {
                    let file = File::open(path).map_err(Error::io("open", path))?;
                    app.store.ingest_copy(&file)
                }
            },
            RootDisk::Named(disk) => app.store.ingest_copy(&disk.file),
        };
        ingested.map_err(Error::store("the root disk could not be stored"))
    })
    .await
}

impl Parent {
    async fn launch(app: &Arc<App>, record: SandboxRecord, assets: &Assets) -> Result<Self, Error> {
        let shape = launch::shape(record.engine, assets.memory_mib, assets.vcpus, Cpu::Host);
        let taken = app
            .launcher
            .take(shape, std::slice::from_ref(&record.id), &Limits::default())
            .await?;
        let taken = taken.into_iter().next().ok_or_else(|| {
            Error::refused(
                ErrorCode::LaunchFailed,
                "the VMM process ended before it could be used",
            )
        })?;
        let (files, record) = app
            .blocking(move |app| {
                let files = vm_files(app, &record)?;
                Ok((files, record))
            })
            .await?;
        let (vmm, events) = Vmm::new(taken.control, EPOCH, taken.vm.capabilities)
            .map_err(Error::io("use", "the control socket of a VMM"))?;
        let owner = SandboxOwner::of_parent(app, record, vmm, events);
        owner
            .save(|record| {
                record.add_layers(files.layers.iter().map(|layer| (layer.slot, &layer.name)));
            })
            .await?;
        Ok(Self {
            owner,
            files,
            started: Instant::now(),
        })
    }

    async fn boot(&self, assets: &Assets, base: &Ingested) -> Result<(), Error> {
        let clone = |host: &HostFile| host.file.try_clone().map_err(Error::io("use", &host.path));
        let input = BootInput {
            kernel: clone(&assets.kernel)?,
            initramfs: Some(clone(&assets.initramfs)?),
            cmdline: cmdline(),
            base: self
                .owner
                .app
                .store
                .open_blob(&base.blob.digest)
                .map_err(Error::store("the root disk cannot be opened"))?,
            read_only: false,
            serial: SERIAL.to_owned(),
            spare_disks: self.empty_slots(),
        };
        launch::boot(&self.owner.vmm, &input, &self.files).await
    }

    /// Disk slots that are empty at boot: volumes are attached to the first of them.
    fn empty_slots(&self) -> u8 {
        let record = self.owner.sandbox.record();
        let attached = record.disks.len().saturating_sub(ROOT_DISKS);
        record.spare_disks + u8::try_from(attached).unwrap_or(0)
    }

    /// Waits until the agent says that it is ready.
    async fn agent(&mut self) -> Result<Client, Error> {
        let sandbox = Arc::clone(&self.owner.sandbox);
        let gone = |how: String| Error::Gone {
            id: sandbox.id.clone(),
            how,
        };
        loop {
            match self.owner.events.next().await.map(|event| event.event) {
                Some(Event::AgentReady) => break,
                Some(Event::Stopped { cause }) => return Err(gone(format!("{cause:?}"))),
                Some(_) => {}
                None => return Err(gone("the VMM process ended".into())),
            }
        }
        sandbox.connect(CONNECT).await.map_err(|error| {
            Error::refused(
                ErrorCode::AgentUnreachable,
                format!(
                    "the parent's agent does not answer: {}",
                    crate::error::chain(&error)
                ),
            )
        })
    }

    /// Notes the versions of the programs in the guest.
    async fn describe(&self, client: &Calls, assets: &Assets) -> Result<(), Error> {
        let agent = client.hello().program.clone();
        let numpy = numpy_version(client, assets).await;
        self.owner
            .save(|record| {
                record.agent = agent;
                record.numpy = numpy;
            })
            .await?;
        Ok(())
    }
}

/// Runs two small programs, so that children find the way to a process in memory: the loader, the C library, the shell.
/// An image without them is as good.
async fn warm_exec(client: &Calls) {
    for argv in [&["true"][..], &["sh", "-c", ":"]] {
        let request = ExecRequest {
            argv: argv.iter().map(ToString::to_string).collect(),
            ..ExecRequest::default()
        };
        if let Err(error) = client.exec_capture(request).await {
            tracing::debug!(error = crate::error::chain(&error), "no program to warm up");
        }
    }
}

/// NumPy in the warm interpreter; empty if it is not loaded.
async fn numpy_version(client: &Calls, assets: &Assets) -> String {
    if !prepare::is_warm(&assets.prepare, Interpreter::Python) {
        return String::new();
    }
    let code = "getattr(__import__('sys').modules.get('numpy'), '__version__', '')";
    let request = EvalRequest {
        code: code.to_owned(),
        mode: EvalMode::Eval,
        ..EvalRequest::default()
    };
    match client.eval(request).await {
        Ok(done) => done
            .result
            .json
            .and_then(|value| value.parse::<String>().ok())
            .unwrap_or_default(),
        Err(_) => String::new(),
    }
}

/// The kernel command line of every parent. Pages that a guest frees are cleared: they would take space in snapshots, and
/// may hold secrets (decision 38).
fn cmdline() -> String {
    format!("{LINUX_CMDLINE} init_on_free=1 {}", launch::network_words())
}

/// The parent as a sandbox. Its first snapshot has the tag that is built, and no snapshot lies below it.
fn record(
    id: SandboxId,
    tag: Tag,
    engine: Engine,
    assets: &Assets,
    base: &Ingested,
) -> SandboxRecord {
    SandboxRecord {
        engine,
        tag,
        memory_mib: assets.memory_mib,
        vcpus: assets.vcpus,
        disks: vec![DiskStack {
            base: base.blob,
            layers: Vec::new(),
            read_only: false,
            serial: SERIAL.to_owned(),
        }],
        source: Source {
            image: assets.image.clone(),
            kernel: assets.kernel.path.display().to_string(),
            kernel_digest: None,
            initramfs_digest: None,
            cmdline: cmdline(),
        },
        // The other engine cannot give a device a disk later.
        spare_disks: if engine == Engine::FORKD {
            launch::SPARE_DISKS
        } else {
            0
        },
        ..SandboxRecord::unreadable(id)
    }
}
