//! What a scenario is, and how one is run.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use anyhow::Context;
use forkd_testkit::Kit;
use libtest_mimic::{Failed, Trial};

/// A scenario never takes longer than this, however slow the machine.
const LIMIT: Duration = Duration::from_secs(900);

type Body = fn(Run) -> Pin<Box<dyn Future<Output = anyhow::Result<()>>>>;

/// A named scenario.
pub struct Scenario {
    /// Module and function, such as `boot::one_vcpu`.
    pub name: &'static str,
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
    runtime.block_on(async {
        let kit = Kit::start().await?;
        tokio::time::timeout(LIMIT, body(Run { kit }))
            .await
            .with_context(|| format!("not finished within {} s", LIMIT.as_secs()))?
    })
}

/// Lists scenarios: `list![boot: one_vcpu, two_vcpus; exec: many]`.
macro_rules! list {
    ($($module:ident: $($name:ident),+ $(,)?);+ $(;)?) => {
        vec![$($($crate::scenario::Scenario {
            name: concat!(stringify!($module), "::", stringify!($name)),
            body: |run| Box::pin($module::$name(run)),
        }),+),+]
    };
}
pub(crate) use list;
