//! Branching a running sandbox: a durable snapshot under a tag, while the sandbox goes on.
//!
//! [`Branch`] is the checked request, [`Branched`] its result. The tag is claimed before the source is stopped
//! ([`claim`]), so a tag that is taken costs the guest no pause.

use std::sync::Arc;

use forkd_api::{BranchMode, BranchRequest, ErrorCode, SnapshotInfo};
use forkd_types::{SandboxId, Tag};
use tokio::sync::oneshot;

use crate::app::App;
use crate::clock;
use crate::error::Error;
use crate::ops::snapshots::writing_info;
use crate::ops::writing::Claimed;
use crate::owners::Ownership;
use crate::sandbox::{Ask, Caller, CutAsk, CutDone, CutMode, Destination, SandboxHandle};
use crate::trace::{self, TARGET};

/// A checked request for a branch.
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

/// How far a branch has come when the caller gets its answer.
#[derive(Debug)]
pub enum Branched {
    /// It is durable.
    Ready(SnapshotInfo),
    /// The source runs again; the snapshot is still being written.
    Writing(SnapshotInfo),
}

/// Parses a tag that a user chose.
pub fn parse_tag(text: &str) -> Result<Tag, Error> {
    text.parse().map_err(|error| {
        Error::refused(
            ErrorCode::InvalidName,
            format!("{text:?} is not a valid name: {error}"),
        )
    })
}

/// Branches a sandbox.
#[tracing::instrument(target = TARGET, skip_all, fields(forkd.sandbox = %id))]
pub async fn branch(app: &Arc<App>, id: &SandboxId, request: Branch) -> Result<Branched, Error> {
    app.check_open()?;
    let sandbox = app.sandboxes.get(id)?;
    check_parent(&sandbox, request.parent.as_ref())?;
    let slot = app.cut_slot().await?;
    let tag = match &request.tag {
        Some(tag) => tag.clone(),
        None => made_up_tag(id)?,
    };
    let claim = claim(app, &tag, &sandbox.owner(), Some(id.to_string())).await?;
    if request.wait {
        let caller = Caller::WaitsForEnd;
        let done = cut(
            &sandbox,
            Destination::Tag { claim, caller },
            request.mode,
            request.freeze,
        )
        .await?;
        drop(slot);
        return Ok(Branched::Ready(done.info));
    }
    let (sender, captured) = oneshot::channel();
    let caller = Caller::WaitsForCapture(sender);
    let destination = Destination::Tag { claim, caller };
    // The slot is held until everything is written, whether or not the caller waits.
    let mut whole = trace::spawn(async move {
        let done = cut(&sandbox, destination, request.mode, request.freeze).await;
        drop(slot);
        done
    });
    if captured.await.is_ok() {
        let writing = app
            .writing
            .get(&tag)
            .filter(|found| found.failure.is_none());
        if let Some(writing) = writing {
            return Ok(Branched::Writing(writing_info(app, &tag, &writing)));
        }
    }
    // It is durable already, or failed.
    let done = (&mut whole).await.map_err(|_| Error::Task)??;
    Ok(Branched::Ready(done.info))
}

/// A name for a branch whose caller gave none.
fn made_up_tag(id: &SandboxId) -> Result<Tag, Error> {
    let random: u16 = rand::random();
    format!("branch-{id}-{}-{random:04x}", clock::unix())
        .chars()
        .take(64)
        .collect::<String>()
        .parse()
        .map_err(|_| Error::Task)
}

/// Puts a cut into the sandbox's queue and waits until its destination is reached.
#[tracing::instrument(target = TARGET, name = "cut", skip_all, fields(forkd.sandbox = %sandbox.id))]
pub async fn cut(
    sandbox: &SandboxHandle,
    destination: Destination,
    mode: CutMode,
    freeze: bool,
) -> Result<CutDone, Error> {
    if !sandbox.phase().answers() {
        return Err(sandbox.not_running());
    }
    if matches!(destination, Destination::Suspend { .. }) {
        check_no_writer(sandbox)?;
    }
    let (done, made) = oneshot::channel();
    sandbox.ask(Ask::Cut(Box::new(CutAsk {
        destination,
        mode,
        freeze,
        done,
    })))?;
    made.await.map_err(|_| Error::Gone {
        id: sandbox.id.clone(),
        how: "it was deleted before it was cut".to_owned(),
    })?
}

/// A suspended sandbox has no VM, so it could not go on writing its volumes after a resume.
fn check_no_writer(sandbox: &SandboxHandle) -> Result<(), Error> {
    match sandbox.record().written_volumes().next() {
        None => Ok(()),
        Some(used) => Err(Error::hinted(
            ErrorCode::WrongState,
            format!("sandbox {} writes volume {}", sandbox.id, used.name),
            "delete the sandbox, or start it with a clone of the volume, which can be suspended",
        )),
    }
}

