//! Pages that the first request touches are made present for the next child. Prints cost and gain.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::ensure;
use forkd_testkit::{BootOptions, ForkOptions, Frozen, Kit};
use forkd_vmm_proto::VmmErrorCode;

use crate::scenario::{Registered, Run, everyday, times};
use crate::support::{freeze, vmm_error, warm_python};

pub const SCENARIOS: &[Registered] = &[everyday!(pages_of_the_first_request)];

/// The request after which the working set is recorded.
const REQUEST: &str = "int(np.arange(1000).sum())";
const ANSWER: i64 = 499_500;

pub async fn pages_of_the_first_request(run: Run) -> anyhow::Result<()> {
    let kit = &run.kit;
    let frozen = freeze(warm_python(kit, BootOptions::default()).await?).await?;
    let set = record(kit, &frozen).await?;

    let (mut plain, mut prefaulted) = (Vec::new(), Vec::new());
    for _ in 0..times(3, 20) {
        plain.push(first_answer(kit, &frozen, None).await?);
        prefaulted.push(first_answer(kit, &frozen, Some(set.clone())).await?);
    }
    let (plain, prefaulted) = (median(plain), median(prefaulted));
    eprintln!(
        "from the fork to the first answer: {plain:.1?}, with the pages it touches present {prefaulted:.1?}"
    );
    rubbish_is_refused(kit, &frozen, &set).await
}

async fn record(kit: &Kit, frozen: &Frozen) -> anyhow::Result<PathBuf> {
    let child = kit.fork(frozen).await?;
    ensure!(child.eval(REQUEST).await? == ANSWER, "a child computes");
    let path = kit.folder("working-set")?.join("pages");
    child.working_set(&path).await?;
    Ok(path)
}

async fn first_answer(
    kit: &Kit,
    frozen: &Frozen,
    prefault: Option<PathBuf>,
) -> anyhow::Result<Duration> {
    let shell = kit.empty(frozen.shape).await?;
    let options = ForkOptions {
        prefault,
        ..Default::default()
    };
    let begun = Instant::now();
    kit.restore(&shell, frozen, options).await?;
    ensure!(shell.eval(REQUEST).await? == ANSWER, "a child computes");
    Ok(begun.elapsed())
}

/// A damaged list of pages is refused.
async fn rubbish_is_refused(kit: &Kit, frozen: &Frozen, set: &PathBuf) -> anyhow::Result<()> {
    let mut bytes = std::fs::read(set)?;
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(set, bytes)?;
    let shell = kit.empty(frozen.shape).await?;
    let options = ForkOptions {
        prefault: Some(set.clone()),
        ..Default::default()
    };
    let Err(error) = kit.restore(&shell, frozen, options).await else {
        anyhow::bail!("a damaged list of pages was taken");
    };
    let said = vmm_error(&error)?;
    ensure!(said.code == VmmErrorCode::BadSnapshot, "{said:?}");
    Ok(())
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}
