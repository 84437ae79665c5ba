//! `forkd pack`, `unpack`, `push` and `pull`: snapshots as artifacts in files, folders, registries, object stores.

mod target;

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use forkd_api::{MemoryWish, UnpackWay};
use forkd_hub::HubError;
use forkd_hub::archive::StreamWriter;
use forkd_hub::documents::{Documents, Signature};
use forkd_hub::layout::{ArchiveFile, Content, Place, Shelf, load};
use forkd_hub::manifest::Descriptor;
use forkd_hub::sign::{self, Signers};
use forkd_rest_client::Client;
use futures::StreamExt;
use serde::Serialize;

use crate::args::{Memory, PackArgs, PackOptions, PushArgs, UnpackArgs};
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliError, CliResult, Exit};
use crate::signals::Stop;
use crate::ui::Ui;

use target::Target;

const MIB: f64 = 1_048_576.0;

/// An artifact that was written, as `--json` shows it.
#[derive(Debug, Serialize)]
struct Written {
    tag: String,
    target: String,
    digest: String,
    /// Bytes of all packs.
    bytes: u64,
    /// Bytes of the packs that were written now.
    new_bytes: u64,
    signed: bool,
}

/// Adds the hint of an error about artifacts.
fn refused(error: HubError) -> CliError {
    let hint = error.hint();
    CliError::new(anyhow::Error::new(error), hint)
}

/// Runs work that Ctrl-C ends. Drafts are removed when the work is dropped.
fn interruptible(work: impl Future<Output = CliResult>) -> CliResult {
    block_on(async {
        let mut stop = Stop::listen()?;
        tokio::select! {
            done = work => done,
            exit = stop.asked() => Ok(exit),
        }
    })
}

/// Runs `forkd pack`.
pub fn pack(args: &PackArgs, ui: &Ui) -> CliResult {
    let target = Target::File(args.file.clone(), None);
    share(&args.tag, &target, &args.options, ui)
}

/// Runs `forkd push`.
pub fn push(args: &PushArgs, ui: &Ui) -> CliResult {
    let target = Target::parse(&args.target, target::is_archive)?;
    share(&args.tag, &target, &args.options, ui)
}

fn share(tag: &str, target: &Target, options: &PackOptions, ui: &Ui) -> CliResult {
    let client = connect(&options.daemon)?;
    interruptible(async {
        let name = target
            .name()
            .unwrap_or_else(|| target.default_name(tag))
            .to_owned();
        let shelf = {
            let target = target.clone();
            let opened = tokio::task::spawn_blocking(move || target.shelf());
            opened
                .await
                .map_err(|error| anyhow!(error))?
                .map_err(refused)?
        };
        // The artifact that the target has under this name: its packs are not sent again.
        let base = match &shelf {
            Some(shelf) => {
                let (shelf, name) = (Arc::clone(shelf), name.clone());
                let base = tokio::task::spawn_blocking(move || earlier(shelf.as_ref(), &name));
                base.await
                    .map_err(|error| anyhow!(error))?
                    .map_err(refused)?
            }
            None => Vec::new(),
        };
        let draft = Draft::beside(&target.draft()?);
        fetch(&client, tag, options, base, &draft, ui).await?;
        let work = Finish {
            tag: tag.to_owned(),
            name,
            target: target.clone(),
            shelf,
            sign: options.sign.clone(),
        };
        // The draft goes along, so that an interrupt leaves no file behind.
        let finished = tokio::task::spawn_blocking(move || work.run(&draft));
        let written = finished.await.map_err(|error| anyhow!(error))??;
        if options.json {
            ui.json(&written)?;
        } else {
            ui.line(format_args!("{}", written.digest))?;
            ui.aside(format_args!(
                "{tag}: {:.1} MiB in packs, {:.1} MiB of them new, in {}",
                written.bytes as f64 / MIB,
                written.new_bytes as f64 / MIB,
                written.target
            ));
        }
        Ok(Exit::OK)
    })
}

/// The documents of the artifact that the target has, as a stream. Nothing if it has none, or one of another kind.
fn earlier(shelf: &(dyn Shelf + Send + Sync), name: &str) -> Result<Vec<u8>, HubError> {
    match load(shelf, Some(name)) {
        Ok(documents) => documents_alone(&documents, name),
        // A target that cannot be reached now cannot be written either.
        Err(error @ HubError::Remote(_)) => Err(error),
        Err(_) => Ok(Vec::new()),
    }
}

/// The documents of an artifact as a stream without packs.
fn documents_alone(documents: &Documents, name: &str) -> Result<Vec<u8>, HubError> {
    StreamWriter::begin(Vec::new(), documents, name)?.finish()
}

