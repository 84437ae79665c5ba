//! `forkd cp`: files into and out of a sandbox.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;

use anyhow::{Context, anyhow};
use forkd_client::Client;
use futures::StreamExt;

use crate::args::CpArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliError, CliResult, Exit};
use crate::ui::Ui;

/// One side of a copy.
#[derive(Debug, PartialEq, Eq)]
enum Side<'a> {
    Here(&'a str),
    Guest { id: &'a str, path: &'a str },
}

impl<'a> Side<'a> {
    fn parse(text: &'a str) -> Self {
        match text.split_once(':') {
            Some((id, path)) if id.starts_with("sb-") && path.starts_with('/') => {
                Self::Guest { id, path }
            }
            _ => Self::Here(text),
        }
    }
}

/// Runs `forkd cp`.
pub fn run(args: &CpArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        match (Side::parse(&args.from), Side::parse(&args.to)) {
            (Side::Here(from), Side::Guest { id, path }) => {
                upload(&client, from, id, path, ui).await
            }
            (Side::Guest { id, path }, Side::Here(to)) => download(&client, id, path, to).await,
            _ => Err(CliError::from(anyhow!(
                "one side must be in a sandbox and the other one here"
            ))
            .with_hint("write a path in a sandbox as ID:/PATH")),
        }
    })
}

async fn upload(client: &Client, from: &str, id: &str, path: &str, ui: &Ui) -> CliResult {
    let (content, mode) = if from == "-" {
        let mut content = Vec::new();
        std::io::stdin().read_to_end(&mut content)?;
        (content, None)
    } else {
        let content = std::fs::read(from).with_context(|| format!("cannot read {from}"))?;
        let mode = std::fs::metadata(from)?.permissions().mode() & 0o777;
        (content, Some(mode))
    };
    if from == "-" && path.ends_with('/') {
        return Err(
            CliError::from(anyhow!("what comes from standard input has no name"))
                .with_hint(format!("write the whole path: {id}:{path}NAME")),
        );
    }
    let name = from.rsplit('/').next().unwrap_or(from);
    let path = if path.ends_with('/') {
        format!("{path}{name}")
    } else {
        path.to_owned()
    };
    let done = client
        .write_file(id, &path, mode, content.into())
        .await
        .map_err(failed)?;
    ui.aside(format_args!(
        "{} bytes written to {}",
        done.bytes, done.path
    ));
    Ok(Exit::OK)
}

async fn download(client: &Client, id: &str, path: &str, to: &str) -> CliResult {
    let mut content = client.read_file(id, path).await.map_err(failed)?;
    let mut out: Box<dyn Write> = if to == "-" {
        Box::new(std::io::stdout())
    } else {
        let name = path.rsplit('/').next().unwrap_or(path);
        let to = if std::path::Path::new(to).is_dir() {
            format!("{to}/{name}")
        } else {
            to.to_owned()
        };
        Box::new(std::fs::File::create(&to).with_context(|| format!("cannot write {to}"))?)
    };
    while let Some(chunk) = content.next().await {
        out.write_all(&chunk.map_err(failed)?)?;
    }
    out.flush()?;
    Ok(Exit::OK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_are_told_apart() {
        assert_eq!(
            Side::parse("sb-1:/x"),
            Side::Guest {
                id: "sb-1",
                path: "/x"
            }
        );
        for text in ["-", "file", "./sb-1:x", "c:/x", "sb-1"] {
            assert_eq!(Side::parse(text), Side::Here(text));
        }
    }
}
