//! Scenarios, and their execution as tests.
//!
//! Each scenario is an async function that gets a [`Run`] with a new kit. It runs on a runtime of its own,
//! with a timeout and a watchdog.

use std::borrow::Cow;
use std::future::Future;
use std::pin::Pin;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::Context;
use forkd_testkit::{Kit, last_of_consoles, work_folder};
use libtest_mimic::{Failed, Trial};

/// Timeout of a scenario, also on slow hosts.
fn limit() -> Duration {
    Duration::from_secs(if soaking() { 10_800 } else { 900 })
}

/// Time for the remains of a scenario to end after its timeout.
const GRACE: Duration = Duration::from_secs(5);

type Body = fn(Run) -> Pin<Box<dyn Future<Output = anyhow::Result<()>>>>;

/// A named scenario.
pub struct Scenario {
    /// Module and function, such as `boot::one_vcpu`.
    pub name: Cow<'static, str>,
    pub body: Body,
}

/// The environment of a scenario.
pub struct Run {
    pub kit: Kit,
}

/// Whether this is a soak run: long scenarios, large counts.
pub fn soaking() -> bool {
    std::env::var_os("FORKD_SOAK").is_some_and(|value| !value.is_empty())
}

/// Repetitions: `everyday` in an ordinary run, `soak` in a soak run.
pub fn times(everyday: usize, soak: usize) -> usize {
    if soaking() { soak } else { everyday }
}

impl Scenario {
    /// The scenario `count` times, each with its own name, so that an interrupted soak can resume.
    pub fn parts(&self, count: usize) -> Vec<Self> {
        let part = |number| Self {
            name: format!("{}#{number}", self.name).into(),
            body: self.body,
        };
        (1..=count).map(part).collect()
    }
}

/// Turns a scenario into a test.
pub fn trial(scenario: Scenario) -> Trial {
    Trial::test(scenario.name, move || {
        run(scenario.body).map_err(|error| Failed::from(format!("{error:?}")))
    })
}

fn run(body: Body) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let limit = limit();
    let _watchdog = Watchdog::start(limit + 2 * GRACE);
    let work = work_folder()?;
    let outcome = runtime.block_on(async {
        let kit = Kit::start(work.path()).await?;
        tokio::time::timeout(limit, body(Run { kit }))
            .await
            .with_context(|| format!("not finished within {} s", limit.as_secs()))?
    });
    // Dropping the runtime would wait for a blocked thread for ever.
    runtime.shutdown_timeout(GRACE);
    if outcome.is_err() {
        eprintln!("{}", last_of_consoles(work.path()));
    }
    outcome
}

/// Ends the whole run if a scenario blocks the thread of its own timeout.
struct Watchdog {
    _ends_it: mpsc::Sender<()>,
}

impl Watchdog {
    fn start(limit: Duration) -> Self {
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            if receiver.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout) {
                eprintln!("a scenario blocks for {} s; giving up", limit.as_secs());
                std::process::exit(101);
            }
        });
        Self { _ends_it: sender }
    }
}

/// Lists scenarios: `list![boot: one_vcpu, two_vcpus; exec: many]`.
macro_rules! list {
    ($($module:ident: $($name:ident),+ $(,)?);+ $(;)?) => {
        vec![$($($crate::scenario::Scenario {
            name: std::borrow::Cow::Borrowed(concat!(stringify!($module), "::", stringify!($name))),
            body: |run| Box::pin($module::$name(run)),
        }),+),+]
    };
}
pub(crate) use list;
