//! Fetching a container image: `forkd-image fetch` in a process of its own, which confines itself.
//!
//! The daemon neither parses an archive nor speaks to a registry. It passes the request on over a pipe (the credential
//! stands in no argument and in no file), follows the progress lines, and installs the files that are left.

use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use forkd_api::{ErrorCode, ImageInfo, OperationInfo, PullPolicy};
use forkd_formats::image_cli::{
    FORMAT, FetchCredential, FetchFailure, FetchLine, FetchProblem, FetchProgress, FetchRequest,
    ImageFetched,
};
use forkd_formats::image_origin::{Origin, SCHEMA};
use futures::StreamExt;
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, ChildStdin, Command};
use tokio_util::codec::{FramedRead, LinesCodec};

use super::installed::{self, BUILT, Installed};
use super::operations::Operation;
use crate::app::App;
use crate::clock;
use crate::error::Error;
use crate::process::ProcessGroup;

/// The longest that a fetch may take.
const LONGEST: Duration = Duration::from_secs(3600);
/// The longest line of `forkd-image`.
const MAX_LINE: usize = 256 << 10;
/// Variables of the daemon that reach `forkd-image`: how programs and registries are found.
const PASSED: [&str; 9] = [
    "PATH",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
];

/// A checked request for an image. It has no `Debug`: the credential may not be printed.
#[derive(Clone)]
pub struct FetchWish {
    /// As the user wrote it; `-` for an archive that is sent along.
    pub from: String,
    pub name: Option<String>,
    pub platform: Option<String>,
    pub disk_mib: u32,
    pub pull: PullPolicy,
    pub credential: Option<FetchCredential>,
    pub owner: String,
    /// The key of the build that made the image. Such an image replaces an earlier build of its owner.
    pub built: Option<String>,
}

impl FetchWish {
    /// Requests with the same key get the same image.
    fn key(&self) -> Option<String> {
        let shared = self.credential.is_none() && self.from != "-";
        shared.then(|| {
            format!(
                "{:?}",
                (&self.from, &self.name, &self.platform, self.disk_mib)
            )
        })
    }

    fn origin(&self) -> Origin {
        Origin {
            schema: SCHEMA,
            asked: vec![match &self.built {
                Some(key) => format!("{BUILT}{key}"),
                None => self.from.clone(),
            }],
            platform: self.platform.clone(),
            owners: vec![self.owner.clone()],
            // An image that a registry gives without a login can be seen by all. An archive is its sender's.
            public: self.credential.is_none() && self.from != "-",
            created_at_unix: clock::unix(),
        }
    }
}

/// Starts to fetch an image from a registry, or finds the one that is here.
pub async fn fetch(
    app: &Arc<App>,
    wish: FetchWish,
    owns: impl Fn(Option<&str>) -> bool + Send + 'static,
) -> Result<OperationInfo, Error> {
    app.check_open()?;
    if wish.pull == PullPolicy::IfMissing {
        let (from, name, platform) = (wish.from.clone(), wish.name.clone(), wish.platform.clone());
        let here = app
            .blocking(move |app| {
                let all = Installed::list(&app.store, &owns)?;
                Ok(find(&all, &from, name.as_deref(), platform.as_deref()).map(Installed::info))
            })
            .await?;
        if let Some(image) = here {
            let (operation, _) = app.operations.begin(&wish.owner, &wish.from, None)?;
            operation.end(Ok(image));
            return Ok(operation.info());
        }
    }
    let (operation, is_new) = app.operations.begin(&wish.owner, &wish.from, wish.key())?;
    if is_new {
        let (app, operation) = (Arc::clone(app), Arc::clone(&operation));
        // A task of its own: a client that goes away does not end it.
        crate::trace::spawn(async move { run(&app, &operation, wish, None).await });
    }
    Ok(operation.info())
}

