//! The health of the daemon, checked at most once a second.
//!
//! [`Health`] runs one check at a time and gives its result to all requests that arrive meanwhile. A check starts and
//! changes nothing.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::Mutex;

use crate::app::App;
use crate::error::chain;

/// How long a result is reused. Every client may ask for the health, so the cost must not grow with the requests.
const FRESH: Duration = Duration::from_secs(1);

/// A part that does not work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Shown to every client: names the part and nothing of the host.
    pub summary: &'static str,
    /// For the log and for administrators: causes, paths.
    pub detail: Option<String>,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.detail {
            Some(detail) => write!(f, "{}: {detail}", self.summary),
            None => f.write_str(self.summary),
        }
    }
}

type Check = Box<dyn Fn() -> BoxFuture<'static, Vec<Problem>> + Send + Sync>;

/// Checks the daemon's parts. One check runs at a time; who asks meanwhile gets its result.
pub struct Health {
    check: Check,
    last: Mutex<Option<(Instant, Arc<[Problem]>)>>,
}

impl fmt::Debug for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Health").finish_non_exhaustive()
    }
}

impl Health {
    /// `check` finds out what does not work. It must not start or change anything.
    pub fn new(
        check: impl Fn() -> BoxFuture<'static, Vec<Problem>> + Send + Sync + 'static,
    ) -> Self {
        Self {
            check: Box::new(check),
            last: Mutex::new(None),
        }
    }

    /// The parts that do not work.
    pub async fn problems(&self) -> Arc<[Problem]> {
        let mut last = self.last.lock().await;
        if let Some((at, problems)) = last.as_ref()
            && at.elapsed() < FRESH
        {
            return Arc::clone(problems);
        }
        let problems: Arc<[Problem]> = (self.check)().await.into();
        *last = Some((Instant::now(), Arc::clone(&problems)));
        problems
    }
}

/// Free bytes below which the store counts as full.
const LITTLE_SPACE: u64 = 64 << 20;
/// How long each part may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// The check of the daemon's parts. It starts and changes nothing.
pub fn of_daemon(app: &Arc<App>) -> Health {
    let app = Arc::clone(app);
    Health::new(move || problems(Arc::clone(&app)).boxed())
}

async fn problems(app: Arc<App>) -> Vec<Problem> {
    let mut found = Vec::new();
    let mut add = |summary, detail| found.push(Problem { summary, detail });
    let ask = app
        .db
        .run(|c| Ok(c.query_row("SELECT 1", [], |row| row.get::<_, i64>(0))?));
    match tokio::time::timeout(PATIENCE, ask).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => add("the state database does not work", Some(chain(&error))),
        Err(_) => add("the state database does not answer", None),
    }
    match tokio::time::timeout(PATIENCE, app.launcher.peek()).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => add("forkd-spawn does not work", Some(chain(&error))),
        Err(_) => add("forkd-spawn does not answer", None),
    }
    if app.net.is_installed() {
        match tokio::time::timeout(PATIENCE, app.net.totals()).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => add("forkd-net does not work", Some(chain(&error))),
            Err(_) => add("forkd-net does not answer", None),
        }
    }
    if let Ok(fs) = rustix::fs::statvfs(app.store.layout().root())
        && fs.f_bavail.saturating_mul(fs.f_frsize) < LITTLE_SPACE
    {
        add("the store's file system is full", None);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[tokio::test]
    async fn many_questions_are_one_check() {
        let checks = Arc::new(AtomicUsize::new(0));
        let health = {
            let checks = Arc::clone(&checks);
            Health::new(move || {
                checks.fetch_add(1, Ordering::Relaxed);
                async {
                    vec![Problem {
                        summary: "the store is full",
                        detail: None,
                    }]
                }
                .boxed()
            })
        };
        let started = Instant::now();
        let asked = futures::future::join_all((0..1000).map(|_| health.problems())).await;
        assert!(asked.iter().all(|problems| problems.len() == 1));
        let seconds = usize::try_from(started.elapsed().as_secs()).unwrap();
        assert!(checks.load(Ordering::Relaxed) <= 1 + seconds);
    }
}
