//! From a request to branch to a cut in the sandbox's queue.

use std::sync::Arc;

use forkd_api::{BranchMode, BranchRequest, ErrorCode, SnapshotInfo};
use forkd_types::{SandboxId, Tag};
use tokio::sync::oneshot;

use crate::app::App;
use crate::clock;
use crate::error::Error;
use crate::sandbox::{Ask, BranchAsk, BranchDone, CutMode, Sandbox};
use crate::snapshots::{HIDDEN, is_hidden, writing_info};
use crate::telemetry::TARGET;
use crate::writing::Claimed;

/// A checked wish for a branch.
#[derive(Debug, Clone)]
pub struct Branch {
    /// The tag to make; one is made up if missing.
    pub tag: Option<Tag>,
    /// How much to write.
    pub mode: CutMode,
    /// Wait until it is durable.
    pub wait: bool,
    /// Must be what the source was started from.
    pub parent: Option<Tag>,
    /// Freeze the user processes of the source for the cut.
    pub freeze: bool,
}

impl TryFrom<BranchRequest> for Branch {
    type Error = Error;

    fn try_from(request: BranchRequest) -> Result<Self, Error> {
        let bad = |message: &str| Error::refused(ErrorCode::InvalidRequest, message);
        let tag = request.tag.map(|text| parse_tag(&text)).transpose()?;
        let parent = request
            .parent_tag
            .map(|text| parse_tag(&text))
            .transpose()?;
        if request.mode.is_some() && (request.diff || request.live) {
            return Err(bad(
                "give either \"mode\" or the older \"diff\" and \"live\", not both",
            ));
        }
        let diff = request.diff || request.mode == Some(BranchMode::Diff);
        let live = request.live || request.mode == Some(BranchMode::Live);
        if [diff, live, request.measure_diff]
            .into_iter()
            .filter(|set| *set)
            .count()
            > 1
        {
            return Err(bad(
                "\"diff\", \"live\" and \"measure_diff\" exclude each other",
            ));
        }
        let full = request.mode == Some(BranchMode::Full) || request.measure_diff;
        if !request.wait && (full || diff) {
            return Err(bad("\"wait\": false needs mode \"live\""));
        }
        Ok(Self {
            tag,
            mode: if full { CutMode::Full } else { CutMode::Diff },
            wait: request.wait,
            parent,
            freeze: request.freeze,
        })
    }
}

/// What became of a branch.
#[derive(Debug)]
pub enum Branched {
    /// It is durable.
    Ready(SnapshotInfo),
    /// The source runs again; the snapshot is still being written.
    Writing(SnapshotInfo),
}

/// Parses a tag that a user chose.
pub fn parse_tag(text: &str) -> Result<Tag, Error> {
    let tag: Tag = text.parse().map_err(|error| {
        Error::refused(
            ErrorCode::InvalidName,
            format!("{text:?} is no tag: {error}"),
        )
    })?;
    if is_hidden(&tag) {
        return Err(Error::refused(
            ErrorCode::InvalidName,
            format!("tags that begin with {HIDDEN:?} are the daemon's own"),
        ));
    }
    Ok(tag)
}