/// The image that was fetched last under this name.
fn find<'a>(
    all: &'a [Installed],
    from: &str,
    name: Option<&str>,
    platform: Option<&str>,
) -> Option<&'a Installed> {
    let fits = |one: &&Installed| {
        let asked = one.origin.as_ref().is_some_and(|origin| {
            origin.platform.as_deref() == platform && origin.asked.iter().any(|asked| asked == from)
        });
        asked && name.is_none_or(|name| one.image.name.as_str() == name)
    };
    let time = |one: &&Installed| one.origin.as_ref().map(|origin| origin.created_at_unix);
    all.iter().filter(fits).max_by_key(time)
}

/// An archive that a client sends: pieces, then the end.
pub type Pieces = tokio::sync::mpsc::Receiver<Vec<u8>>;

/// Starts to make an image from an archive.
pub fn receive(app: &Arc<App>, wish: FetchWish, pieces: Pieces) -> Result<Arc<Operation>, Error> {
    app.check_open()?;
    let (operation, _) = app.operations.begin(&wish.owner, "an archive", None)?;
    let (app, running) = (Arc::clone(app), Arc::clone(&operation));
    crate::trace::spawn(async move { run(&app, &running, wish, Some(pieces)).await });
    Ok(operation)
}

async fn run(app: &Arc<App>, operation: &Operation, wish: FetchWish, pieces: Option<Pieces>) {
    let from = wish.from.clone();
    let work = async {
        let _turn = app.operations.turn().await?;
        make(app, operation, wish, pieces).await
    };
    let result = tokio::select! {
        result = tokio::time::timeout(LONGEST, work) => result.unwrap_or_else(|_| Err(Error::Timeout {
            what: format!("fetching {from}"),
            seconds: LONGEST.as_secs(),
        })),
        () = operation.cancelled.cancelled() => Err(Error::refused(ErrorCode::WrongState, "the operation was cancelled")),
        () = app.stopping.cancelled() => Err(Error::refused(ErrorCode::ShuttingDown, "the daemon is about to stop")),
    };
    if let Err(error) = &result {
        tracing::warn!(from, error = error.chain(), "the image was not fetched");
    }
    operation.end(result);
}

/// The folder of one fetch, removed at its end.
struct Staging {
    path: PathBuf,
}

impl Drop for Staging {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

async fn make(
    app: &Arc<App>,
    operation: &Operation,
    wish: FetchWish,
    pieces: Option<Pieces>,
) -> Result<ImageInfo, Error> {
    let layout = app.store.layout();
    let staging = Staging {
        path: layout.fetching().join(operation.info().id),
    };
    let path = staging.path.clone();
    app.blocking(move |_| std::fs::create_dir_all(&path).map_err(Error::io("make", &path)))
        .await?;
    let step = if pieces.is_some() {
        "reading the archive"
    } else {
        "asking the registry"
    };
    operation.tell(|info| info.step = step.into());
    let mut process = Process::start(app, &staging.path)?;
    let origin = wish.origin();
    let sending = process.send(wish, pieces);
    let (sent, fetched) = tokio::join!(sending, process.lines.follow(operation));
    let fetched = fetched?;
    // A program that has failed reads no more: its own reason comes first.
    sent?;
    process.end().await?;
    operation.tell(|info| info.step = "installing".into());
    let from = staging.path.clone();
    let installed = app
        .blocking(move |app| installed::install(&app.store, &from, &fetched, origin))
        .await?;
    Ok(installed.info())
}

/// A running `forkd-image fetch` and its pipes.
struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Lines,
    _group: ProcessGroup,
}

