//! `forkd image` and `forkd from-image`: fetch, list, describe and remove images.

mod check;
mod pull;
mod upload;

use forkd_api::{CreateSnapshot, ImageDetail};

pub use pull::image_for;

use crate::args::{FromImageArgs, ImageArgs, ImageCommand};
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliResult, Exit};
use crate::outcome::{self, Outcome};
use crate::table::{age, bytes, table};
use crate::ui::Ui;

/// Characters of a digest that a table shows.
const SHORT_DIGEST: usize = 19;

/// Runs `forkd image`.
pub fn run(args: &ImageArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        match &args.command {
            ImageCommand::Pull { image, name, pull } => {
                let fetched = pull::fetch(&client, image, name.as_deref(), pull, ui).await?;
                if args.json {
                    ui.json(&fetched)?;
                } else {
                    ui.line(&fetched.name)?;
                }
                Ok(Exit::OK)
            }
            ImageCommand::Ls => {
                let all = client.images().await.map_err(failed)?;
                if args.json {
                    ui.json(&all)?;
                    return Ok(Exit::OK);
                }
                let rows = all.iter().map(|image| {
                    let digest = image.digest.as_deref().unwrap_or("-");
                    [
                        image.name.clone(),
                        image.source.clone().unwrap_or_else(|| "-".into()),
                        digest.chars().take(SHORT_DIGEST).collect(),
                        bytes(image.physical_bytes),
                        image.created_at_unix.map_or_else(|| "-".into(), age),
                    ]
                });
                ui.line(table(
                    ["NAME", "SOURCE", "DIGEST", "ON DISK", "FETCHED"],
                    rows,
                ))?;
                Ok(Exit::OK)
            }
            ImageCommand::Inspect { name } => {
                let detail = client.image(name).await.map_err(failed)?;
                if args.json {
                    ui.json(&detail)?;
                } else {
                    ui.line(described(&detail))?;
                }
                Ok(Exit::OK)
            }
            ImageCommand::Check { name, n } => check::check(&client, name, *n, args.json, ui).await,
            ImageCommand::Rm { names } => {
                let mut outcomes = Vec::with_capacity(names.len());
                for name in names {
                    let result = client.delete_image(name).await;
                    outcomes.push(Outcome::new(name.clone(), result));
                }
                outcome::show(&outcomes, args.json, ui)
            }
            ImageCommand::Prune => {
                let pruned = client.prune_images().await.map_err(failed)?;
                if args.json {
                    ui.json(&pruned)?;
                } else {
                    for name in &pruned.images {
                        ui.line(name)?;
                    }
                    ui.aside(format_args!("{} freed", bytes(pruned.bytes)));
                }
                Ok(Exit::OK)
            }
        }
    })
}

/// One line for each fact that is known.
fn described(detail: &ImageDetail) -> String {
    let words = |list: &[String]| (!list.is_empty()).then(|| shell_words::join(list));
    let list = |list: &[String]| (!list.is_empty()).then(|| list.join(", "));
    let ports: Vec<String> = detail.ports.iter().map(u16::to_string).collect();
    let env: Vec<String> = detail.env.iter().map(|(k, v)| format!("{k}={v}")).collect();
    let info = &detail.info;
    let facts = [
        ("name", Some(info.name.clone())),
        ("source", info.source.clone()),
        ("digest", info.digest.clone()),
        ("on disk", Some(bytes(info.physical_bytes))),
        ("memory", Some(format!("{} MiB", detail.memory_mib))),
        ("vcpus", Some(detail.vcpus.to_string())),
        ("user", detail.user.clone()),
        ("directory", detail.working_dir.clone()),
        ("entrypoint", words(&detail.entrypoint)),
        ("command", words(&detail.cmd)),
        ("ports", list(&ports)),
        ("healthcheck", words(&detail.healthcheck)),
        ("stop signal", detail.stop_signal.clone()),
        ("environment", list(&env)),
        (
            "packages",
            (detail.packages > 0).then(|| detail.packages.to_string()),
        ),
        ("services", list(&detail.services)),
        (
            "check",
            detail.check.as_ref().and_then(|check| words(&check.exec)),
        ),
        ("snapshots", list(&detail.snapshots)),
    ];
    let lines = facts
        .into_iter()
        .filter_map(|(name, fact)| Some(format!("{name:<12} {}", fact?)));
    lines.collect::<Vec<_>>().join("\n")
}

/// Runs `forkd from-image`.
pub fn from_image(args: &FromImageArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        let image = image_for(&client, &args.image, &args.pull, ui).await?;
        ui.aside(format_args!(
            "booting a parent from {image} and freezing it …"
        ));
        let request = CreateSnapshot {
            tag: args.tag.clone(),
            image: Some(image),
            vcpus: args.vcpus,
            mem_size_mib: args.memory.map(|memory| memory.0),
            ..CreateSnapshot::default()
        };
        let made = client.create_snapshot(&request).await.map_err(failed)?;
        if args.json {
            ui.json(&made)?;
        } else {
            ui.line(&made.tag)?;
        }
        Ok(Exit::OK)
    })
}
