//! `forkd-image fetch`: makes the disk of a container image for a daemon.
//!
//! The process is confined before it reads the request ([`forkd_image::confine`]). The credential comes with the request on
//! standard input, so that it stands in no argument. Every line on standard output is a [`FetchLine`].

use std::io::{BufRead, Read, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use forkd_formats::image_cli::{
    FetchCredential, FetchFailure, FetchLine, FetchProgress, FetchRequest, ImageFetched,
    MAX_REQUEST,
};
use forkd_image::confine::confine;
use forkd_image::error::Error;
use forkd_image::image;
use forkd_image::progress::Progress;
use forkd_image::recipe::Recipe;
use forkd_image::root::oci::OciRoot;
use forkd_oci::auth::{Credential, Helpers, Secret};
use forkd_oci::manifest::Platform;
use forkd_oci::registries::Registries;
use forkd_oci::registry::{self, RegistryError};
use forkd_oci::source::Source;
use forkd_oci::{Means, OciError};
use forkd_types::MiB;

use crate::args::FetchArgs;

/// Characters of an image's name that are of its digest.
const DIGEST_CHARS: usize = 12;
/// The longest name that is made. Tags that are made from it have 64 characters at most.
const NAME_CHARS: usize = 48;
/// Time between two reports.
const REPORT: Duration = Duration::from_millis(500);

/// Confines the process and makes the image.
pub fn main(args: &FetchArgs) -> ExitCode {
    let readable: Vec<&Path> = match &args.registries {
        Some(file) => vec![file.as_path()],
        None => vec![Path::new("/etc/forkd/registries.toml")],
    };
    let registries = Registries::read(args.registries.as_deref());
    let files = registries
        .iter()
        .flat_map(Registries::files)
        .map(Path::to_owned);
    let files: Vec<_> = files.collect();
    let readable: Vec<&Path> = readable
        .into_iter()
        .chain(files.iter().map(AsRef::as_ref))
        .collect();
    for folder in [&args.into, &args.blobs] {
        if let Err(error) = std::fs::create_dir_all(folder) {
            return failed(&Failure::internal(format!(
                "cannot make {}: {error}",
                folder.display()
            )));
        }
    }
    if let Err(error) = confine(&[&args.into, &args.blobs], &readable) {
        return failed(&Failure::internal(forkd_types::chain(&error)));
    }
    let made = registries
        .map_err(|error| Failure::of(&Error::Registry(error.into())))
        .and_then(|registries| make(args, &registries));
    match made {
        Ok(fetched) => say(&FetchLine::Done(fetched)),
        Err(failure) => failed(&failure),
    }
}

struct Failure(FetchFailure);

impl Failure {
    fn internal(message: String) -> Self {
        Self(FetchFailure {
            kind: forkd_formats::image_cli::FetchProblem::Internal,
            message,
            hint: None,
        })
    }

    fn bad(message: String) -> Self {
        Self(FetchFailure {
            kind: forkd_formats::image_cli::FetchProblem::Invalid,
            message,
            hint: None,
        })
    }

    fn of(error: &Error) -> Self {
        Self(FetchFailure {
            kind: problem(error),
            message: forkd_types::chain(error),
            hint: error.hint(),
        })
    }
}

/// The kind of a failure, from the first error of the chain that has one.
fn problem(error: &(dyn std::error::Error + 'static)) -> forkd_formats::image_cli::FetchProblem {
    use forkd_formats::image_cli::FetchProblem as Problem;
    let mut cause = Some(error);
    let mut found = Problem::Invalid;
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<RegistryError>() {
            found = match error {
                RegistryError::NotFound { .. } => Problem::NotFound,
                RegistryError::Denied { .. } => Problem::Denied,
                RegistryError::Registries(_) => Problem::Configuration,
                RegistryError::Nowhere { tried, .. } => tried
                    .last()
                    .map_or(Problem::Unreachable, |(_, error)| problem(error)),
                RegistryError::Image(_) | RegistryError::NoSize { .. } => Problem::Invalid,
                _ => Problem::Unreachable,
            };
        }
        if let Some(OciError::NoPlatform { .. }) = error.downcast_ref() {
            found = Problem::Platform;
        }
        if let Some(OciError::Registry(error)) = error.downcast_ref() {
            return problem(error.as_ref());
        }
        let full = |error: &std::io::Error| error.kind() == std::io::ErrorKind::StorageFull;
        if error.downcast_ref().is_some_and(full) {
            return Problem::NoSpace;
        }
        cause = error.source();
    }
    found
}

/// Writes a line. A reader that is gone is the daemon's end: nothing is left to say then.
fn say(line: &FetchLine) -> ExitCode {
    let text = serde_json::json!(line).to_string();
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn failed(failure: &Failure) -> ExitCode {
    say(&FetchLine::Failed(failure.0.clone()));
    ExitCode::FAILURE
}

fn make(args: &FetchArgs, registries: &Registries) -> Result<ImageFetched, Failure> {
    let mut line = String::new();
    // An archive may follow: the rest stays in the buffer of standard input.
    std::io::stdin()
        .lock()
        .take(MAX_REQUEST)
        .read_line(&mut line)
        .map_err(|error| Failure::internal(format!("cannot read the request: {error}")))?;
    let request: FetchRequest = serde_json::from_str(&line)
        .map_err(|_| Failure::internal("the request does not parse".into()))?;
    let source: Source = match request.source.parse() {
        Ok(source @ (Source::Registry(_) | Source::Stdin)) => source,
        Ok(_) => {
            return Err(Failure::bad(
                "the image is neither in a registry nor sent along".into(),
            ));
        }
        Err(error) => return Err(Failure::bad(forkd_types::chain(&error))),
    };
    let platform = match request.platform.as_deref().map(str::parse) {
        None => Platform::host(),
        Some(Ok(platform)) => platform,
        Some(Err(error)) => return Err(Failure::bad(forkd_types::chain(&error))),
    };
    let mut reports = Reports::default();
    let means = Means {
        platform: &platform,
        registries,
        credential: request.credential.map(credential),
        auth_files: registries
            .auth_file()
            .map(Path::to_owned)
            .into_iter()
            .collect(),
        helpers: Helpers::Ignore,
        blobs: args.blobs.clone(),
        spool: args.into.clone(),
        told: &mut |progress| reports.tell(progress),
    };
    let found = OciRoot::open(&source, means).map_err(|error| Failure::of(&error.into()))?;
    let digest = found.digest().hex();
    let name = match request.name {
        Some(name) => name,
        None => name_of(&source, &digest),
    };
    let name = name
        .parse()
        .map_err(|source| Failure::of(&Error::Name { name, source }))?;
    let recipe = Recipe::of_image(name, found.name(), MiB(request.disk_mib));
    let progress = Progress::to(|line| {
        say(&FetchLine::Progress(FetchProgress::Step {
            text: line.to_owned(),
        }));
    });
    let image = image::build_in(&args.into, &recipe, &found, &progress)
        .map_err(|error| Failure::of(&error.into()))?;
    Ok(ImageFetched {
        name: image.record.name,
        reference: found.name().to_owned(),
        digest: found.digest().to_string(),
    })
}

/// `python:3-slim` becomes `python-3-slim-0123456789ab`: another content has another name.
fn name_of(source: &Source, digest: &str) -> String {
    let mut name = source.short_name();
    name.truncate(NAME_CHARS - DIGEST_CHARS - 1);
    format!("{name}-{}", digest.get(..DIGEST_CHARS).unwrap_or(digest))
}

fn credential(wire: FetchCredential) -> Credential {
    match wire {
        FetchCredential::Password { username, password } => Credential::Password {
            username,
            password: Secret::new(password),
        },
        FetchCredential::Identity { token } => Credential::Identity {
            token: Secret::new(token),
        },
        FetchCredential::Bearer { token } => Credential::Bearer {
            token: Secret::new(token),
        },
    }
}

/// Passes progress on, not too often.
#[derive(Default)]
struct Reports {
    last: Option<Instant>,
}

impl Reports {
    fn tell(&mut self, progress: registry::Progress) {
        let line = match progress {
            registry::Progress::Found {
                digest,
                layers,
                bytes,
            } => FetchProgress::Found {
                digest: digest.to_string(),
                layers,
                bytes,
            },
            registry::Progress::Fetched { bytes, of } => {
                let recent = self.last.is_some_and(|last| last.elapsed() < REPORT);
                if recent && bytes < of {
                    return;
                }
                self.last = Some(Instant::now());
                FetchProgress::Fetched { bytes, of }
            }
        };
        say(&FetchLine::Progress(line));
    }
}

/// Progress for people: a line for each tenth.
#[derive(Default)]
pub struct Shown {
    tenth: u64,
}

impl Shown {
    pub fn line(&mut self, progress: registry::Progress) -> Option<String> {
        let mb = |bytes: u64| format!("{:.1} MB", bytes as f64 / 1e6);
        match progress {
            registry::Progress::Found {
                digest,
                layers,
                bytes,
            } => Some(format!("found {digest}: {layers} layers, {}", mb(bytes))),
            registry::Progress::Fetched { bytes, of } => {
                let tenth = bytes * 10 / of.max(1);
                if tenth <= self.tenth {
                    return None;
                }
                self.tenth = tenth;
                Some(format!("  fetched {} of {}", mb(bytes), mb(of)))
            }
        }
    }
}
