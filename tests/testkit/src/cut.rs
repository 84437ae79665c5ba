//! Cuts of a test VM: freeze, branch, and merging of layers.
//!
//! This file does for tests what the daemon does in the product: it creates the files, sends `Cut`, and keeps
//! track of disks and base images.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::bail;
use forkd_vmm_proto::{Command, CutExtent, CutSpec, Event, FdIndex, ImageId, Reply};

use crate::disk::new_layer;
use crate::{Disk, Fds, Frozen, Vm};

/// The image that the next incremental cut is based on.
#[derive(Debug)]
pub(crate) struct Base {
    pub frozen: Frozen,
    /// Its number in the VMM.
    pub image: ImageId,
}

/// The files of a cut.
#[derive(Debug, Clone)]
pub struct CutFiles {
    /// vCPU and device state.
    pub state: PathBuf,
    pub memory: PathBuf,
    /// The page index, for an incremental cut.
    pub index: PathBuf,
    /// Write only the changes since the last cut, or since the restore.
    pub only_changed: bool,
}

impl CutFiles {
    /// New file names in a folder.
    pub fn in_folder(folder: &Path, only_changed: bool) -> Self {
        let number: u64 = rand::random();
        let name = |ending| folder.join(format!("cut-{number:x}.{ending}"));
        Self {
            state: name("state"),
            memory: name("memory"),
            index: name("index"),
            only_changed,
        }
    }
}

impl Vm {
    /// Cuts the VM and ends it. Children start from the result.
    pub async fn freeze(self) -> anyhow::Result<Frozen> {
        let files = CutFiles::in_folder(self.folder(), false);
        let frozen = self.cut(false, files).await?;
        self.stop().await?;
        Ok(frozen)
    }

    /// Cuts the VM while it goes on.
    pub async fn branch(&self) -> anyhow::Result<Frozen> {
        self.branch_to(CutFiles::in_folder(self.folder(), false))
            .await
    }

    /// Cuts the VM while it goes on, to the given files.
    pub async fn branch_to(&self, files: CutFiles) -> anyhow::Result<Frozen> {
        self.cut(true, files).await
    }

    /// Tries a cut whose memory goes to a device that is always full.
    pub async fn branch_to_full_disk(&self) -> anyhow::Result<Frozen> {
        let mut files = CutFiles::in_folder(self.folder(), false);
        files.memory = PathBuf::from("/dev/full");
        self.branch_to(files).await
    }

    /// Merges all layers below the top of each disk, as the daemon does when there are many.
    pub async fn merge_layers(&self) -> anyhow::Result<Vec<PathBuf>> {
        let mut replaced = Vec::new();
        let mut disks = self.disks_now().await;
        let writable = disks.iter_mut().filter(|disk| !disk.read_only);
        for (place, disk) in (0..).zip(writable) {
            let Some((top, below)) = disk.layers.split_last() else {
                continue;
            };
            let files = below
                .iter()
                .map(File::open)
                .collect::<Result<Vec<_>, _>>()?;
            let number: u64 = rand::random();
            let path = self
                .folder()
                .join(format!("{}-merged-{number:x}.layer", disk.serial));
            let merged = new_file(&path)?;
            forkd_store::merge_layers(&files, &merged)?;
            let mut fds = Fds::default();
            let layer = fds.add(merged);
            let command = Command::MergedLayer { disk: place, layer };
            self.vmm.run(command, &fds.borrow()).await?;
            replaced.extend(below.iter().cloned());
            disk.layers = vec![path, top.clone()];
        }
        Ok(replaced)
    }

    async fn cut(&self, go_on: bool, files: CutFiles) -> anyhow::Result<Frozen> {
        let mut fds = Fds::default();
        let mut disks = self.disks_now().await;
        let mut base = self.base().await;
        let onto = base.as_ref().filter(|_| files.only_changed);
        let (next, new_layers) = self.next_disks(&disks, go_on, &mut fds)?;
        let spec = CutSpec {
            state: fds.add(new_file(&files.state)?),
            memory: fds.add(new_file(&files.memory)?),
            extent: match onto {
                Some(base) => CutExtent::Since {
                    image: base.image,
                    index: fds.add(new_file(&files.index)?),
                },
                None => CutExtent::All,
            },
            new_layers,
            resume: go_on,
        };
        let answer = self.vmm.call(Command::Cut(spec), &fds.borrow()).await;
        let mut frozen = Frozen {
            shape: self.process.shape,
            state: files.state,
            below: onto.map_or(Vec::new(), |base| base.frozen.layers()),
            memory: files.memory,
            index: onto.map(|_| files.index),
            disks: disks.clone(),
            report: Default::default(),
        };
        // From this event on the VM writes to the new layers, even if the cut fails later.
        if self.cut_was_taken().await || answer.is_ok() {
            *disks = next;
        }
        frozen.report = match answer? {
            Reply::Cut(report) => report,
            reply => bail!("the VMM answered {reply:?} to a cut"),
        };
        *base = Some(Base {
            image: frozen.report.image,
            frozen: frozen.clone(),
        });
        Ok(frozen)
    }

    /// The disks after the cut, and their new layers.
    fn next_disks(
        &self,
        disks: &[Disk],
        go_on: bool,
        fds: &mut Fds,
    ) -> anyhow::Result<(Vec<Disk>, Vec<FdIndex>)> {
        let number: u64 = rand::random();
        let mut new_layers = Vec::new();
        let mut next = disks.to_vec();
        for disk in next.iter_mut().filter(|disk| go_on && !disk.read_only) {
            let path = self
                .folder()
                .join(format!("{}-{number:x}.layer", disk.serial));
            new_layers.push(fds.add(new_layer(&disk.base, &path, disk.limit)?));
            disk.layers.push(path);
        }
        Ok((next, new_layers))
    }

    /// Whether the `CutTaken` event has arrived.
    async fn cut_was_taken(&self) -> bool {
        let moment = Duration::from_millis(1);
        self.wait_event(moment, |event| matches!(event, Event::CutTaken { .. }))
            .await
            .is_ok()
    }
}

pub(crate) fn new_file(path: &Path) -> anyhow::Result<File> {
    Ok(File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)?)
}
