//! Compaction of a snapshot whose client leaves.

mod local;
mod published;

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use forkd_api::ErrorCode;
use forkd_sandboxes::ops::snapshots::{compact, detail};
use forkd_types::Tag;
use local::app;
use published::publish;

fn tag(text: &str) -> Tag {
    text.parse().unwrap()
}

#[test]
fn a_compaction_goes_on_with_its_reservations_when_the_client_leaves() {
    // One thread for blocking work, so that the test decides when the compaction runs.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(1)
        .build()
        .unwrap();
    runtime.block_on(async {
        let dir = tempfile::tempdir().unwrap();
        let app = app(dir.path());
        publish(&app, "base", "sb-1");
        let (go, wait) = channel::<()>();
        let busy = tokio::task::spawn_blocking(move || wait.recv());
        let request = {
            let app = Arc::clone(&app);
            tokio::spawn(async move { compact(&app, tag("base"), tag("flat"), "me").await })
        };
        while app.owners.get(&tag("flat")).is_none() {
            tokio::task::yield_now().await;
        }
        // The claim is durable, and the work waits for the thread.
        tokio::task::yield_now().await;
        request.abort();
        assert!(request.await.unwrap_err().is_cancelled());
        let second = compact(&app, tag("base"), tag("other"), "me");
        let second = tokio::time::timeout(Duration::from_secs(60), second).await;
        let refused = second.expect("refused at once").unwrap_err();
        assert_eq!(refused.code(), ErrorCode::Busy);
        assert!(app.writing.is_writing(&tag("flat")));
        go.send(()).unwrap();
        busy.await.unwrap().unwrap();
        while app.writing.is_writing(&tag("flat")) {
            tokio::task::yield_now().await;
        }
        assert_eq!(
            detail(&app, tag("flat")).await.unwrap().parent_tag,
            None,
            "the work has ended"
        );
        compact(&app, tag("base"), tag("other"), "me")
            .await
            .unwrap();
    });
}
