//! Snapshots that are made without being asked for, by `forkd run` and `forkd quickstart`.

use std::time::{Duration, Instant};

use forkd_api::{CreateSnapshot, ErrorCode};
use forkd_rest_client::{Client, Error};

use crate::daemon::failed;
use crate::error::CliError;
use crate::ui::Ui;

/// A snapshot whose tag the user did not choose.
#[derive(Debug, Clone, Copy)]
pub struct OwnSnapshot<'a> {
    /// Its tag.
    pub tag: &'a str,
    /// The image it is made of.
    pub image: &'a str,
}

/// What helps when a snapshot of our own cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Remedy {
    Make,
    MakeAnew,
}

impl Remedy {
    /// None if it is not the snapshot that is at fault.
    fn for_code(code: Option<ErrorCode>) -> Option<Self> {
        match code? {
            ErrorCode::SnapshotNotFound => Some(Self::Make),
            // Frozen on another CPU or by another version, or damaged: whatever it was, it can be made again.
            ErrorCode::SnapshotIncompatible | ErrorCode::SnapshotBroken => Some(Self::MakeAnew),
            _ => None,
        }
    }
}

impl OwnSnapshot<'_> {
    /// Starts something from it. It is made first if it is not there, and anew if this host cannot run the one that
    /// is. The time says how long making it took, if it was made.
    pub async fn start<T>(
        self,
        client: &Client,
        ui: &Ui,
        start: impl AsyncFn() -> Result<T, Error>,
    ) -> Result<(T, Option<Duration>), CliError> {
        let mut took = None;
        if let Err(error) = client.snapshot(self.tag).await {
            took = Some(self.make(client, ui, error).await?);
        }
        let mut started = start().await;
        // One that was just made is not the thing at fault.
        if took.is_none()
            && let Err(error) = started
        {
            took = Some(self.make(client, ui, error).await?);
            started = start().await;
        }
        started.map(|started| (started, took)).map_err(failed)
    }

    /// Makes it if that is a remedy for what went wrong, else fails with that.
    async fn make(self, client: &Client, ui: &Ui, wrong: Error) -> Result<Duration, CliError> {
        let Self { tag, image } = self;
        let began = Instant::now();
        match Remedy::for_code(wrong.code()) {
            None => return Err(failed(wrong)),
            Some(Remedy::Make) => ui.aside(format_args!(
                "first use of {image}: booting a parent, warming it up, freezing it as {tag} …"
            )),
            Some(Remedy::MakeAnew) => {
                ui.aside(format_args!(
                    "snapshot {tag} cannot be used here ({wrong}): making it anew from {image} …"
                ));
                // What was branched from it is the user's, and stays.
                match client.delete_snapshot(tag, false, true).await {
                    Err(error) if error.code() != Some(ErrorCode::SnapshotNotFound) => {
                        return Err(failed(error));
                    }
                    _ => {}
                }
            }
        }
        let request = CreateSnapshot {
            tag: tag.to_owned(),
            image: Some(image.to_owned()),
            ..CreateSnapshot::default()
        };
        match client.create_snapshot(&request).await {
            // Or somebody else made it meanwhile.
            Err(error) if error.code() != Some(ErrorCode::AlreadyExists) => Err(failed(error)),
            _ => Ok(began.elapsed()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_snapshot_at_fault_is_made() {
        for code in ErrorCode::ALL {
            let remedy = match code {
                ErrorCode::SnapshotNotFound => Some(Remedy::Make),
                ErrorCode::SnapshotIncompatible | ErrorCode::SnapshotBroken => {
                    Some(Remedy::MakeAnew)
                }
                _ => None,
            };
            assert_eq!(Remedy::for_code(Some(*code)), remedy, "{code:?}");
        }
        assert_eq!(Remedy::for_code(None), None, "no daemon answered");
    }
}
