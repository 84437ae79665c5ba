//! Arguments of the commands that share snapshots.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::DaemonArgs;

/// Arguments of `forkd pack` and `forkd push`.
#[derive(Debug, Args)]
pub struct PackOptions {
    /// Description for readers of the artifact
    #[arg(long, value_name = "TEXT")]
    pub description: Option<String>,
    /// Sign the artifact with this SSH key, by `ssh-keygen -Y sign`
    #[arg(long, value_name = "KEY")]
    pub sign: Option<PathBuf>,
    /// Share the snapshot although it holds keys or tokens
    #[arg(long)]
    pub allow_secrets: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd pack`.
#[derive(Debug, Args)]
#[command(
    after_help = "The file is an OCI layout in a tar archive; skopeo reads it as oci-archive:FILE:TAG. Each page is\n\
    stored once. Snapshots with private keys or access tokens are refused.\n\nExamples:\n  \
    forkd pack py py.forkd                            pack a snapshot\n  \
    forkd pack py py.forkd --sign ~/.ssh/id_ed25519   and sign it"
)]
pub struct PackArgs {
    /// Tag of the snapshot
    pub tag: String,
    /// File to write
    pub file: PathBuf,
    #[command(flatten)]
    pub options: PackOptions,
}

/// Arguments of `forkd push`.
#[derive(Debug, Args)]
#[command(
    after_help = "A second push of a name sends only pages that the target does not have. An interrupted push goes on\n\
    where it ended. Logins of docker and podman are used for registries. An object store is found by\n\
    AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.\n\nExamples:\n  \
    forkd push py /srv/hub                        to a folder, under the name py\n  \
    forkd push py oci:/srv/hub:py-2               under another name\n  \
    forkd push py oci://HOST/team/machines:py     to a registry, under the tag py\n  \
    forkd push py s3://BUCKET/machines:py         to an object store\n  \
    forkd push py 'https://HOST/py.forkd?...'     one file, by PUT to a presigned URL"
)]
pub struct PushArgs {
    /// Tag of the snapshot
    pub tag: String,
    /// Folder, oci:FOLDER[:NAME], oci-archive:FILE, oci://HOST/REPOSITORY[:TAG], s3://BUCKET/PREFIX[:NAME] or URL of a
    /// file
    pub target: String,
    #[command(flatten)]
    pub options: PackOptions,
}

/// Treatment of the memory of an artifact.
#[derive(Debug, Clone, Copy, Default, ValueEnum)]
pub enum Memory {
    /// Take it if this host can run it, else boot the parent here
    #[default]
    Auto,
    /// Take it, or refuse the artifact
    Require,
    /// Boot the parent here from its disk
    Never,
}

/// Arguments of `forkd unpack` and `forkd pull`.
#[derive(Debug, Args)]
#[command(
    after_help = "Everything is compared with its digest before the snapshot appears. Pages that this host has\n\
    already are not sent to the daemon.\n\nExamples:\n  \
    forkd unpack py.forkd                       the snapshot gets the name that its publisher gave\n  \
    forkd unpack py.forkd --tag py-2            or another one\n  \
    forkd pull oci:/srv/hub:py --require-signature --signers ./allowed_signers\n  \
    forkd pull oci://HOST/team/machines:py      from a registry; oci://HOST/team/machines@sha256:... is pinned\n  \
    forkd pull s3://BUCKET/machines:py          from an object store\n  \
    forkd pull https://HOST/machines/:py        from a folder on a web server"
)]
pub struct UnpackArgs {
    /// File, folder, oci:FOLDER[:NAME], oci-archive:FILE[:NAME], oci://HOST/REPOSITORY[:TAG|@DIGEST],
    /// s3://BUCKET/PREFIX:NAME, https://HOST/FOLDER/[:NAME] or https://HOST/FILE.forkd
    #[arg(value_name = "SOURCE")]
    pub source: String,
    /// Tag of the new snapshot [default: the name that the publisher gave]
    #[arg(long)]
    pub tag: Option<String>,
    /// Treatment of the memory of the artifact
    #[arg(long, value_enum, default_value_t, value_name = "WHEN")]
    pub memory: Memory,
    /// Refuse an artifact that no allowed signer has signed
    #[arg(long, requires = "signers")]
    pub require_signature: bool,
    /// File of allowed signers, in the format of OpenSSH
    #[arg(long, env = "FORKD_SIGNERS", value_name = "FILE")]
    pub signers: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}
