//! Operations that go on after their request was answered: fetches of images.
//!
//! They live in memory. A daemon that stops ends its fetches; layers that arrived stay for the next one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use forkd_api::{ErrorBody, ErrorCode, ImageInfo, OperationInfo, OperationStatus};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Semaphore, SemaphorePermit, watch};
use tokio_util::sync::CancellationToken;

use crate::clock;
use crate::error::Error;

/// Operations that may wait or run.
const RUNNING: usize = 16;
/// Operations that are remembered after their end.
const FINISHED: usize = 256;
/// Images that are fetched at the same time.
const AT_ONCE: usize = 2;

/// An operation and its owner.
#[derive(Debug)]
pub struct Operation {
    pub owner: String,
    /// Requests with the same key share the operation.
    key: Option<String>,
    state: watch::Sender<OperationInfo>,
    /// Ends it early.
    pub cancelled: CancellationToken,
}

impl Operation {
    pub fn info(&self) -> OperationInfo {
        self.state.borrow().clone()
    }

    fn is_running(&self) -> bool {
        self.state.borrow().status == OperationStatus::Running
    }

    /// The state of the operation when it has ended, or after this time.
    pub async fn wait(&self, longest: Duration) -> OperationInfo {
        let mut state = self.state.subscribe();
        let ended = state.wait_for(|info| info.status != OperationStatus::Running);
        let _ = tokio::time::timeout(longest, ended).await;
        self.info()
    }

    pub fn tell(&self, change: impl FnOnce(&mut OperationInfo)) {
        self.state.send_modify(change);
    }

    pub fn end(&self, result: Result<ImageInfo, Error>) {
        self.state.send_modify(|info| match result {
            Ok(image) => {
                info.status = OperationStatus::Done;
                info.step = "done".into();
                info.image = Some(image);
            }
            Err(error) => {
                info.status = OperationStatus::Failed;
                info.step = "failed".into();
                info.error = Some(ErrorBody {
                    error: error.chain(),
                    code: error.code(),
                    hint: error.hint(),
                    request_id: None,
                });
            }
        });
    }
}

/// Every operation that is remembered.
#[derive(Debug)]
pub struct Operations {
    all: Mutex<BTreeMap<String, Arc<Operation>>>,
    turns: Semaphore,
}

impl Default for Operations {
    fn default() -> Self {
        Self {
            all: Mutex::default(),
            turns: Semaphore::new(AT_ONCE),
        }
    }
}

impl Operations {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Operation>>> {
        self.all.lock()
    }

    /// A new operation, or the one that is under way for the same key; then the second part is false.
    pub fn begin(
        &self,
        owner: &str,
        from: &str,
        key: Option<String>,
    ) -> Result<(Arc<Operation>, bool), Error> {
        let mut all = self.lock();
        let running = || all.values().filter(|one| one.is_running());
        if let Some(same) = running().find(|one| key.is_some() && one.key == key) {
            return Ok((Arc::clone(same), false));
        }
        if running().count() >= RUNNING {
            return Err(Error::hinted(
                ErrorCode::Busy,
                format!("{RUNNING} images are being fetched or wait for their turn"),
                "try again later",
            ));
        }
        while all.len() >= RUNNING + FINISHED {
            let oldest = all
                .iter()
                .filter(|(_, one)| !one.is_running())
                .min_by_key(|(_, one)| one.info().created_at_unix)
                .map(|(id, _)| id.clone());
            match oldest {
                Some(id) => all.remove(&id),
                None => break,
            };
        }
        let id = format!("op-{}", hex::encode(rand::random::<[u8; 8]>()));
        let info = OperationInfo {
            id: id.clone(),
            status: OperationStatus::Running,
            from: from.to_owned(),
            step: "waiting for its turn".into(),
            bytes: 0,
            total_bytes: 0,
            created_at_unix: clock::unix(),
            image: None,
            error: None,
        };
        let operation = Arc::new(Operation {
            owner: owner.to_owned(),
            key,
            state: watch::Sender::new(info),
            cancelled: CancellationToken::new(),
        });
        all.insert(id, Arc::clone(&operation));
        Ok((operation, true))
    }

    /// An operation by its ID.
    pub fn get(&self, id: &str) -> Result<Arc<Operation>, Error> {
        let found = self.lock().get(id).cloned();
        found.ok_or_else(|| {
            let shown: String = id.chars().take(80).collect();
            Error::refused(
                ErrorCode::OperationNotFound,
                format!("there is no operation {shown}"),
            )
        })
    }

    /// Every operation, the newest first.
    pub fn list(&self) -> Vec<Arc<Operation>> {
        let mut all: Vec<_> = self.lock().values().cloned().collect();
        all.sort_by_key(|one| std::cmp::Reverse(one.info().created_at_unix));
        all
    }

    /// Waits until few enough images are being fetched.
    pub(super) async fn turn(&self) -> Result<SemaphorePermit<'_>, Error> {
        self.turns.acquire().await.map_err(|_| Error::Task)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_same_key_shares_and_too_many_are_refused() {
        let all = Operations::default();
        let (first, new) = all.begin("o", "a:1", Some("k".into())).unwrap();
        assert!(new);
        let (same, new) = all.begin("o", "a:1", Some("k".into())).unwrap();
        assert!(!new && same.info().id == first.info().id);
        for _ in 1..RUNNING {
            all.begin("o", "b:1", None).unwrap();
        }
        let refused = all.begin("o", "c:1", None).unwrap_err();
        assert_eq!(refused.code(), ErrorCode::Busy);
        first.end(Err(Error::refused(ErrorCode::NoSpace, "full")));
        let ended = first.wait(Duration::ZERO).await;
        assert_eq!(ended.error.unwrap().code, ErrorCode::NoSpace);
        all.begin("o", "c:1", None).unwrap();
    }

    #[test]
    fn old_operations_are_forgotten() {
        let all = Operations::default();
        for _ in 0..RUNNING + FINISHED + 10 {
            let (one, _) = all.begin("o", "a:1", None).unwrap();
            one.end(Err(Error::Task));
        }
        assert_eq!(all.list().len(), RUNNING + FINISHED);
    }
}