/// Branches a sandbox.
#[tracing::instrument(target = TARGET, skip_all, fields(forkd.sandbox = %id))]
pub async fn branch(app: &Arc<App>, id: &SandboxId, wish: Branch) -> Result<Branched, Error> {
    app.check_open()?;
    let made_up = || {
        let random: u16 = rand::random();
        format!("branch-{id}-{}-{random:04x}", clock::unix())
    };
    let tag = match &wish.tag {
        Some(tag) => tag.clone(),
        None => made_up()
            .chars()
            .take(64)
            .collect::<String>()
            .parse()
            .map_err(|_| Error::Task)?,
    };
    let slot = Arc::clone(&app.branch_slots)
        .try_acquire_owned()
        .map_err(|_| {
            Error::hinted(
                ErrorCode::LimitReached,
                format!(
                    "{} branches are under way, that is the limit",
                    app.config.branch_concurrency
                ),
                "try again in a moment, or start the daemon with a higher --branch-concurrency",
            )
        })?;
    let claimed = claim(app, &tag, Some(id.to_string())).await?;
    let sandbox = app.sandboxes.get(id)?;
    check_parent(&sandbox, wish.parent.as_ref())?;
    if wish.wait {
        let done = send(&sandbox, claimed, wish.mode, wish.freeze, None, None)?;
        let result = done.await.map_err(|_| ended(id))?.map(|done| done.info);
        drop(slot);
        return result.map(Branched::Ready);
    }
    let (told, taken) = oneshot::channel();
    let done = send(&sandbox, claimed, wish.mode, wish.freeze, Some(told), None)?;
    // The slot is held until everything is written, whether or not the caller waits.
    let (finished, early) = oneshot::channel();
    tokio::spawn(async move {
        let result = done.await;
        drop(slot);
        let _ = finished.send(result);
    });
    match taken.await {
        Ok(_) => {
            let found = app
                .writing
                .list()
                .into_iter()
                .find(|(found, writing)| *found == tag && writing.failure.is_none());
            match found {
                Some((_, writing)) => Ok(Branched::Writing(writing_info(app, &tag, &writing))),
                // It is durable already, or failed.
                None => finish(early, id).await.map(Branched::Ready),
            }
        }
        Err(_) => finish(early, id).await.map(Branched::Ready),
    }
}

type Finished = oneshot::Receiver<Result<Result<BranchDone, Error>, oneshot::error::RecvError>>;

async fn finish(early: Finished, id: &SandboxId) -> Result<SnapshotInfo, Error> {
    early
        .await
        .map_err(|_| Error::Task)?
        .map_err(|_| ended(id))?
        .map(|done| done.info)
}

/// Its owner went away with the request unanswered.
fn ended(id: &SandboxId) -> Error {
    Error::Gone {
        id: id.clone(),
        how: "it was deleted before it was cut".to_owned(),
    }
}

/// Claims a tag that is neither stored nor being written, if there may be one more.
pub async fn claim(
    app: &Arc<App>,
    tag: &Tag,
    branched_from: Option<String>,
) -> Result<Claimed, Error> {
    let taken = |message: String| {
        Error::hinted(
            ErrorCode::AlreadyExists,
            message,
            "choose another tag, or delete that one first",
        )
    };
    let claimed = app.writing.claim(tag, branched_from).ok_or_else(|| {
        taken(format!(
            "snapshot {tag} is being written by another request"
        ))
    })?;
    if app.store.contains(tag) {
        return Err(taken(format!("there is already a snapshot {tag}")));
    }
    if app.store.limit().is_some() {
        app.blocking(|app| {
            app.store
                .check_limit()
                .map_err(Error::store("there is no room for a snapshot"))
        })
        .await?;
    }
    Ok(claimed)
}

fn check_parent(sandbox: &Sandbox, parent: Option<&Tag>) -> Result<(), Error> {
    let tag = sandbox.record().tag;
    match parent {
        Some(parent) if *parent != tag => Err(Error::refused(
            ErrorCode::InvalidRequest,
            format!(
                "sandbox {} was started from {tag}, not from {parent}",
                sandbox.id
            ),
        )),
        _ => Ok(()),
    }
}

type Done = oneshot::Receiver<Result<BranchDone, Error>>;

/// Puts a cut into the sandbox's queue. What it tells is said at [`BranchAsk`].
fn send(
    sandbox: &Sandbox,
    claimed: Claimed,
    mode: CutMode,
    freeze: bool,
    taken: Option<oneshot::Sender<u64>>,
    held: Option<oneshot::Receiver<()>>,
) -> Result<Done, Error> {
    if !sandbox.phase().answers() {
        return Err(sandbox.not_running());
    }
    let (sender, done) = oneshot::channel();
    sandbox.ask(Ask::Branch(Box::new(BranchAsk {
        claimed,
        mode,
        freeze,
        taken,
        held,
        done: sender,
    })))?;
    Ok(done)
}

