//! Checkpoints and roll-backs of a test VM.
//!
//! A [`Point`] keeps the disk stacks of a checkpoint: a roll-back puts new layers on top of them.

use anyhow::bail;
use forkd_vmm_proto::{
    CheckpointReport, CheckpointSpec, Command, FdIndex, Reply, RollbackReport, RollbackSpec,
};

use crate::cut::new_file;
use crate::disk::new_layer;
use crate::{Disk, Fds, Vm};

/// A checkpoint of a VM.
#[derive(Debug, Clone)]
pub struct Point {
    pub report: CheckpointReport,
    /// The disks with the layers of the checkpoint.
    disks: Vec<Disk>,
}

impl Vm {
    /// Makes a checkpoint.
    pub async fn checkpoint(&self) -> anyhow::Result<Point> {
        let mut now = self.disks_now().await.clone();
        let mut fds = Fds::default();
        let (next, new_layers) = self.with_new_layers(&now, &mut fds)?;
        let memory = self
            .folder()
            .join(format!("point-{:x}.memory", rand::random::<u64>()));
        let spec = CheckpointSpec {
            memory: fds.add(new_file(&memory)?),
            new_layers,
        };
        let reply = self
            .vmm
            .call(Command::Checkpoint(spec), &fds.borrow())
            .await?;
        let Reply::Checkpoint(report) = reply else {
            bail!("the VMM answered {reply:?} to a checkpoint");
        };
        let mut below = now.clone();
        let writable = now.iter().enumerate().filter(|(_, disk)| !disk.read_only);
        let places: Vec<usize> = writable.map(|(at, _)| at).collect();
        for (at, taken) in places.into_iter().zip(&report.layers_taken) {
            if *taken {
                now[at] = next[at].clone();
            } else {
                below[at].layers.pop();
            }
        }
        *self.disks_now().await = now.clone();
        Ok(Point {
            report,
            disks: below,
        })
    }

    /// Rolls back to a checkpoint.
    pub async fn rollback(&self, point: &Point) -> anyhow::Result<RollbackReport> {
        let mut fds = Fds::default();
        let (next, new_layers) = self.with_new_layers(&point.disks, &mut fds)?;
        let spec = RollbackSpec {
            to: point.report.id,
            new_layers,
            generation: rand::random(),
        };
        let reply = self
            .vmm
            .call(Command::Rollback(spec), &fds.borrow())
            .await?;
        let Reply::Rollback(report) = reply else {
            bail!("the VMM answered {reply:?} to a roll-back");
        };
        *self.disks_now().await = next;
        Ok(report)
    }

    /// The disks with a new layer on each writable one.
    fn with_new_layers(
        &self,
        disks: &[Disk],
        fds: &mut Fds,
    ) -> anyhow::Result<(Vec<Disk>, Vec<FdIndex>)> {
        let number: u64 = rand::random();
        let mut next = disks.to_vec();
        let mut layers = Vec::new();
        for disk in next.iter_mut().filter(|disk| !disk.read_only) {
            let path = self
                .folder()
                .join(format!("{}-{number:x}.layer", disk.serial));
            layers.push(fds.add(new_layer(&disk.base, &path, disk.limit)?));
            disk.layers.push(path);
        }
        Ok((next, layers))
    }
}
