//! Arguments of `forkd build` and `forkd export`.

use std::path::PathBuf;

use clap::Args;
use forkd_types::MiB;

use super::{DaemonArgs, NetworkArgs, variable};

/// Arguments of `forkd build`.
#[derive(Debug, Args)]
#[command(
    after_help = "Each step runs in a microVM and is kept as a snapshot. A second build runs only what follows a change.\n\
    The sandbox of a step that fails stays for an hour; the error names it.\n\nExamples:\n  \
    forkd build -t app .                                build ./Dockerfile\n  \
    forkd build -t app -f app.dockerfile --target test . build one stage of another file\n  \
    forkd build -t app --secret id=token,src=token.txt . pass a secret to RUN --mount=type=secret\n  \
    forkd run app -- id                                  run a command in the image\n  \
    forkd export app oci-archive:app.tar                 write it for other programs"
)]
pub struct BuildArgs {
    /// Name of the image; one that you built before is replaced
    #[arg(short = 't', long = "tag", visible_alias = "name", value_name = "NAME")]
    pub name: String,
    /// The Dockerfile; - is standard input [default: CONTEXT/Dockerfile]
    #[arg(short = 'f', long = "file", value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Value of an ARG, or the name of a variable of this process; repeatable
    #[arg(long = "build-arg", value_name = "KEY[=VALUE]", value_parser = variable)]
    pub args: Vec<(String, String)>,
    /// A secret from a file or a variable; repeatable
    #[arg(long = "secret", value_name = "id=ID[,src=FILE|,env=NAME]", value_parser = secret)]
    pub secrets: Vec<SecretSource>,
    /// Build this stage [default: the last one]
    #[arg(long, value_name = "STAGE")]
    pub target: Option<String>,
    /// Run every step again
    #[arg(long)]
    pub no_cache: bool,
    /// Delete the sandbox of a step that fails, too
    #[arg(long)]
    pub rm: bool,
    /// Guest memory of the steps, such as 2G [default: that of the base image]
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<MiB>,
    /// vCPUs of the steps [default: that of the base image]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=32))]
    pub vcpus: Option<u8>,
    /// Size of the disk of the image; only what is used takes space on the host [default: 8G]
    #[arg(long, value_name = "SIZE")]
    pub disk: Option<MiB>,
    #[command(flatten)]
    pub network: NetworkArgs,
    /// Print nothing but the name of the image
    #[arg(short, long)]
    pub quiet: bool,
    /// Folder with the files for COPY
    #[arg(value_name = "CONTEXT")]
    pub context: PathBuf,
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Where a secret comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SecretSource {
    pub id: String,
    pub from: SecretFrom,
}

/// The place of a secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SecretFrom {
    File(PathBuf),
    Variable(String),
}

/// Parses `id=ID,src=FILE`, `id=ID,env=NAME` or `id=ID`.
fn secret(text: &str) -> Result<SecretSource, String> {
    let (mut id, mut from) = (None, None);
    for field in text.split(',') {
        match field.split_once('=') {
            Some(("id", value)) if !value.is_empty() => id = Some(value.to_owned()),
            Some(("src" | "source", value)) => from = Some(SecretFrom::File(value.into())),
            Some(("env", value)) => from = Some(SecretFrom::Variable(value.to_owned())),
            Some(("type", "file" | "env")) => {}
            _ => return Err("write id=ID,src=FILE or id=ID,env=NAME".to_owned()),
        }
    }
    let id = id.ok_or("an id is missing: write id=ID,src=FILE")?;
    Ok(SecretSource {
        from: from.unwrap_or_else(|| SecretFrom::Variable(id.clone())),
        id,
    })
}

/// Arguments of `forkd export`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    forkd export app oci-archive:app.tar     one file, for skopeo and others\n  \
    forkd export app oci:folder              an OCI layout in a folder")]
pub struct ExportArgs {
    /// Name of the image
    pub name: String,
    /// oci-archive:FILE, oci:FOLDER, or - for an archive on standard output
    pub target: String,
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_parsed() {
        let file = secret("id=a,src=/x").unwrap();
        assert_eq!(file.from, SecretFrom::File("/x".into()));
        let variable = secret("id=TOKEN").unwrap();
        assert_eq!(variable.from, SecretFrom::Variable("TOKEN".into()));
        assert_eq!(secret("type=env,id=a,env=B").unwrap().id, "a");
        assert!(secret("src=/x").is_err() && secret("id=a,mode=1").is_err());
    }
}
