//! Snapshots that `forkd run` and `forkd quickstart` make for themselves.
//!
//! The tag says which image and which machine shape a snapshot was made from, so that different shapes never share one.

use std::time::{Duration, Instant};

use forkd_api::{CreateSnapshot, ErrorCode};
use forkd_rest_client::{Client, Error};
use forkd_types::MiB;

use crate::daemon::failed;
use crate::error::CliError;
use crate::ui::Ui;

/// The size of a parent; `None` is the default of the image.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Shape {
    /// Number of vCPUs.
    pub vcpus: Option<u8>,
    pub memory: Option<MiB>,
}

/// A snapshot whose tag the user did not choose.
#[derive(Debug, Clone)]
pub struct OwnSnapshot<'a> {
    tag: String,
    image: &'a str,
    shape: Shape,
}

/// How to repair a snapshot of our own that cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Remedy {
    Make,
    MakeAnew,
}

impl Remedy {
    /// `None` if the snapshot is not the cause of the error.
    fn for_code(code: Option<ErrorCode>) -> Option<Self> {
        match code? {
            ErrorCode::SnapshotNotFound => Some(Self::Make),
            // Frozen on another CPU or by another version, or damaged: in each case a new one replaces it.
            ErrorCode::SnapshotIncompatible | ErrorCode::SnapshotBroken => Some(Self::MakeAnew),
            _ => None,
        }
    }
}

impl<'a> OwnSnapshot<'a> {
    /// The snapshot that `forkd run` forks: `run-IMAGE`, or `run.SHAPE-IMAGE` for a shape other than the image's.
    ///
    /// A shape has no hyphen, and `run.` is not `run-`: no two pairs of image and shape get the same tag.
    pub fn for_run(image: &'a str, shape: Shape) -> Self {
        let mut tag = "run".to_owned();
        if let Some(vcpus) = shape.vcpus {
            tag.push_str(&format!(".c{vcpus}"));
        }
        if let Some(memory) = shape.memory {
            tag.push_str(&format!(".m{}", memory.0));
        }
        Self {
            tag: format!("{tag}-{image}"),
            image,
            shape,
        }
    }

    /// A snapshot of the default shape under the given tag.
    pub fn tagged(tag: &str, image: &'a str) -> Self {
        Self {
            tag: tag.to_owned(),
            image,
            shape: Shape::default(),
        }
    }

    /// The tag of the snapshot.
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// Starts children from the snapshot. A missing snapshot is made first, and one that this host cannot run is replaced.
    /// The duration is the time to make it, if it was made.
    pub async fn start<T>(
        &self,
        client: &Client,
        ui: &Ui,
        start: impl AsyncFn() -> Result<T, Error>,
    ) -> Result<(T, Option<Duration>), CliError> {
        let mut took = None;
        if let Err(error) = client.snapshot(&self.tag).await {
            took = Some(self.make(client, ui, error).await?);
        }
        let mut started = start().await;
        // A snapshot that was just made is not the cause of the error.
        if took.is_none()
            && let Err(error) = started
        {
            took = Some(self.make(client, ui, error).await?);
            started = start().await;
        }
        started.map(|started| (started, took)).map_err(failed)
    }

    /// Makes the snapshot if that can repair the error, else fails with the error.
    async fn make(&self, client: &Client, ui: &Ui, error: Error) -> Result<Duration, CliError> {
        let Self { tag, image, shape } = self;
        let began = Instant::now();
        match Remedy::for_code(error.code()) {
            None => return Err(failed(error)),
            Some(Remedy::Make) => ui.aside(format_args!(
                "no snapshot {tag} yet: booting a parent from {image}, warming it up, freezing it …"
            )),
            Some(Remedy::MakeAnew) => {
                ui.aside(format_args!(
                    "snapshot {tag} cannot be used here ({error}): replacing it by a new one from {image} …"
                ));
                // Forced: snapshots branched from the old one are the user's, and stay.
                match client.delete_snapshot(tag, false, true).await {
                    Err(error) if error.code() != Some(ErrorCode::SnapshotNotFound) => {
                        return Err(failed(error));
                    }
                    _ => {}
                }
            }
        }
        let request = CreateSnapshot {
            tag: tag.clone(),
            image: Some((*image).to_owned()),
            vcpus: shape.vcpus,
            mem_size_mib: shape.memory.map(|memory| memory.0),
            ..CreateSnapshot::default()
        };
        match client.create_snapshot(&request).await {
            // Another process made the same snapshot in the meantime.
            Err(error) if error.code() == Some(ErrorCode::AlreadyExists) => Ok(began.elapsed()),
            Err(error) => Err(failed(error)),
            Ok(_) => Ok(began.elapsed()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

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
        assert_eq!(Remedy::for_code(None), None, "the daemon did not answer");
    }

    #[test]
    fn every_image_and_shape_has_a_tag_of_its_own() {
        let images = ["x", "c2-x", "m512-x", ".c2-x", "2-x"];
        let vcpus = [None, Some(1), Some(2), Some(22)];
        let memory = [None, Some(MiB(512)), Some(MiB(2)), Some(MiB(2512))];
        let mut tags = BTreeSet::new();
        for image in images {
            for vcpus in vcpus {
                for memory in memory {
                    let shape = Shape { vcpus, memory };
                    let tag = OwnSnapshot::for_run(image, shape).tag().to_owned();
                    assert!(tags.insert(tag.clone()), "{tag} twice");
                }
            }
        }
        let of_image = OwnSnapshot::for_run("python-numpy", Shape::default());
        assert_eq!(of_image.tag(), "run-python-numpy");
        let shape = Shape {
            vcpus: Some(2),
            memory: Some(MiB(1024)),
        };
        let larger = OwnSnapshot::for_run("python-numpy", shape);
        assert_eq!(larger.tag(), "run.c2.m1024-python-numpy");
    }
}
