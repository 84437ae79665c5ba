//! `forkd pack`, `unpack`, `push` and `pull`: snapshots as artifacts in files and folders.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, anyhow, bail};
use forkd_api::{MemoryWish, UnpackWay};
use forkd_hub::HubError;
use forkd_hub::archive::StreamWriter;
use forkd_hub::documents::{Documents, Signature};
use forkd_hub::layout::{ArchiveFile, Folder, Place, Shelf, load};
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

const MIB: f64 = 1_048_576.0;

/// A place that a user names.
#[derive(Debug, PartialEq, Eq)]
enum Target {
    File(PathBuf, Option<String>),
    Folder(PathBuf, Option<String>),
}

impl Target {
    /// `oci:FOLDER[:NAME]`, `oci-archive:FILE[:NAME]`, or a path. A path that is no folder is a file if `file` says so.
    fn parse(text: &str, file: impl Fn(&Path) -> bool) -> anyhow::Result<Self> {
        let split = |rest: &str| match rest.split_once(':') {
            Some((path, name)) => (PathBuf::from(path), Some(name.to_owned())),
            None => (PathBuf::from(rest), None),
        };
        if let Some(rest) = text.strip_prefix("oci-archive:") {
            let (path, name) = split(rest);
            return Ok(Self::File(path, name));
        }
        if let Some(rest) = text.strip_prefix("oci:") {
            let (path, name) = split(rest);
            return Ok(Self::Folder(path, name));
        }
        if let Some((kind, _)) = text.split_once("://") {
            bail!("{kind}:// is not supported: name a file or a folder");
        }
        let path = PathBuf::from(text);
        Ok(match file(&path) {
            true => Self::File(path, None),
            false => Self::Folder(path, None),
        })
    }

    fn open(&self) -> Result<(Box<dyn Place + Send>, Option<&str>), HubError> {
        Ok(match self {
            Self::File(path, name) => (Box::new(ArchiveFile::open(path)?), name.as_deref()),
            Self::Folder(path, name) => (Box::new(Folder::open(path)?), name.as_deref()),
        })
    }
}

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
    let archive = |path: &Path| path.extension().is_some_and(|end| end == "forkd");
    let target = Target::parse(&args.target, archive)?;
    share(&args.tag, &target, &args.options, ui)
}

fn share(tag: &str, target: &Target, options: &PackOptions, ui: &Ui) -> CliResult {
    let client = connect(&options.daemon)?;
    interruptible(async {
        let name = match target {
            Target::File(_, name) | Target::Folder(_, name) => name.as_deref().unwrap_or(tag),
        };
        // The artifact that the folder has under this name: its packs are not sent again.
        let base = match target {
            Target::Folder(path, _) => Folder::open(path)
                .and_then(|folder| load(&folder, Some(name)))
                .and_then(|documents| documents_alone(&documents, name))
                .unwrap_or_default(),
            Target::File(..) => Vec::new(),
        };
        let draft = Draft::beside(match target {
            Target::File(path, _) => path,
            Target::Folder(path, _) => path,
        });
        fetch(&client, tag, options, base, &draft, ui).await?;
        let written = tokio::task::block_in_place(|| finish(tag, name, target, options, &draft))?;
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

/// Checks the draft, signs it, and puts it in its place.
fn finish(
    tag: &str,
    name: &str,
    target: &Target,
    options: &PackOptions,
    draft: &Draft,
) -> Result<Written, CliError> {
    let archive = ArchiveFile::open(&draft.0).map_err(refused)?;
    let mut documents = load(&archive, Some(tag)).map_err(refused)?;
    if let Some(key) = &options.sign {
        let text = signature(key, &documents)?;
        let signature = Signature::of(&documents.artifact, text);
        documents.add_signature(signature).map_err(refused)?;
    }
    let mut new_bytes = 0;
    let shown = match target {
        Target::File(path, _) => {
            let whole = Draft::beside(path);
            let file = File::create(&whole.0)
                .with_context(|| format!("cannot write {}", whole.0.display()))?;
            let mut writer =
                StreamWriter::begin(io::BufWriter::new(file), &documents, name).map_err(refused)?;
            for pack in &documents.artifact.packs {
                let content = archive.pack(pack).map_err(refused)?;
                writer.pack(pack, content).map_err(refused)?;
                new_bytes += pack.size;
            }
            writer.finish().map_err(refused)?;
            std::fs::rename(&whole.0, path)
                .with_context(|| format!("cannot write {}", path.display()))?;
            path
        }
        Target::Folder(path, _) => {
            let shelf = Folder::create(path).map_err(refused)?;
            for (digest, bytes) in documents.blobs() {
                let blob = Descriptor::new("", digest, bytes.len() as u64);
                put(&shelf, &blob, &mut bytes.as_slice())?;
            }
            for pack in &documents.artifact.packs {
                if !shelf.has(pack).map_err(refused)? {
                    let mut content = archive.pack(pack).map_err(refused)?;
                    put(&shelf, pack, content.as_mut())?;
                    new_bytes += pack.size;
                }
            }
            shelf.publish(name, &documents).map_err(refused)?;
            path
        }
    };
    Ok(Written {
        tag: tag.to_owned(),
        target: shown.display().to_string(),
        digest: documents.artifact.digest.to_string(),
        bytes: documents.artifact.packs.iter().map(|pack| pack.size).sum(),
        new_bytes,
        signed: options.sign.is_some(),
    })
}

fn put(shelf: &dyn Shelf, blob: &Descriptor, content: &mut dyn Read) -> Result<(), CliError> {
    if shelf.has(blob).map_err(refused)? {
        return Ok(());
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
    let (place, name) = target.open().map_err(refused)?;
    let documents = load(place.as_ref(), name).map_err(refused)?;
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
        tokio::task::spawn_blocking(move || {
            let out = io::BufWriter::with_capacity(256 << 10, ToBody(sender.clone()));
            if let Err(error) = send(out, &documents, &needed, place.as_ref()) {
                // A stream without its end is refused by the daemon.
                let _ = sender.blocking_send(Err(io::Error::other(error)));
            }
        });
        let content = futures::stream::unfold(receiver, |mut receiver| async move {
            Some((receiver.recv().await?, receiver))
        });
        let made = client.unpack(tag, memory, content).await.map_err(failed)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_told_apart() {
        let parse = |text: &str| Target::parse(text, |path| path.extension().is_some());
        let folder =
            |path: &str, name: Option<&str>| Target::Folder(path.into(), name.map(str::to_owned));
        assert_eq!(parse("/srv/hub").unwrap(), folder("/srv/hub", None));
        assert_eq!(parse("oci:/x:py").unwrap(), folder("/x", Some("py")));
        assert_eq!(
            parse("oci-archive:a.forkd").unwrap(),
            Target::File("a.forkd".into(), None)
        );
        assert_eq!(
            parse("a.forkd").unwrap(),
            Target::File("a.forkd".into(), None)
        );
        assert!(parse("s3://bucket/x").is_err());
    }
}
