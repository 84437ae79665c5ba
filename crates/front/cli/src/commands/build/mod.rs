//! `forkd build`: sends a Dockerfile and its context to the daemon and shows the progress.

mod context;

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use base64::Engine;
use forkd_api::{BuildEvent, BuildImage, ErrorBody, ImageInfo};
use forkd_dockerfile::{Ignore, limits};
use forkd_rest_client::Error;
use serde::Serialize;

use crate::args::{BuildArgs, SecretFrom, SecretSource};
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliError, CliResult, Exit};
use crate::signals::Stop;
use crate::ui::Ui;

/// Bytes of a secret.
const MAX_SECRET: u64 = 256 << 10;

/// The answer with `--json`.
#[derive(Debug, Serialize)]
struct Built {
    image: ImageInfo,
    ran: u32,
    cached: u32,
}

/// Runs `forkd build`.
pub fn run(args: &BuildArgs, ui: &Ui) -> CliResult {
    let request = request(args)?;
    let files = files(args, &request.dockerfile)?;
    let client = connect(&args.daemon)?;
    block_on(async {
        let mut stop = Stop::listen()?;
        tokio::select! {
            exit = follow(&client, &request, files, args, ui) => exit,
            // Closing the connection cancels the build.
            exit = stop.asked() => Ok(exit),
        }
    })
}

fn request(args: &BuildArgs) -> Result<BuildImage, CliError> {
    let secrets = args.secrets.iter().map(|secret| {
        let value = base64::engine::general_purpose::STANDARD.encode(value(secret)?);
        Ok((secret.id.clone(), value))
    });
    Ok(BuildImage {
        name: args.name.clone(),
        dockerfile: dockerfile(args)?,
        target: args.target.clone(),
        args: args.args.iter().cloned().collect(),
        secrets: secrets.collect::<anyhow::Result<BTreeMap<_, _>>>()?,
        no_cache: args.no_cache,
        rm: args.rm,
        memory_mib: args.memory.map(|mib| mib.0),
        vcpus: args.vcpus,
        disk_mib: args.disk.map(|mib| mib.0),
        network: args.network.request(),
    })
}

fn value(secret: &SecretSource) -> anyhow::Result<Vec<u8>> {
    match &secret.from {
        SecretFrom::File(path) => {
            let file = std::fs::File::open(path);
            let file = file.with_context(|| format!("cannot open {}", path.display()))?;
            let mut bytes = Vec::new();
            file.take(MAX_SECRET + 1)
                .read_to_end(&mut bytes)
                .with_context(|| format!("cannot read {}", path.display()))?;
            if bytes.len() as u64 > MAX_SECRET {
                return Err(anyhow!("{} is too large for a secret", path.display()));
            }
            Ok(bytes)
        }
        SecretFrom::Variable(name) => std::env::var_os(name)
            .map(std::os::unix::ffi::OsStringExt::into_vec)
            .ok_or_else(|| anyhow!("variable {name} of secret {} is not set", secret.id)),
    }
}

fn path_of_dockerfile(args: &BuildArgs) -> PathBuf {
    match &args.file {
        Some(path) => path.clone(),
        None => args.context.join("Dockerfile"),
    }
}

fn dockerfile(args: &BuildArgs) -> anyhow::Result<String> {
    let path = path_of_dockerfile(args);
    let most = limits::FILE_BYTES as u64 + 1;
    let mut text = String::new();
    let read = match path == Path::new("-") {
        true => std::io::stdin().lock().take(most).read_to_string(&mut text),
        false => {
            std::fs::File::open(&path).and_then(|file| file.take(most).read_to_string(&mut text))
        }
    };
    read.with_context(|| format!("cannot read {}", path.display()))?;
    Ok(text)
}

/// The files to send: none if no instruction needs one.
fn files(args: &BuildArgs, dockerfile: &str) -> Result<Option<context::Files>, CliError> {
    // The daemon refuses a Dockerfile that does not parse, with the line.
    let needed = forkd_dockerfile::parse(dockerfile).is_ok_and(|file| file.uses_context());
    if !args.context.is_dir() {
        return Err(anyhow!("{} is not a folder", args.context.display()).into());
    }
    if !needed {
        return Ok(None);
    }
    let mut own = path_of_dockerfile(args).into_os_string();
    own.push(".dockerignore");
    let candidates = [PathBuf::from(own), args.context.join(".dockerignore")];
    let mut ignore = Ignore::default();
    for path in candidates {
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => {
                let text = format!("cannot read {}", path.display());
                return Err(anyhow::Error::new(error).context(text).into());
            }
        };
        let parsed = Ignore::parse(&text);
        ignore = parsed.with_context(|| format!("{} is invalid", path.display()))?;
        break;
    }
    Ok(Some(context::Files::find(&args.context, &ignore)?))
}

async fn follow(
    client: &forkd_rest_client::Client,
    request: &BuildImage,
    files: Option<context::Files>,
    args: &BuildArgs,
    ui: &Ui,
) -> CliResult {
    let quiet = args.quiet || args.json;
    if let Some(files) = &files
        && !quiet
    {
        ui.aside(format_args!("sending {} files", files.len()));
    }
    let content = context::stream(request, files)?;
    let mut events = client.build_image(content).await.map_err(failed)?;
    let mut at_start = true;
    while let Some(event) = events.next().await.map_err(failed)? {
        match event {
            BuildEvent::Finished { image, ran, cached } => {
                if args.json {
                    ui.json(&Built { image, ran, cached })?;
                } else {
                    if !quiet {
                        ui.aside(format_args!("{ran} steps ran, {cached} were in the cache"));
                    }
                    ui.line(&image.name)?;
                }
                return Ok(Exit::OK);
            }
            BuildEvent::Failed { error, .. } => return Err(refused(error)),
            event if !quiet => show(&event, &mut at_start, ui),
            _ => {}
        }
    }
    Err(anyhow!("the daemon ended the build without a result").into())
}

fn refused(body: ErrorBody) -> CliError {
    // As if the request had been refused: the stream had begun with 200.
    failed(Error::Refused { status: 422, body })
}

fn show(event: &BuildEvent, at_start: &mut bool, ui: &Ui) {
    if !*at_start && !matches!(event, BuildEvent::Output { .. }) {
        ui.talk("");
        *at_start = true;
    }
    match event {
        BuildEvent::Step {
            line, text, cached, ..
        } => {
            let mark = if *cached { "cached" } else { "run" };
            ui.talk(format_args!("line {line} ({mark}): {text}"));
        }
        BuildEvent::Note { text } => ui.aside(text),
        BuildEvent::Output { text, .. } => {
            ui.ask(text);
            *at_start = text.ends_with('\n');
        }
        BuildEvent::Finished { .. } | BuildEvent::Failed { .. } => {}
    }
}
