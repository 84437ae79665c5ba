//! `forkd token`: make, list and revoke tokens.

use forkd_api::CreateToken;

use crate::args::{TokenArgs, TokenCommand};
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliResult, Exit};
use crate::outcome::{self, Outcome};
use crate::table::{age, table};
use crate::ui::Ui;

/// Runs `forkd token`.
pub fn run(args: TokenArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        match args.command {
            TokenCommand::Create { name, owner, role } => {
                let request = CreateToken { name, owner, role };
                let made = client.create_token(&request).await.map_err(failed)?;
                if args.json {
                    ui.json(&made)?;
                } else {
                    // The secret alone on stdout, so that a script can keep it.
                    ui.aside(format!(
                        "token {} of {} with the role {}; it is shown only once",
                        made.name, made.owner, made.role
                    ));
                    ui.line(made.token)?;
                }
                Ok(Exit::OK)
            }
            TokenCommand::Ls => {
                let all = client.tokens().await.map_err(failed)?;
                if args.json {
                    ui.json(&all)?;
                } else {
                    let rows = all.iter().map(|token| {
                        [
                            token.name.clone(),
                            token.owner.clone(),
                            token.role.to_string(),
                            age(token.created_at_unix),
                        ]
                    });
                    ui.line(table(["NAME", "OWNER", "ROLE", "CREATED"], rows))?;
                }
                Ok(Exit::OK)
            }
            TokenCommand::Revoke { names } => {
                let mut outcomes = Vec::with_capacity(names.len());
                for name in names {
                    let result = client.revoke_token(&name).await;
                    outcomes.push(Outcome::new(name, result));
                }
                outcome::show(&outcomes, args.json, ui)
            }
        }
    })
}
