//! One parent, from boot to snapshot.

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_agent_client::{Calls, Client, Deadline, Options};
use forkd_api::{ErrorCode, SnapshotInfo};
use forkd_guest_proto::{
    EvalMode, EvalRequest, ExecRequest, FreezeRequest, InterpStart, QuiesceRequest, Warmup,
};
use forkd_store::{
    Cpu, DiskManifest, Ingested, Manifest, MemoryManifest, Origin, SCHEMA, Source, Staging,
    Versions,
};
use forkd_types::{SandboxId, Tag};
use forkd_vmm_link::{Vmm, VmmEvents};
use forkd_vmm_proto::{AGENT_PORT, Command, CutReport, CutSpec, Event, LINUX_CMDLINE, Reply};

use super::BuildRequest;
use super::assets::Assets;
use crate::app::App;
use crate::clock;
use crate::error::Error;
use crate::launch::{self, BootInput, FdList, NewDisk, VmFiles};
use crate::sandbox::create::EPOCH;

/// What the guest sees as the serial number of its root disk.
const SERIAL: &str = "root";

/// How long the processes of a parent may take to freeze, milliseconds. A warm-up may leave one that waits for a disk.
const FREEZE_MS: u64 = 30_000;

/// A parent that runs.
struct Parent {
    id: SandboxId,
    files: VmFiles,
    vmm: Vmm,
    events: VmmEvents,
    started: Instant,
}

/// Boots a parent, warms it up, cuts it and stores the cut.
pub async fn make(
    app: &Arc<App>,
    request: &BuildRequest,
    tag: &Tag,
    assets: Assets,
) -> Result<SnapshotInfo, Error> {
    let base = ingest_base(app, &assets).await?;
    let shape = launch::shape(assets.memory_mib, assets.vcpus, Cpu::Host);
    let id = SandboxId::from_parts(clock::unix(), rand::random());
    let taken = app.launcher.take(shape, std::slice::from_ref(&id)).await?;
    let Some(taken) = taken.into_iter().next() else {
        return Err(Error::refused(
            ErrorCode::LaunchFailed,
            "the VMM process ended before it could be used",
        ));
    };
    let result = async {
        let files = {
            let id = id.clone();
            let disk = NewDisk {
                slot: 0,
                size: base.blob.bytes,
            };
            app.blocking(move |app| app.dirs.create(&id, &[disk], app.config.disk_limit_bytes))
                .await?
        };
        let (vmm, events) = Vmm::new(taken.control, EPOCH)
            .map_err(Error::io("use", "the control socket of a VMM"))?;
        let parent = Parent {
            id: id.clone(),
            files,
            vmm,
            events,
            started: Instant::now(),
        };
        let limit = tokio::time::timeout(
            request.timeout,
            parent.run(app, request, tag, &assets, base),
        );
        limit.await.map_err(|_| Error::Timeout {
            what: format!("building {tag}"),
            seconds: request.timeout.as_secs(),
        })?
    }
    .await;
    let console = console_tail(app, &id);
    if let Err(error) = app.launcher.kill(&id).await {
        tracing::warn!(sandbox = %id, error = crate::error::chain(&error), "the parent's VMM was not ended");
    }
    app.blocking({
        let id = id.clone();
        move |app| {
            app.dirs.remove(&id);
            Ok(())
        }
    })
    .await?;
    result.map_err(|error| with_console(error, &console))
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
    let path = assets.disk.clone();
    let same = assets.immutable;
    app.blocking(move |app| {
        let ingested = if same {
            // Another file system does not share names; then it is copied.
            app.store
                .ingest(&path)
                .or_else(|_| app.store.ingest_copy(&path))
        } else {
            app.store.ingest_copy(&path)
        };
        ingested.map_err(Error::store("the root disk could not be stored"))
    })
    .await
}