/// Receives the artifact into a draft.
async fn fetch(
    client: &Client,
    tag: &str,
    options: &PackOptions,
    base: Vec<u8>,
    draft: &Draft,
    ui: &Ui,
) -> Result<(), CliError> {
    let description = options.description.as_deref();
    ui.aside(format_args!("packing {tag}"));
    let packed = client.pack(tag, options.allow_secrets, description, base);
    let (length, mut content) = packed.await.map_err(failed)?;
    let unwritable = || format!("cannot write {}", draft.0.display());
    if let Some(folder) = draft.0.parent().filter(|path| !path.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder).with_context(unwritable)?;
    }
    let mut file = File::create(&draft.0).with_context(unwritable)?;
    let mut progress = Progress::new(ui, "received", length);
    while let Some(chunk) = content.next().await {
        let chunk = chunk.map_err(failed)?;
        file.write_all(&chunk).with_context(unwritable)?;
        progress.add(chunk.len() as u64);
    }
    file.sync_all().with_context(unwritable)?;
    Ok(())
}

/// Everything that is left to do with a draft.
struct Finish {
    tag: String,
    name: String,
    target: Target,
    shelf: Option<Arc<dyn Shelf + Send + Sync>>,
    sign: Option<PathBuf>,
}

impl Finish {
    /// Checks the draft, signs it, and puts it in its place.
    fn run(&self, draft: &Draft) -> Result<Written, CliError> {
        let archive = ArchiveFile::open(&draft.0).map_err(refused)?;
        let mut documents = load(&archive, Some(&self.tag)).map_err(refused)?;
        if let Some(key) = &self.sign {
            let text = signature(key, &documents)?;
            let signature = Signature::of(&documents.artifact, text);
            documents.add_signature(signature).map_err(refused)?;
        }
        let new_bytes = match (&self.shelf, &self.target) {
            (Some(shelf), _) => self.place(shelf.as_ref(), &archive, &documents)?,
            (None, Target::File(path, _)) => self.write(path, &archive, &documents)?,
            (None, target) => {
                let whole = Draft::beside(&target.draft()?);
                let bytes = self.write(&whole.0, &archive, &documents)?;
                target.upload(&whole.0).map_err(refused)?;
                bytes
            }
        };
        Ok(Written {
            tag: self.tag.clone(),
            target: self.target.to_string(),
            digest: documents.artifact.digest.to_string(),
            bytes: documents.artifact.packs.iter().map(|pack| pack.size).sum(),
            new_bytes,
            signed: self.sign.is_some(),
        })
    }

    /// Writes the artifact as one file.
    fn write(
        &self,
        path: &Path,
        archive: &ArchiveFile,
        documents: &Documents,
    ) -> Result<u64, CliError> {
        let whole = Draft::beside(path);
        let file = File::create(&whole.0)
            .with_context(|| format!("cannot write {}", whole.0.display()))?;
        let mut writer = StreamWriter::begin(io::BufWriter::new(file), documents, &self.name)
            .map_err(refused)?;
        let mut bytes = 0;
        for pack in &documents.artifact.packs {
            let content = archive.pack(pack).map_err(refused)?;
            writer.pack(pack, content).map_err(refused)?;
            bytes += pack.size;
        }
        writer.finish().map_err(refused)?;
        std::fs::rename(&whole.0, path)
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(bytes)
    }

    /// Writes the blobs that the target does not have, then the name.
    fn place(
        &self,
        shelf: &dyn Shelf,
        archive: &ArchiveFile,
        documents: &Documents,
    ) -> Result<u64, CliError> {
        for (digest, bytes) in documents.blobs() {
            let blob = Descriptor::new("", digest, bytes.len() as u64);
            put(shelf, &blob, &|| {
                Ok(Box::new(io::Cursor::new(bytes.clone())))
            })?;
        }
        let mut sent = 0;
        for pack in &documents.artifact.packs {
            sent += put(shelf, pack, &|| {
                archive.pack(pack).map_err(io::Error::other)
            })?;
        }
        shelf.publish(&self.name, documents).map_err(refused)?;
        Ok(sent)
    }
}

/// Writes a blob unless it is there. Answers how many bytes were sent.
fn put(shelf: &dyn Shelf, blob: &Descriptor, content: Content<'_>) -> Result<u64, CliError> {
    if shelf.has(blob).map_err(refused)? {
        return Ok(0);
    }
    shelf.put(blob, content).map_err(refused)
}

/// Signs the digest of the manifest. `ssh-keygen` also uses keys of an agent and of hardware tokens.
fn signature(key: &Path, documents: &Documents) -> anyhow::Result<Vec<u8>> {
    let mut child = Command::new("ssh-keygen")
        .args(["-Y", "sign", "-n", sign::NAMESPACE, "-f"])
        .arg(key)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run ssh-keygen, which makes signatures")?;
    if let Some(mut input) = child.stdin.take() {
        let message = sign::message(&documents.artifact.digest);
        input.write_all(message.as_bytes())?;
    }
    let done = child.wait_with_output()?;
    if !done.status.success() {
        bail!("ssh-keygen cannot sign with {}", key.display());
    }
    sign::verified(&documents.artifact.digest, &done.stdout)
        .map_err(|error| anyhow!("the new signature is invalid: {error}"))?;
    Ok(done.stdout)
}

