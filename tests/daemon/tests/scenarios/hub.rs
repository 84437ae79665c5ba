//! Snapshots that travel: packed by one daemon, unpacked by another.

use bytes::Bytes;
use forkd_api::{BranchMode, ErrorCode, MemoryWish};
use forkd_daemon_tests::{Daemon, Options, Sandbox, programs};
use forkd_rest_client::{Client, Error};
use futures::TryStreamExt;

use crate::{TAG, daemon};

async fn packed(client: &Client, tag: &str) -> Result<Vec<u8>, Error> {
    let (length, content) = client.pack(tag, false, None, Vec::new()).await?;
    let bytes = content.try_collect::<Vec<Bytes>>().await?.concat();
    assert_eq!(length, Some(bytes.len() as u64));
    Ok(bytes)
}

async fn unpacked(client: &Client, tag: &str, bytes: Vec<u8>) -> Result<(), Error> {
    let pieces: Vec<Vec<u8>> = bytes.chunks(60_000).map(<[u8]>::to_vec).collect();
    let content = futures::stream::iter(pieces.into_iter().map(Ok::<_, std::io::Error>));
    client
        .unpack(Some(tag), MemoryWish::Auto, content)
        .await
        .map(drop)
}

async fn empty_daemon() -> Daemon {
    Daemon::with(programs!(), Options::default()).await
}

#[tokio::test]
async fn a_branch_is_packed_here_and_its_child_answers_there() {
    let here = daemon().await;
    let child = &here.spawn(TAG, 1).await.unwrap()[0];
    child.write("/note", "from another host").await.unwrap();
    child.branch("travels", BranchMode::Diff).await.unwrap();
    let bytes = packed(here.client(), "travels").await.unwrap();
    assert_eq!(bytes, packed(here.client(), "travels").await.unwrap());
    here.stages_nothing().await;

    let there = empty_daemon().await;
    unpacked(there.client(), "arrived", bytes.clone())
        .await
        .unwrap();
    let children = there.spawn("arrived", 1).await.unwrap();
    let text = children[0].read("/note").await.unwrap();
    assert_eq!(text, "from another host");
    let again = unpacked(there.client(), "arrived", bytes)
        .await
        .unwrap_err();
    assert_eq!(again.code(), Some(ErrorCode::AlreadyExists));
    there.stages_nothing().await;
}

#[tokio::test]
async fn damaged_and_broken_streams_leave_nothing() {
    let here = daemon().await;
    let bytes = packed(here.client(), TAG).await.unwrap();
    let there = empty_daemon().await;
    for step in 0..12 {
        let at = step * (bytes.len() - 1024) / 12;
        let error = unpacked(there.client(), "x", bytes[..at].to_vec()).await;
        assert!(error.is_err(), "{at}");
        // Zeros between entries have no meaning, and no digest covers them.
        if bytes[at..at + 8].iter().all(|byte| *byte == 0) {
            continue;
        }
        let mut damaged = bytes.clone();
        damaged[at..at + 8].fill(0xa5);
        let error = unpacked(there.client(), "x", damaged).await.unwrap_err();
        let code = error.code();
        let expected = [
            ErrorCode::InvalidArtifact,
            ErrorCode::DigestMismatch,
            ErrorCode::InvalidRequest,
        ];
        assert!(
            code.is_some_and(|code| expected.contains(&code)),
            "{at}: {error}"
        );
    }
    assert!(there.client().snapshots().await.unwrap().is_empty());
    there.stages_nothing().await;
    unpacked(there.client(), "x", bytes).await.unwrap();
    assert_eq!(there.client().snapshots().await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_snapshot_with_a_token_is_refused_unless_allowed() {
    let here = daemon().await;
    let child: &Sandbox = &here.spawn(TAG, 1).await.unwrap()[0];
    let token = format!(" ghp_{} ", "a1".repeat(18));
    child.write("/token", &token).await.unwrap();
    child.branch("secret", BranchMode::Diff).await.unwrap();
    let error = packed(here.client(), "secret").await.unwrap_err();
    assert_eq!(error.code(), Some(ErrorCode::ContainsSecrets));
    assert!(!error.to_string().contains("ghp_"), "{error}");
    let allowed = here.client().pack("secret", true, None, Vec::new()).await;
    assert!(allowed.is_ok());
}