/// Cuts a sandbox for those who start from the cut at once. Its tag is never in the store, so none of it is synced.
#[tracing::instrument(target = TARGET, name = "cut", skip_all, fields(forkd.sandbox = %sandbox.id))]
pub async fn cut_unnamed(app: &App, sandbox: &Sandbox, freeze: bool) -> Result<BranchDone, Error> {
    let tag: Tag = format!("{HIDDEN}fork-{:016x}", rand::random::<u64>())
        .parse()
        .map_err(|_| Error::Task)?;
    let source = Some(sandbox.id.to_string());
    let claimed = app.writing.claim(&tag, source).ok_or(Error::Task)?;
    let done = send(sandbox, claimed, CutMode::Diff, freeze, None, None)?;
    done.await.map_err(|_| ended(&sandbox.id))?
}

/// A sandbox that stands still: unless it is ended, it goes on when this is dropped.
#[derive(Debug)]
pub struct Held {
    _until: oneshot::Sender<()>,
}

/// The same for a sandbox that is to end with the cut: nothing that its guest does is missing from the snapshot.
#[tracing::instrument(target = TARGET, name = "cut", skip_all, fields(forkd.sandbox = %sandbox.id))]
pub async fn cut_and_hold(
    app: &Arc<App>,
    sandbox: &Sandbox,
    tag: &Tag,
    mode: CutMode,
) -> Result<(BranchDone, Held), Error> {
    let claimed = claim(app, tag, Some(sandbox.id.to_string())).await?;
    let (held, until) = oneshot::channel();
    let done = send(sandbox, claimed, mode, false, None, Some(until))?;
    let made = done.await.map_err(|_| ended(&sandbox.id))??;
    Ok((made, Held { _until: held }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn parse(json: &str) -> Result<Branch, Error> {
        serde_json::from_str::<BranchRequest>(json)
            .unwrap()
            .try_into()
    }

    #[test]
    fn modes_as_the_published_clients_ask_for_them() {
        for (json, mode) in [
            ("{}", CutMode::Diff),
            (r#"{"mode":"live"}"#, CutMode::Diff),
            (r#"{"mode":"live","wait":false}"#, CutMode::Diff),
            (r#"{"diff":true}"#, CutMode::Diff),
            (r#"{"mode":"full"}"#, CutMode::Full),
            (r#"{"measure_diff":true}"#, CutMode::Full),
            (r#"{"wait":false,"colour":"red"}"#, CutMode::Diff),
        ] {
            assert_eq!(parse(json).unwrap().mode, mode, "{json}");
        }
    }

    #[tokio::test]
    async fn a_full_store_is_refused_before_anything_is_cut() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config {
            store_limit_bytes: Some(4096),
            ..Config::below(dir.path())
        };
        let (app, _endings) = App::open(config).unwrap();
        let tag = "t".parse().unwrap();
        drop(claim(&app, &tag, None).await.unwrap());
        let staging = app.store.stage().unwrap();
        std::fs::write(staging.file("content"), vec![1; 1 << 20]).unwrap();
        let _held = app.store.ingest(&staging.file("content")).unwrap();
        let error = claim(&app, &tag, None).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::LimitReached, "{}", error.chain());
        assert!(error.hint().unwrap().contains("--store-limit-mib"));
        assert!(!app.writing.is_writing(&tag));
    }

    #[test]
    fn contradictions_are_refused() {
        for json in [
            r#"{"mode":"diff","diff":true}"#,
            r#"{"diff":true,"live":true}"#,
            r#"{"measure_diff":true,"mode":"live"}"#,
            r#"{"mode":"full","wait":false}"#,
            r#"{"tag":"../x"}"#,
            r#"{"tag":"_forkd-x"}"#,
        ] {
            assert!(parse(json).is_err(), "{json}");
        }
    }
}