/// Claims a tag for an owner, if the tag is neither stored nor being written. The store also refuses a second tag of
/// the same name; this check refuses it before any work is done.
pub async fn claim(
    app: &App,
    tag: &Tag,
    owner: &str,
    branched_from: Option<String>,
) -> Result<Claimed, Error> {
    let taken = |message: String| {
        Error::hinted(
            ErrorCode::AlreadyExists,
            message,
            "choose another tag, or delete that one first",
        )
    };
    let claim = app.writing.claim(tag, branched_from).ok_or_else(|| {
        taken(format!(
            "snapshot {tag} is being written by another request"
        ))
    })?;
    if app.store.contains(tag) {
        return Err(taken(format!("there is already a snapshot {tag}")));
    }
    // Before the snapshot exists, so that it never exists without an owner.
    let ownership = Ownership {
        owner: owner.to_owned(),
        public: false,
    };
    app.owners.set(tag, ownership).await?;
    Ok(claim)
}

fn check_parent(sandbox: &SandboxHandle, parent: Option<&Tag>) -> Result<(), Error> {
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

    #[test]
    fn a_full_store_is_refused_before_anything_is_cut() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config {
            store_limit_bytes: Some(4096),
            ..Config::below(dir.path())
        };
        let (app, _endings) = App::open(config).unwrap();
        drop(app.limits.cut(&app.store).unwrap());
        let staging = app.store.stage().unwrap();
        std::fs::write(staging.file("content"), vec![1; 1 << 20]).unwrap();
        let _held = app.store.ingest(&staging.file("content")).unwrap();
        let error = app.limits.cut(&app.store).unwrap_err();
        assert_eq!(error.code(), ErrorCode::LimitReached, "{}", error.chain());
        assert!(error.hint().unwrap().contains("--store-limit-mib"));
    }

    async fn stored_owners(app: &App) -> i64 {
        let count = app.db.run(|c| {
            let sql = "SELECT count(*) FROM snapshots";
            Ok(c.query_row(sql, [], |row| row.get::<_, i64>(0))?)
        });
        count.await.unwrap()
    }

    #[tokio::test]
    async fn a_claim_that_ends_without_a_snapshot_leaves_no_owner() {
        let dir = tempfile::tempdir().unwrap();
        let (app, _endings) = App::open(Config::below(dir.path())).unwrap();
        let tag: Tag = "t".parse().unwrap();
        let owner = || app.owners.get(&tag).map(|found| found.owner);
        drop(claim(&app, &tag, "a", None).await.unwrap());
        assert_eq!((owner(), stored_owners(&app).await), (None, 0));
        // The reason of a failure belongs to the owner, until it is forgotten.
        let failed = claim(&app, &tag, "a", None).await.unwrap();
        failed.failed("no".into());
        assert_eq!(
            (owner().as_deref(), stored_owners(&app).await),
            (Some("a"), 1)
        );
        let second = claim(&app, &tag, "b", None).await.unwrap();
        second.failed("no".into());
        assert_eq!(owner().as_deref(), Some("b"));
        assert!(app.writing.forget_failed(&tag));
        assert_eq!((owner(), stored_owners(&app).await), (None, 0));
        // An owner that is set at once after a claim has ended is kept.
        drop(claim(&app, &tag, "a", None).await.unwrap());
        let held = claim(&app, &tag, "b", None).await.unwrap();
        assert_eq!(
            (owner().as_deref(), stored_owners(&app).await),
            (Some("b"), 1)
        );
        drop(held);
    }

    #[tokio::test]
    async fn owners_of_failures_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let (app, _endings) = App::open(Config::below(dir.path())).unwrap();
        for number in 0..300 {
            let tag: Tag = format!("t{number}").parse().unwrap();
            let claim = claim(&app, &tag, "a", None).await.unwrap();
            claim.failed("no".into());
        }
        let kept = app.writing.list().len();
        assert!(kept < 300);
        assert_eq!(stored_owners(&app).await, kept as i64);
    }

    #[test]
    fn contradictions_are_refused() {
        for json in [
            r#"{"mode":"diff","diff":true}"#,
            r#"{"diff":true,"live":true}"#,
            r#"{"measure_diff":true,"mode":"live"}"#,
            r#"{"mode":"full","wait":false}"#,
            r#"{"tag":"../x"}"#,
        ] {
            assert!(parse(json).is_err(), "{json}");
        }
    }
}