/// Runs `forkd unpack` and `forkd pull`.
pub fn unpack(args: &UnpackArgs, ui: &Ui) -> CliResult {
    let target = Target::parse(&args.source, |path| !path.is_dir())?;
    let place = target.place().map_err(refused)?;
    let documents = load(place.as_ref(), target.name()).map_err(refused)?;
    check_signer(args, &documents, ui)?;
    let client = connect(&args.daemon)?;
    let memory = match args.memory {
        Memory::Auto => MemoryWish::Auto,
        Memory::Require => MemoryWish::Require,
        Memory::Never => MemoryWish::Never,
    };
    let tag = args.tag.as_deref();
    interruptible(async {
        let alone = documents_alone(&documents, &documents.config.name).map_err(refused)?;
        let plan = client.check_artifact(tag, memory, alone);
        let plan = plan.await.map_err(failed)?;
        if let Some(reason) = plan.reason.as_ref().filter(|_| plan.way == UnpackWay::Boot) {
            ui.talk(format_args!("{reason}; the parent is booted here"));
        }
        ui.aside(format_args!(
            "{:.1} of {:.1} MiB are needed",
            plan.fetch_bytes as f64 / MIB,
            plan.total_bytes as f64 / MIB
        ));
        let (sender, receiver) = tokio::sync::mpsc::channel(8);
        let needed: Vec<Descriptor> = documents
            .artifact
            .packs
            .iter()
            .filter(|pack| plan.packs.contains(&pack.digest.to_string()))
            .cloned()
            .collect();
        let sent = tokio::task::spawn_blocking(move || {
            let out = io::BufWriter::with_capacity(256 << 10, ToBody(sender.clone()));
            match send(out, &documents, &needed, place.as_ref()) {
                Ok(()) => Ok((place, needed)),
                Err(error) => {
                    // A stream without its end is refused by the daemon.
                    let _ = sender.blocking_send(Err(io::ErrorKind::BrokenPipe.into()));
                    Err(error)
                }
            }
        });
        let content = futures::stream::unfold(receiver, |mut receiver| async move {
            Some((receiver.recv().await?, receiver))
        });
        let made = client.unpack(tag, memory, content).await;
        let sent = sent.await.map_err(|error| anyhow!(error))?;
        let made = match (made, sent) {
            (Ok(made), sent) => {
                if let Ok((place, packs)) = sent {
                    place.arrived(&packs);
                }
                made
            }
            // The daemon refuses what breaks off; the reason is here.
            (Err(_), Err(error @ (HubError::Remote(_) | HubError::Digest { .. }))) => {
                return Err(refused(error));
            }
            (Err(error), _) => return Err(failed(error)),
        };
        super::branch::show(&made, args.json, ui)?;
        Ok(Exit::OK)
    })
}

fn check_signer(args: &UnpackArgs, documents: &Documents, ui: &Ui) -> Result<(), CliError> {
    let Some(path) = args.signers.as_ref().filter(|_| args.require_signature) else {
        return Ok(());
    };
    let text =
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let signers = Signers::parse(&text).map_err(|error| anyhow!("{}: {error}", path.display()))?;
    let signer = signers.check(documents).map_err(refused)?;
    ui.aside(format_args!("signed by {signer}"));
    Ok(())
}

fn send(
    out: impl Write,
    documents: &Documents,
    packs: &[Descriptor],
    place: &dyn Place,
) -> Result<(), HubError> {
    let mut writer = StreamWriter::begin(out, documents, &documents.config.name)?;
    for pack in packs {
        writer.pack(pack, place.pack(pack)?)?;
    }
    writer.finish().map(drop)
}

/// The body of a request as a writer.
struct ToBody(tokio::sync::mpsc::Sender<io::Result<Vec<u8>>>);

impl Write for ToBody {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let sent = self.0.blocking_send(Ok(bytes.to_vec()));
        sent.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A file beside its target that is removed unless it was renamed.
struct Draft(PathBuf);

impl Draft {
    fn beside(path: &Path) -> Self {
        use std::sync::atomic::{AtomicU32, Ordering};
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let name = format!(".{name}.{}-{number}.part", std::process::id());
        Self(path.with_file_name(name))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // Already renamed to its target: nothing to remove.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Says every 64 MiB how far a transfer is.
struct Progress<'a> {
    ui: &'a Ui,
    verb: &'static str,
    total: Option<u64>,
    done: u64,
    next: u64,
}

impl<'a> Progress<'a> {
    const STEP: u64 = 64 << 20;

    fn new(ui: &'a Ui, verb: &'static str, total: Option<u64>) -> Self {
        Self {
            ui,
            verb,
            total,
            done: 0,
            next: Self::STEP,
        }
    }

    fn add(&mut self, bytes: u64) {
        self.done += bytes;
        if self.done >= self.next {
            self.next += Self::STEP;
            let total = self.total.unwrap_or(self.done) as f64 / MIB;
            let done = self.done as f64 / MIB;
            self.ui
                .aside(format_args!("{} {done:.0} of {total:.0} MiB", self.verb));
        }
    }
}
