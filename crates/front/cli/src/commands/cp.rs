//! `forkd cp`: copies a file into or out of a sandbox.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use forkd_api::WriteResult;
use forkd_rest_client::Client;
use futures::{Stream, StreamExt};
use tokio::io::{AsyncRead, AsyncReadExt};

use crate::args::CpArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliError, CliResult, Exit};
use crate::ui::Ui;

/// Bytes per read.
const PIECE: usize = 256 * 1024;

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
    if args.json && args.to == "-" {
        return Err(CliError::from(anyhow!(
            "--json and a file on standard output exclude each other"
        ))
        .with_hint("leave --json out, or copy to a file"));
    }
    let client = connect(&args.daemon)?;
    block_on(async {
        let done = match (Side::parse(&args.from), Side::parse(&args.to)) {
            (Side::Here(from), Side::Guest { id, path }) => {
                let done = upload(&client, from, id, path).await?;
                ui.aside(format_args!(
                    "{} bytes written to {}",
                    done.bytes, done.path
                ));
                done
            }
            (Side::Guest { id, path }, Side::Here(to)) => download(&client, id, path, to).await?,
            _ => {
                return Err(CliError::from(anyhow!(
                    "source and target must be one local path and one path in a sandbox"
                ))
                .with_hint("write a path in a sandbox as ID:/PATH"));
            }
        };
        if args.json {
            ui.json(&done)?;
        }
        Ok(Exit::OK)
    })
}

async fn upload(
    client: &Client,
    from: &str,
    id: &str,
    path: &str,
) -> Result<WriteResult, CliError> {
    if from == "-" {
        if path.ends_with('/') {
            return Err(CliError::from(anyhow!(
                "standard input has no file name, and the target is a directory"
            ))
            .with_hint(format!("write the whole path: {id}:{path}NAME")));
        }
        return client
            .write_file(id, path, None, pieces(tokio::io::stdin()))
            .await
            .map_err(failed);
    }
    let unreadable = || format!("cannot read {from}");
    let file = tokio::fs::File::open(from).await.with_context(unreadable)?;
    let about = file.metadata().await.with_context(unreadable)?;
    if about.is_dir() {
        return Err(
            CliError::from(anyhow!("{from} is a directory")).with_hint(format!(
                "copy it as an archive: tar c {from} | forkd exec -i {id} -- tar x"
            )),
        );
    }
    let mode = about.permissions().mode() & 0o777;
    let name = from.rsplit('/').next().unwrap_or(from);
    let path = if path.ends_with('/') {
        format!("{path}{name}")
    } else {
        path.to_owned()
    };
    client
        .write_file(id, &path, Some(mode), pieces(file))
        .await
        .map_err(failed)
}

/// The content of a reader as a stream.
fn pieces(
    from: impl AsyncRead + Unpin + Send + 'static,
) -> impl Stream<Item = std::io::Result<Vec<u8>>> + Send + 'static {
    futures::stream::try_unfold(from, |mut from| async move {
        let mut piece = Vec::with_capacity(PIECE);
        let length = from.read_buf(&mut piece).await?;
        Ok((length > 0).then_some((piece, from)))
    })
}

async fn download(
    client: &Client,
    id: &str,
    path: &str,
    to: &str,
) -> Result<WriteResult, CliError> {
    let content = client.read_file(id, path).await.map_err(failed)?;
    if to == "-" {
        let bytes = save(content, &mut std::io::stdout()).await?;
        return Ok(written(to.into(), bytes));
    }
    let name = path.rsplit('/').next().unwrap_or(path);
    let target = match Path::new(to) {
        folder if folder.is_dir() => folder.join(name),
        file => file.to_owned(),
    };
    let unwritable = || format!("cannot write {}", target.display());
    let staging = Staging::beside(&target);
    let mut out = fs::File::create(&staging.path).with_context(unwritable)?;
    let bytes = save(content, &mut out).await?;
    staging.keep().with_context(unwritable)?;
    Ok(written(target, bytes))
}

fn written(path: PathBuf, bytes: u64) -> WriteResult {
    WriteResult {
        path: path.display().to_string(),
        bytes,
    }
}

async fn save(
    mut content: impl Stream<Item = Result<impl AsRef<[u8]>, forkd_rest_client::Error>> + Unpin,
    out: &mut impl Write,
) -> Result<u64, CliError> {
    let mut bytes = 0;
    while let Some(piece) = content.next().await {
        let piece = piece.map_err(failed)?;
        out.write_all(piece.as_ref())?;
        bytes += piece.as_ref().len() as u64;
    }
    out.flush()?;
    Ok(bytes)
}

/// A temporary file beside the target. [`Staging::keep`] renames it to the target; otherwise dropping it deletes it.
struct Staging {
    path: PathBuf,
    target: PathBuf,
}

impl Staging {
    fn beside(target: &Path) -> Self {
        // A symbolic link is kept; the file it points to is replaced.
        let target = target.canonicalize().unwrap_or_else(|_| target.to_owned());
        let path = match fs::metadata(&target) {
            // A device or a pipe cannot be replaced by a rename: write to it directly.
            Ok(about) if !about.is_file() => target.clone(),
            _ => {
                let mut name = target.file_name().unwrap_or_default().to_owned();
                name.push(format!(".part-{}", std::process::id()));
                target.with_file_name(name)
            }
        };
        Self { path, target }
    }

    fn is_target(&self) -> bool {
        self.path == self.target
    }

    fn keep(self) -> std::io::Result<()> {
        if self.is_target() {
            return Ok(());
        }
        if let Ok(before) = fs::metadata(&self.target) {
            fs::set_permissions(&self.path, before.permissions())?;
        }
        fs::rename(&self.path, &self.target)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.is_target() {
            // Already renamed to the target: nothing to remove.
            let _ = fs::remove_file(&self.path);
        }
    }
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

    #[tokio::test]
    async fn everything_is_read() {
        let content: Vec<u8> = (0..3 * PIECE).map(|at| at as u8).collect();
        let read: Vec<_> = pieces(std::io::Cursor::new(content.clone()))
            .collect()
            .await;
        let read: Vec<u8> = read.into_iter().flat_map(Result::unwrap).collect();
        assert!(read == content);
    }

    #[test]
    fn a_file_has_its_name_when_it_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("file");
        let link = dir.path().join("link");
        fs::write(&target, "old").unwrap();
        fs::set_permissions(&target, fs::Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::symlink("file", &link).unwrap();

        let staging = Staging::beside(&target);
        fs::write(&staging.path, "half").unwrap();
        drop(staging);
        assert_eq!(fs::read_to_string(&target).unwrap(), "old");

        let staging = Staging::beside(&link);
        fs::write(&staging.path, "new").unwrap();
        staging.keep().unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "new");
        let mode = fs::metadata(&target).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(link.is_symlink());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_device_is_written_to() {
        let staging = Staging::beside(Path::new("/dev/null"));
        assert!(staging.is_target());
        staging.keep().unwrap();
    }
}