impl Parent {
    async fn run(
        mut self,
        app: &Arc<App>,
        request: &BuildRequest,
        tag: &Tag,
        assets: &Assets,
        base: Ingested,
    ) -> Result<SnapshotInfo, Error> {
        let cmdline = LINUX_CMDLINE.to_owned();
        self.boot(app, assets, &base, &cmdline).await?;
        // One deadline for all of it, which is that of the request.
        let client = self.agent(app).await?;
        let client = client.by(Deadline::within(request.timeout));
        warm_up(&client, request, assets).await?;
        let ready_us = clock::micros(self.started.elapsed());
        metrics::histogram!("forkd_parent_ready_seconds")
            .record(self.started.elapsed().as_secs_f64());
        let versions = Versions {
            forkd: env!("CARGO_PKG_VERSION").to_owned(),
            vmm: env!("CARGO_PKG_VERSION").to_owned(),
            agent: client.hello().program.clone(),
            numpy: numpy_version(&client, assets).await,
        };
        client
            .quiesce(QuiesceRequest::default())
            .await
            .map_err(Error::agent("the parent could not be prepared for the cut"))?;
        // Children thaw their processes once their identity is in force. The parent itself is not needed after the cut.
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
        let (staging, report) = self.cut(app).await?;
        tracing::info!(%tag, pages = report.pages_written, ready_us, "parent cut");
        let layer = self.files.layers.first().map(|(name, _)| name.clone());
        let id = self.id.clone();
        let tag = tag.clone();
        let assets = assets.clone();
        let labels = request.labels.clone();
        app.blocking(move |app| {
            let written = Written::ingest(app, &id, &staging, layer.as_deref())?;
            let manifest = Manifest {
                labels,
                versions,
                ..written.manifest(tag, &assets, &base, cmdline, ready_us)
            };
            let published = app
                .store
                .publish(manifest)
                .map_err(Error::store("the snapshot could not be stored"))?;
            Ok(crate::snapshots::info(app, &published.manifest))
        })
        .await
    }

    async fn boot(
        &self,
        app: &Arc<App>,
        assets: &Assets,
        base: &Ingested,
        cmdline: &str,
    ) -> Result<(), Error> {
        let open = |path: &std::path::Path| File::open(path).map_err(Error::io("open", path));
        let input = BootInput {
            kernel: open(&assets.kernel)?,
            initramfs: Some(open(&assets.initramfs)?),
            cmdline: cmdline.to_owned(),
            base: app
                .store
                .open_blob(&base.blob.digest)
                .map_err(Error::store("the root disk cannot be opened"))?,
            read_only: false,
            serial: SERIAL.to_owned(),
        };
        launch::boot(&self.vmm, &input, &self.files).await
    }

    /// Waits until the agent says that it is ready.
    async fn agent(&mut self, app: &Arc<App>) -> Result<Client, Error> {
        loop {
            match self.events.next().await.map(|event| event.event) {
                Some(Event::AgentReady) => break,
                Some(Event::Stopped { cause }) => return Err(self.gone(format!("{cause:?}"))),
                Some(_) => {}
                None => return Err(self.gone("the VMM process ended".into())),
            }
        }
        let options = Options {
            timeout: Duration::from_secs(60),
            budget: crate::agent_limits::BUDGET.clone(),
            ..Options::default()
        };
        Client::connect_vsock(&app.dirs.vsock(&self.id), AGENT_PORT, options)
            .await
            .map_err(|error| {
                Error::refused(
                    ErrorCode::AgentUnreachable,
                    format!(
                        "the parent's agent does not answer: {}",
                        crate::error::chain(&error)
                    ),
                )
            })
    }

    fn gone(&self, how: String) -> Error {
        Error::Gone {
            id: self.id.clone(),
            how,
        }
    }

    /// Cuts the parent and leaves it standing: it is not needed any more.
    async fn cut(&self, app: &Arc<App>) -> Result<(Staging, CutReport), Error> {
        let (staging, state, memory) = app
            .blocking(|app| {
                let staging = app
                    .store
                    .stage()
                    .map_err(Error::store("no place to write the cut"))?;
                let create = |name: &str| {
                    staging
                        .create(name)
                        .map_err(Error::store("no place to write the cut"))
                };
                let (state, memory) = (create("state")?, create("memory")?);
                Ok((staging, state, memory))
            })
            .await?;
        let mut fds = FdList::default();
        let spec = CutSpec {
            state: fds.push(&state),
            memory: fds.push(&memory),
            only_changed: false,
            onto: 0,
            index: None,
            new_layers: Vec::new(),
            resume: false,
        };
        let reply = self
            .vmm
            .call(Command::Cut(spec), &fds.finish()?)
            .await
            .map_err(Error::vmm("the parent could not be cut"))?;
        match reply {
            Reply::Cut(report) => Ok((staging, report)),
            _ => Err(Error::Task),
        }
    }
}

