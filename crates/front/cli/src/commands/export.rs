//! `forkd export`: writes an image as an OCI archive or layout.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use futures::StreamExt;
use serde::Serialize;

use crate::args::ExportArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliResult, Exit};
use crate::signals::Stop;
use crate::ui::Ui;

/// Where an image is written.
#[derive(Debug, PartialEq, Eq)]
enum Target {
    File(PathBuf),
    Folder(PathBuf),
    Stdout,
}

impl Target {
    fn parse(text: &str) -> anyhow::Result<Self> {
        if text == "-" {
            return Ok(Self::Stdout);
        }
        match text.split_once(':') {
            Some(("oci-archive", path)) if !path.is_empty() => Ok(Self::File(path.into())),
            Some(("oci", path)) if !path.is_empty() => Ok(Self::Folder(path.into())),
            _ => bail!("write oci-archive:FILE, oci:FOLDER or -"),
        }
    }
}

/// The answer with `--json`.
#[derive(Debug, Serialize)]
struct Exported<'a> {
    name: &'a str,
    target: &'a str,
    bytes: u64,
}

/// Runs `forkd export`.
pub fn run(args: &ExportArgs, ui: &Ui) -> CliResult {
    let target = Target::parse(&args.target)?;
    if let Target::Folder(path) = &target
        && path.exists()
    {
        return Err(anyhow!("{} exists already", path.display()).into());
    }
    let client = connect(&args.daemon)?;
    block_on(async {
        let mut stop = Stop::listen()?;
        tokio::select! {
            exit = write(&client, &target, args, ui) => exit,
            exit = stop.asked() => Ok(exit),
        }
    })
}

async fn write(
    client: &forkd_rest_client::Client,
    target: &Target,
    args: &ExportArgs,
    ui: &Ui,
) -> CliResult {
    let mut content = client.export_image(&args.name).await.map_err(failed)?;
    let mut bytes = 0;
    if *target == Target::Stdout {
        while let Some(piece) = content.next().await {
            ui.raw(&piece.map_err(failed)?)?;
        }
        return Ok(Exit::OK);
    }
    let path = match target {
        Target::File(path) | Target::Folder(path) => path,
        Target::Stdout => return Ok(Exit::OK),
    };
    let folder = path.parent().filter(|path| !path.as_os_str().is_empty());
    // Beside its place: the file gets its name when it is whole.
    let draft = tempfile::Builder::new()
        .prefix(".forkd-export-")
        .tempfile_in(folder.unwrap_or(Path::new(".")));
    let mut draft = draft.with_context(|| format!("cannot write beside {}", path.display()))?;
    while let Some(piece) = content.next().await {
        let piece = piece.map_err(failed)?;
        bytes += piece.len() as u64;
        draft.write_all(&piece)?;
    }
    draft.flush()?;
    match target {
        Target::Folder(path) => unpack(draft.path(), path)?,
        _ => {
            draft
                .persist(path)
                .map_err(|error| error.error)
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    let (name, target) = (&args.name, &args.target);
    if args.json {
        ui.json(&Exported {
            name,
            target,
            bytes,
        })?;
    } else {
        ui.line(target)?;
    }
    Ok(Exit::OK)
}

/// Unpacks a layout. Other names than those of a layout are refused.
fn unpack(archive: &Path, folder: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(folder.join("blobs/sha256"))
        .with_context(|| format!("cannot make {}", folder.display()))?;
    let mut archive = tar::Archive::new(fs::File::open(archive)?);
    for entry in archive.entries()? {
        let mut entry = entry?;
        let name = entry.path()?.display().to_string();
        let is_blob = name
            .strip_prefix("blobs/sha256/")
            .is_some_and(|hex| hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_hexdigit()));
        if !is_blob && name != "index.json" && name != "oci-layout" {
            bail!("the daemon sent {name:?}, which is no part of a layout");
        }
        let mut file = fs::File::create_new(folder.join(&name))?;
        io::copy(&mut entry, &mut file)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_parsed() {
        assert_eq!(Target::parse("-").unwrap(), Target::Stdout);
        let file = Target::parse("oci-archive:a:b.tar").unwrap();
        assert_eq!(file, Target::File("a:b.tar".into()));
        assert_eq!(Target::parse("oci:x").unwrap(), Target::Folder("x".into()));
        assert!(Target::parse("docker://x").is_err() && Target::parse("x").is_err());
    }

    #[test]
    fn only_files_of_a_layout_are_unpacked() {
        let folder = tempfile::tempdir().unwrap();
        let archive = |name: &str| {
            let mut tar = tar::Builder::new(Vec::new());
            let mut header = tar::Header::new_gnu();
            header.set_size(1);
            header.set_mode(0o644);
            tar.append_data(&mut header, name, &b"x"[..]).unwrap();
            let path = folder.path().join("archive");
            fs::write(&path, tar.into_inner().unwrap()).unwrap();
            path
        };
        unpack(&archive("oci-layout"), &folder.path().join("a")).unwrap();
        assert!(folder.path().join("a/oci-layout").is_file());
        assert!(unpack(&archive("evil"), &folder.path().join("b")).is_err());
    }
}
