//! Directories as tar streams, packed and unpacked by `tar` in the guest.

use forkd_agent_client::{Client, Exec, Output};
use forkd_api::ErrorCode;
use forkd_guest_proto as guest;
use forkd_sandboxes::agent_limits;
use forkd_sandboxes::error::Error;

/// The most of tar's complaints that a message repeats.
const MAX_COMPLAINT: usize = 1000;

async fn tar(client: &Client, args: &[&str], path: &str, stdin: bool) -> Result<Exec, Error> {
    let mut argv = vec!["tar".to_owned(), "-C".to_owned(), path.to_owned()];
    argv.extend(args.iter().map(|arg| (*arg).to_owned()));
    let wish = guest::ExecRequest {
        argv,
        stdin,
        on_disconnect: guest::OnDisconnect::Kill,
        ..guest::ExecRequest::default()
    };
    client
        .by(agent_limits::start())
        .exec(wish)
        .await
        .map_err(Error::agent("tar could not be started in the guest"))
}

/// A directory that is being packed.
pub struct Packing {
    exec: Option<Exec>,
    complaint: Vec<u8>,
}

/// Packs the content of a directory. The path is checked before the first byte.
pub async fn pack(client: &Client, path: &str) -> Result<Packing, Error> {
    let info = super::files::stat(client, path, false).await?;
    if info.kind != guest::FileKind::Directory {
        return Err(Error::refused(
            ErrorCode::InvalidRequest,
            format!("{path} is not a directory"),
        ));
    }
    Ok(Packing {
        exec: Some(tar(client, &["-cf", "-", "."], path, false).await?),
        complaint: Vec::new(),
    })
}

impl Packing {
    /// The next bytes; `None` after the last. A failure of tar is an error, never a short archive.
    pub async fn next(&mut self) -> Result<Option<Vec<u8>>, Error> {
        let lost = || Error::agent("tar was lost");
        loop {
            let Some(exec) = &mut self.exec else {
                return Ok(None);
            };
            match exec.next_output().await.map_err(lost())? {
                Some(Output::Stdout(bytes)) => return Ok(Some(bytes)),
                Some(Output::Stderr(bytes)) => keep(&mut self.complaint, &bytes),
                Some(Output::Lost { .. }) => {}
                None => {
                    if let Some(exec) = self.exec.take() {
                        let result = exec.wait().await.map_err(lost())?;
                        finished(result, &self.complaint)?;
                    }
                    return Ok(None);
                }
            }
        }
    }
}

/// An archive that is being unpacked.
pub struct Unpacking {
    exec: Exec,
    complaint: Vec<u8>,
}

/// Unpacks an archive into a directory, which is made if it is missing.
pub async fn unpack(client: &Client, path: &str) -> Result<Unpacking, Error> {
    client
        .by(agent_limits::answer())
        .mkdir(guest::MkdirRequest {
            path: path.to_owned(),
            parents: true,
            ..guest::MkdirRequest::default()
        })
        .await
        .map_err(Error::agent(format!("{path} cannot be made")))?;
    Ok(Unpacking {
        exec: tar(client, &["-xf", "-"], path, true).await?,
        complaint: Vec::new(),
    })
}

impl Unpacking {
    /// Hands bytes over, and takes what tar prints meanwhile so that tar does not stand still.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let stdin = self.exec.stdin();
        let write = stdin.write(bytes);
        tokio::pin!(write);
        loop {
            tokio::select! {
                done = &mut write => return done.map_err(Error::agent("tar did not take the archive")),
                output = self.exec.next_output() => {
                    match output.map_err(Error::agent("tar was lost"))? {
                        Some(Output::Stderr(bytes)) => keep(&mut self.complaint, &bytes),
                        Some(_) => {}
                        // It has ended early: the reason comes with its status.
                        None => return Ok(()),
                    }
                }
            }
        }
    }

    /// Ends the archive and waits until it is unpacked.
    pub async fn finish(mut self) -> Result<(), Error> {
        let lost = || Error::agent("tar was lost");
        self.exec.stdin().close();
        while let Some(output) = self.exec.next_output().await.map_err(lost())? {
            if let Output::Stderr(bytes) = output {
                keep(&mut self.complaint, &bytes);
            }
        }
        let result = self.exec.wait().await.map_err(lost())?;
        finished(result, &self.complaint)
    }
}

fn keep(kept: &mut Vec<u8>, bytes: &[u8]) {
    let room = MAX_COMPLAINT.saturating_sub(kept.len());
    kept.extend(bytes.iter().take(room));
}

fn finished(result: guest::ExecResult, complaint: &[u8]) -> Result<(), Error> {
    if result.status.success() {
        return Ok(());
    }
    let complaint = String::from_utf8_lossy(complaint);
    Err(Error::refused(
        ErrorCode::InvalidRequest,
        format!(
            "tar ended with status {}: {}",
            result.status.shell_code(),
            complaint.trim()
        ),
    ))
}
