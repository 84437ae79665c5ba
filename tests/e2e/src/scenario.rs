//! What a scenario is, and how one is run.

use std::borrow::Cow;
use std::future::Future;
use std::pin::Pin;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::Context;
use forkd_testkit::{Kit, last_of_consoles, work_folder};
use libtest_mimic::{Failed, Trial};

/// No scenario takes longer than this, however slow the machine.
fn limit() -> Duration {
    Duration::from_secs(if soaking() { 10_800 } else { 900 })
}

/// What a scenario left behind when its time was up gets this long to end.
const GRACE: Duration = Duration::from_secs(5);

type Body = fn(Run) -> Pin<Box<dyn Future<Output = anyhow::Result<()>>>>;

/// A named scenario.
pub struct Scenario {
    /// Module and function, such as `boot::one_vcpu`.
    pub name: Cow<'static, str>,
    /// What it does.
    pub body: Body,
}

/// What a scenario gets.
pub struct Run {
    /// A fresh kit.
    pub kit: Kit,
}

/// This is a soak run: long scenarios, full numbers.
pub fn soaking() -> bool {
    std::env::var_os("FORKD_SOAK").is_some_and(|value| !value.is_empty())
}

/// Repetitions: few in an everyday run, the full number in a soak run.
pub fn times(everyday: usize, soak: usize) -> usize {
    if soaking() { soak } else { everyday }
}

impl Scenario {
    /// The scenario so many times, with a name for each, so that a long soak can go on where it was.
    pub fn parts(&self, count: usize) -> Vec<Self> {
        let part = |number| Self {
            name: format!("{}#{number}", self.name).into(),
            body: self.body,
        };
        (1..=count).map(part).collect()
    }
}

/// Makes a test of a scenario.
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
    // Dropping the runtime would wait for a blocked thread without end.
    runtime.shutdown_timeout(GRACE);
    if outcome.is_err() {
        eprintln!("{}", last_of_consoles(work.path()));
    }
    outcome
}

/// Ends the whole run when a scenario blocks the thread that its own time limit runs on.
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
