//! `forkd secret`: set, list and delete secrets.

use std::io::Read;

use anyhow::{Context, anyhow};
use forkd_api::PutSecret;
use forkd_types::{MAX_SECRET, SecretValue};

use crate::args::{SecretArgs, SecretCommand};
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliResult, Exit};
use crate::outcome::{self, Outcome};
use crate::table::{age, table};
use crate::ui::Ui;

/// Runs `forkd secret`.
pub fn run(args: SecretArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    match args.command {
        SecretCommand::Set { name, env, file } => {
            let text = match (env, file) {
                // The error of the variable could repeat its value.
                (Some(variable), _) => std::env::var(&variable)
                    .map_err(|_| anyhow!("the variable {variable} has no usable value"))?,
                (None, Some(path)) => std::fs::File::open(&path)
                    .and_then(bounded)
                    .with_context(|| format!("cannot read {}", path.display()))?,
                (None, None) => bounded(std::io::stdin())
                    .context("cannot read the value from standard input")?,
            };
            // Files and `echo` end with a line break that belongs to no value.
            let text = text.trim_end_matches(['\r', '\n']).to_owned();
            let value = SecretValue::new(text).map_err(anyhow::Error::from)?;
            block_on(async {
                let request = PutSecret { value };
                let set = client.set_secret(&name, &request).await.map_err(failed)?;
                match args.json {
                    true => ui.json(&set)?,
                    false => ui.aside(format!("secret {} is stored", set.name)),
                }
                Ok(Exit::OK)
            })
        }
        SecretCommand::Ls => block_on(async {
            let all = client.secrets().await.map_err(failed)?;
            if args.json {
                ui.json(&all)?;
            } else {
                let rows = all.iter().map(|secret| {
                    let ages = [secret.created_at_unix, secret.updated_at_unix].map(age);
                    let [created, updated] = ages;
                    [secret.name.clone(), created, updated]
                });
                ui.line(table(["NAME", "CREATED", "UPDATED"], rows))?;
            }
            Ok(Exit::OK)
        }),
        SecretCommand::Rm { names } => block_on(async {
            let mut outcomes = Vec::with_capacity(names.len());
            for name in names {
                let result = client.delete_secret(&name).await;
                outcomes.push(Outcome::new(name, result));
            }
            outcome::show(&outcomes, args.json, ui)
        }),
    }
}

/// Reads a text that is not much longer than a value may be.
fn bounded(from: impl Read) -> std::io::Result<String> {
    let mut text = String::new();
    from.take(MAX_SECRET as u64 + 16)
        .read_to_string(&mut text)?;
    Ok(text)
}
