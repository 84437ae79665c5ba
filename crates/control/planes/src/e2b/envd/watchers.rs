//! Watchers that clients poll. Each has a task that collects changes until the watcher is removed or the sandbox ends.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use forkd_agent_client::{Client, Watch};
use parking_lot::{Mutex, MutexGuard};

use super::connect::{Code, RpcError};
use super::filesystem::event;
use super::messages::FilesystemEvent;

/// Watchers of one sandbox.
const MAX_WATCHERS: usize = 64;
/// Changes that a watcher keeps; the oldest go first.
const MAX_EVENTS: usize = 10_000;

type Queue = Arc<Mutex<VecDeque<FilesystemEvent>>>;

/// The watchers of a sandbox.
#[derive(Debug, Default)]
pub struct Watchers(Mutex<HashMap<String, Polled>>);

#[derive(Debug)]
struct Polled {
    queue: Queue,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Polled {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn unknown(id: &str) -> RpcError {
    let id: String = id.chars().take(40).collect();
    RpcError::new(Code::NotFound, format!("watcher {id} was not found"))
}

impl Watchers {
    fn map(&self) -> MutexGuard<'_, HashMap<String, Polled>> {
        self.0.lock()
    }

    /// Collects the changes of a watch under a new ID.
    pub fn add(
        &self,
        mut watch: Watch,
        client: Client,
        path: String,
        include_entry: bool,
    ) -> Result<String, RpcError> {
        let mut map = self.map();
        // One whose connection has ended collects nothing any more, but keeps what it has until it is removed.
        if map.len() >= MAX_WATCHERS {
            return Err(RpcError::new(
                Code::ResourceExhausted,
                format!("a sandbox has at most {MAX_WATCHERS} watchers"),
            ));
        }
        let queue = Queue::default();
        let collected = Arc::clone(&queue);
        let task = tokio::spawn(async move {
            while let Ok(changes) = watch.next().await {
                for change in changes {
                    let Some(event) = event(&client, &path, change, include_entry).await else {
                        continue;
                    };
                    let mut queue = collected.lock();
                    if queue.len() >= MAX_EVENTS {
                        queue.pop_front();
                    }
                    queue.push_back(event);
                }
            }
        });
        let id = format!("{:016x}", rand::random::<u64>());
        map.insert(id.clone(), Polled { queue, task });
        Ok(id)
    }

    /// Takes the changes since the last time.
    pub async fn take(&self, id: &str) -> Result<Vec<FilesystemEvent>, RpcError> {
        // The task that collects may have its changes and not yet have run.
        tokio::task::yield_now().await;
        let map = self.map();
        let found = map.get(id).ok_or_else(|| unknown(id))?;
        let taken: VecDeque<_> = std::mem::take(&mut *found.queue.lock());
        Ok(taken.into())
    }

    /// Removes a watcher.
    pub fn remove(&self, id: &str) -> Result<(), RpcError> {
        self.map().remove(id).map(drop).ok_or_else(|| unknown(id))
    }
}