async fn warm_up(client: &Calls, request: &BuildRequest, assets: &Assets) -> Result<(), Error> {
    if let Some(warmup) = &assets.warmup {
        let started = client
            .interp_start(InterpStart {
                language: warmup.interpreter.clone(),
                env: assets
                    .env
                    .iter()
                    .map(|(key, value)| (key.clone(), Some(value.clone())))
                    .collect(),
                warmup: Warmup {
                    imports: warmup.imports.clone(),
                    code: warmup.code.clone(),
                },
                timeout_ms: Some(u64::try_from(request.timeout.as_millis()).unwrap_or(u64::MAX)),
                ..InterpStart::default()
            })
            .await
            .map_err(Error::agent("the interpreter could not be warmed up"))?;
        if let Some(error) = started.warmup_error {
            return Err(Error::refused(
                ErrorCode::AgentFailed,
                format!(
                    "the image's warm-up raised {}: {}",
                    error.name, error.message
                ),
            ));
        }
    } else {
        // Every child would have to start it; a guest without one is as good.
        let python = InterpStart {
            language: "python".to_owned(),
            timeout_ms: Some(u64::try_from(request.timeout.as_millis()).unwrap_or(u64::MAX)),
            ..InterpStart::default()
        };
        if let Err(error) = client.interp_start(python).await {
            tracing::info!(error = crate::error::chain(&error), "no warm interpreter");
        }
    }
    if !request.warmup.is_empty() {
        let done = client
            .exec_capture(ExecRequest {
                argv: request.warmup.clone(),
                ..ExecRequest::default()
            })
            .await
            .map_err(Error::agent("the warm-up command could not be run"))?;
        if !done.result.status.success() {
            let stderr: String = String::from_utf8_lossy(&done.stderr)
                .chars()
                .take(500)
                .collect();
            return Err(Error::refused(
                ErrorCode::AgentFailed,
                format!(
                    "the warm-up command ended with {:?}: {}",
                    done.result.status,
                    stderr.trim()
                ),
            ));
        }
    }
    if let Some(code) = &request.warmup_code {
        let done = client
            .eval(EvalRequest {
                code: code.clone(),
                mode: EvalMode::Auto,
                ..EvalRequest::default()
            })
            .await
            .map_err(Error::agent("the warm-up code could not be run"))?;
        if let Some(error) = done.result.error {
            return Err(Error::refused(
                ErrorCode::AgentFailed,
                format!("the warm-up code raised {}: {}", error.name, error.message),
            ));
        }
    }
    Ok(())
}

/// NumPy in the warm interpreter; empty if it is not loaded.
async fn numpy_version(client: &Calls, assets: &Assets) -> String {
    if assets
        .warmup
        .as_ref()
        .is_none_or(|warmup| warmup.interpreter != "python")
    {
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

/// What the cut of a parent left, as content.
struct Written {
    state: Ingested,
    memory: Ingested,
    layer: Option<Ingested>,
}

impl Written {
    fn ingest(
        app: &App,
        id: &SandboxId,
        staging: &Staging,
        layer: Option<&str>,
    ) -> Result<Self, Error> {
        let store = |path: &std::path::Path| {
            app.store
                .ingest(path)
                .map_err(Error::store("the cut could not be stored"))
        };
        Ok(Self {
            state: store(&staging.file("state"))?,
            memory: store(&staging.file("memory"))?,
            layer: layer
                .map(|name| store(&app.dirs.vm(id).join(name)))
                .transpose()?,
        })
    }

    fn manifest(
        &self,
        tag: Tag,
        assets: &Assets,
        base: &Ingested,
        cmdline: String,
        ready_us: u64,
    ) -> Manifest {
        Manifest {
            schema: SCHEMA,
            tag,
            created_at_unix: clock::unix(),
            memory_mib: assets.memory_mib,
            vcpus: assets.vcpus,
            cpu: Cpu::Host,
            state: self.state.blob,
            memory: MemoryManifest {
                layers: vec![self.memory.blob],
                index: None,
            },
            disks: vec![DiskManifest {
                base: base.blob,
                layers: self.layer.iter().map(|layer| layer.blob).collect(),
                read_only: false,
                serial: SERIAL.to_owned(),
            }],
            network: false,
            source: Source {
                image: assets.image.clone(),
                kernel: assets.kernel.display().to_string(),
                kernel_digest: None,
                initramfs_digest: None,
                cmdline,
            },
            parent: None,
            origin: Origin::Boot { ready_us },
            versions: Versions::default(),
            labels: std::collections::BTreeMap::new(),
        }
    }
}
