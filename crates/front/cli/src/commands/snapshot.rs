//! `forkd snapshot`: boots a parent and freezes it, or freezes a running sandbox.

use anyhow::{Context, anyhow};
use forkd_api::{BranchMode, BranchRequest, CreateSnapshot, VolumeMount};
use forkd_rest_client::Client;

use super::branch::show;
use super::volume;
use crate::args::{SnapshotArgs, VolumeSource};
use crate::daemon::{block_on, connect, failed, variable};
use crate::error::{CliError, CliResult, Exit};
use crate::ui::Ui;

/// Runs `forkd snapshot`.
pub fn run(args: SnapshotArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    let json = args.json;
    if let Some(id) = args.from_sandbox {
        let request = BranchRequest {
            tag: args.tag,
            mode: Some(if args.diff {
                BranchMode::Diff
            } else {
                BranchMode::Live
            }),
            wait: !args.no_wait,
            ..BranchRequest::default()
        };
        return block_on(async {
            let made = client.branch(&id, &request).await.map_err(failed)?;
            show(&made, json, ui)?;
            Ok(Exit::OK)
        });
    }
    // Flags take precedence over the environment.
    let rootfs = if args.image.is_some() {
        None
    } else {
        args.rootfs.or_else(|| variable("FORKD_ROOTFS"))
    };
    if args.image.is_none() && rootfs.is_none() {
        return Err(
            CliError::from(anyhow!("nothing to boot from: give --image or --rootfs"))
                .with_hint("`forkd images --images` lists the installed images"),
        );
    }
    let warmup = match &args.warmup {
        Some(text) => shell_words::split(text).context("--warmup cannot be split into words")?,
        None => Vec::new(),
    };
    let request = CreateSnapshot {
        tag: args.tag.unwrap_or_default(),
        kernel: args.kernel.or_else(|| variable("FORKD_KERNEL")),
        rootfs,
        image: args.image,
        initramfs: None,
        rw: args.rw,
        tap: args.tap,
        boot_wait_secs: args.boot_wait_secs,
        mem_size_mib: args.memory.map(|memory| memory.0),
        vcpus: args.vcpus,
        warmup,
        warmup_code: args.warmup_code,
        ready_timeout_secs: args.ready_timeout_secs,
        wait: true,
        labels: std::collections::BTreeMap::new(),
        engine: args.engine,
        volumes: Vec::new(),
    };
    block_on(async {
        let request = CreateSnapshot {
            volumes: volumes(&client, &request.tag, args.volumes).await?,
            ..request
        };
        ui.aside("booting a parent, warming it up, freezing it …");
        let made = client.create_snapshot(&request).await.map_err(failed)?;
        show(&made, json, ui)?;
        Ok(Exit::OK)
    })
}

/// The volumes of a parent. A file of this host becomes a volume with the name of the tag and the file.
async fn volumes(
    client: &Client,
    tag: &str,
    sources: Vec<VolumeSource>,
) -> Result<Vec<VolumeMount>, CliError> {
    let mut mounts = Vec::new();
    for source in sources {
        mounts.push(match source {
            VolumeSource::Volume(mount) => mount,
            VolumeSource::File { file, path, mode } => {
                let stem = file.file_stem().unwrap_or_default().to_string_lossy();
                let made = volume::import(client, &format!("{tag}-{stem}"), &file).await?;
                VolumeMount {
                    name: made.name,
                    path,
                    mode,
                }
            }
        });
    }
    Ok(mounts)
}
