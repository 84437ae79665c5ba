//! Fetching an image through the daemon.
//!
//! The credential comes from the user's files or from a file that the arguments name. It is sent to the daemon in the
//! body of the request, for the one host it belongs to.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, anyhow};
use forkd_api::{
    FetchImage, ImageInfo, OperationInfo, OperationStatus, PullPolicy, RegistryCredential,
};
use forkd_oci::auth::{self, Credential, Helpers};
use forkd_oci::name::ImageName;
use forkd_oci::registries::Registries;
use forkd_oci::source::{Source, SourceError};
use forkd_rest_client::Client;

use super::upload;
use crate::args::{PullArgs, PullWhen};
use crate::daemon::failed;
use crate::error::CliError;
use crate::table::bytes;
use crate::ui::Ui;

/// Seconds of one request about an operation.
const WAIT_SECS: u64 = 2;
const MAX_PASSWORD: u64 = 16 << 10;

/// The name of an installed image: a plain word is one, everything else is fetched if it is missing.
pub async fn image_for(
    client: &Client,
    text: &str,
    pull: &PullArgs,
    ui: &Ui,
) -> Result<String, CliError> {
    match text.parse::<Source>() {
        Err(SourceError::NoKind { .. }) => Ok(text.to_owned()),
        _ => Ok(fetch(client, text, None, pull, ui).await?.name),
    }
}

/// Fetches an image.
pub async fn fetch(
    client: &Client,
    text: &str,
    name: Option<&str>,
    pull: &PullArgs,
    ui: &Ui,
) -> Result<ImageInfo, CliError> {
    let source: Source = text.parse().map_err(|error: SourceError| {
        let plain = matches!(error, SourceError::NoKind { .. });
        let hint = plain.then(|| format!("an image in a registry has a tag: {text}:latest"));
        CliError::new(anyhow!(error), hint)
    })?;
    let disk_mib = pull.disk.map(|disk| disk.0);
    let operation = match source {
        Source::Registry(image) => {
            let (from, credential) = with_credential(image, pull)?;
            let request = FetchImage {
                from,
                name: name.map(str::to_owned),
                platform: None,
                disk_mib,
                pull: match pull.pull {
                    PullWhen::IfMissing => PullPolicy::IfMissing,
                    PullWhen::Always => PullPolicy::Always,
                },
                credential,
            };
            client.fetch_image(&request).await.map_err(failed)?
        }
        local => {
            // The name of an archive says more than its digest.
            let named = local.short_name();
            let name = name.or_else(|| (local != Source::Stdin).then_some(named.as_str()));
            let content = upload::content(local)?;
            client
                .send_image(name, disk_mib, content)
                .await
                .map_err(failed)?
        }
    };
    follow(client, operation, ui).await
}

/// Follows an operation to its end.
async fn follow(
    client: &Client,
    mut operation: OperationInfo,
    ui: &Ui,
) -> Result<ImageInfo, CliError> {
    let mut shown = String::new();
    loop {
        match operation.status {
            OperationStatus::Running => {}
            OperationStatus::Done => {
                let image = operation.image.take();
                return image.ok_or_else(|| anyhow!("the daemon names no image").into());
            }
            OperationStatus::Failed => {
                let body = operation.error.take();
                let body = body.ok_or_else(|| anyhow!("the daemon gives no reason"))?;
                return Err(failed(forkd_rest_client::Error::Refused {
                    status: 0,
                    body,
                }));
            }
        }
        let line = match operation.total_bytes {
            0 => operation.step.clone(),
            total if operation.bytes < total => {
                format!(
                    "{}: {} of {}",
                    operation.step,
                    bytes(operation.bytes),
                    bytes(total)
                )
            }
            _ => operation.step.clone(),
        };
        if line != shown {
            ui.aside(&line);
            shown = line;
        }
        operation = client
            .operation(&operation.id, WAIT_SECS)
            .await
            .map_err(failed)?;
    }
}

/// The name with its registry, as far as it is known here, and the credential for that registry.
fn with_credential(
    image: ImageName,
    pull: &PullArgs,
) -> Result<(String, Option<RegistryCredential>), CliError> {
    let image = match &pull.registry {
        Some(default) => {
            let mut registries = Registries::default();
            registries
                .set_default(default)
                .map_err(|error| anyhow!(error))?;
            registries
                .complete(&image)
                .map_err(|error| anyhow!(error))?
        }
        None => image,
    };
    let given = match (&pull.registry_user, &pull.password_file) {
        (Some(user), Some(file)) => Some(RegistryCredential::Password {
            username: user.clone(),
            password: password(file)?,
        }),
        _ => None,
    };
    // Without a host it is not known here whose credential that would be.
    let credential = match (given, &image.host) {
        (Some(given), _) => Some(given),
        (None, Some(host)) => {
            let files = match &pull.auth_file {
                Some(file) => vec![file.clone()],
                None => auth::files_of_user(),
            };
            let found = auth::find(&files, host, &image.path, Helpers::Run);
            found.map_err(|error| anyhow!(error))?.map(wire)
        }
        (None, None) => None,
    };
    Ok((image.to_string(), credential))
}

fn wire(credential: Credential) -> RegistryCredential {
    match credential {
        Credential::Password { username, password } => RegistryCredential::Password {
            username,
            password: password.reveal().to_owned(),
        },
        Credential::Identity { token } => RegistryCredential::Identity {
            token: token.reveal().to_owned(),
        },
        Credential::Bearer { token } => RegistryCredential::Bearer {
            token: token.reveal().to_owned(),
        },
    }
}

fn password(path: &Path) -> anyhow::Result<String> {
    let read = |from: &mut dyn Read| std::io::read_to_string(from.take(MAX_PASSWORD));
    let text = if path == Path::new("-") {
        read(&mut std::io::stdin().lock())
    } else {
        std::fs::File::open(path).and_then(|mut file| read(&mut file))
    };
    let text = text.with_context(|| format!("cannot read the password from {}", path.display()))?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}
