//! `forkd volume`: manages disks that outlive sandboxes.

use std::io;
use std::path::Path;

use anyhow::Context;
use forkd_api::{CreateVolume, VolumeInfo};
use forkd_rest_client::Client;
use futures::stream;
use tokio::io::AsyncReadExt;

use crate::args::{VolumeCommand, VolumeCommandArgs};
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliError, CliResult, Exit};
use crate::outcome::{self, Outcome};
use crate::table::table;
use crate::ui::Ui;

/// Runs `forkd volume`.
pub fn run(args: VolumeCommandArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        let one = match args.command {
            VolumeCommand::Create {
                name,
                from: Some(file),
                ..
            } => Ok(import(&client, &name, &file).await?),
            VolumeCommand::Create { name, size, .. } => {
                let request = CreateVolume {
                    name,
                    size_mib: u64::from(size.0),
                };
                client.create_volume(&request).await
            }
            VolumeCommand::Inspect { name } => client.volume(&name).await,
            VolumeCommand::Commit { sandbox, name } => client.commit_volume(&sandbox, &name).await,
            VolumeCommand::Rm { names } => {
                let mut outcomes = Vec::new();
                for name in names {
                    let result = client.delete_volume(&name).await;
                    outcomes.push(Outcome::new(name, result));
                }
                return outcome::show(&outcomes, args.json, ui);
            }
            VolumeCommand::Ls => {
                let all = client.volumes().await.map_err(failed)?;
                if args.json {
                    ui.json(&all)?;
                } else {
                    ui.line(table(HEADS, all.iter().map(row)))?;
                }
                return Ok(Exit::OK);
            }
        };
        let one = one.map_err(failed)?;
        if args.json {
            ui.json(&one)?;
        } else {
            ui.line(table(HEADS, [row(&one)]))?;
        }
        Ok(Exit::OK)
    })
}

/// Creates a volume from an ext4 image of this host.
pub async fn import(client: &Client, name: &str, file: &Path) -> Result<VolumeInfo, CliError> {
    let opened = tokio::fs::File::open(file).await;
    let opened = opened.with_context(|| format!("{} cannot be read", file.display()))?;
    let pieces = stream::try_unfold(opened, |mut file| async move {
        let mut piece = vec![0; PIECE];
        let count = file.read(&mut piece).await?;
        piece.truncate(count);
        Ok::<_, io::Error>((count > 0).then_some((piece, file)))
    });
    client.import_volume(name, pieces).await.map_err(failed)
}

/// Bytes per piece of an image on its way to the daemon.
const PIECE: usize = 1 << 20;

const HEADS: [&str; 6] = ["NAME", "SIZE", "GENERATION", "LAYERS", "CLEAN", "WRITER"];

fn row(one: &VolumeInfo) -> [String; 6] {
    [
        one.name.clone(),
        format!("{} MiB", one.size_mib),
        one.generation.to_string(),
        one.layers.to_string(),
        if one.clean { "yes" } else { "no" }.to_owned(),
        one.writer.clone().unwrap_or_else(|| "-".into()),
    ]
}