impl Process {
    fn start(app: &App, into: &std::path::Path) -> Result<Self, Error> {
        let program = &app.config.image_program;
        let mut command = Command::new(program);
        command
            .arg("fetch")
            .arg("--into")
            .arg(into)
            .arg("--blobs")
            .arg(app.store.layout().downloaded());
        if let Some(file) = &app.config.registries {
            command.arg("--registries").arg(file);
        }
        let passed = PASSED
            .iter()
            .filter_map(|name| Some((name, std::env::var_os(name)?)));
        let mut child = command
            .env_clear()
            .envs(passed)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(Error::io("run", program))?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().ok_or(Error::Task)?;
        // Programs that it starts are in the same group.
        let group = ProcessGroup::of(&child);
        Ok(Self {
            child,
            stdin,
            lines: Lines(FramedRead::new(
                stdout,
                LinesCodec::new_with_max_length(MAX_LINE),
            )),
            _group: group,
        })
    }

    /// Sends the request, and the archive after it.
    fn send(
        &mut self,
        wish: FetchWish,
        pieces: Option<Pieces>,
    ) -> impl Future<Output = Result<(), Error>> + use<> {
        let stdin = self.stdin.take();
        async move {
            let mut stdin = stdin.ok_or(Error::Task)?;
            let request = FetchRequest {
                format: FORMAT,
                source: wish.from,
                name: wish.name,
                platform: wish.platform,
                disk_mib: wish.disk_mib,
                credential: wish.credential,
            };
            let failed = || Error::io("write to", std::path::Path::new("forkd-image"));
            let line = format!("{}\n", serde_json::json!(request));
            stdin.write_all(line.as_bytes()).await.map_err(failed())?;
            if let Some(mut pieces) = pieces {
                while let Some(piece) = pieces.recv().await {
                    stdin.write_all(&piece).await.map_err(failed())?;
                }
            }
            stdin.shutdown().await.map_err(failed())
        }
    }

    /// Waits for the end, and ends what the program may have started.
    async fn end(mut self) -> Result<(), Error> {
        self.child.wait().await.map_err(|_| Error::Task)?;
        Ok(())
    }
}

/// The standard output of `forkd-image fetch`.
struct Lines(FramedRead<tokio::process::ChildStdout, LinesCodec>);

impl Lines {
    /// Follows the progress to the result.
    async fn follow(&mut self, operation: &Operation) -> Result<ImageFetched, Error> {
        let broken =
            |problem: &str| Error::refused(ErrorCode::Internal, format!("forkd-image {problem}"));
        while let Some(line) = self.0.next().await {
            let line = line.map_err(|_| broken("printed a line that cannot be read"))?;
            let line: FetchLine = serde_json::from_str(&line)
                .map_err(|_| broken("printed a line that does not parse"))?;
            match line {
                FetchLine::Progress(progress) => operation.tell(|info| told(info, progress)),
                FetchLine::Done(fetched) => return Ok(fetched),
                FetchLine::Failed(failure) => return Err(failed(failure)),
            }
        }
        Err(broken("ended without a result"))
    }
}

fn told(info: &mut OperationInfo, progress: FetchProgress) {
    match progress {
        FetchProgress::Found { layers, bytes, .. } => {
            info.step = format!("fetching {layers} layers");
            info.total_bytes = bytes;
        }
        FetchProgress::Fetched { bytes, of } => {
            info.bytes = bytes;
            info.total_bytes = of;
        }
        FetchProgress::Step { text } => info.step = text.chars().take(500).collect(),
    }
}

fn failed(failure: FetchFailure) -> Error {
    let code = match failure.kind {
        FetchProblem::NotFound => ErrorCode::ImageNotFound,
        FetchProblem::Denied => ErrorCode::RegistryDenied,
        FetchProblem::Unreachable => ErrorCode::RegistryFailed,
        FetchProblem::Configuration => ErrorCode::InvalidRequest,
        FetchProblem::Platform | FetchProblem::Invalid => ErrorCode::ImageInvalid,
        FetchProblem::NoSpace => ErrorCode::NoSpace,
        FetchProblem::Internal => ErrorCode::Internal,
    };
    Error::Refused {
        code,
        message: failure.message.chars().take(4000).collect(),
        hint: failure.hint,
    }
}
