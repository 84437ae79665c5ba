//! How much disk a sandbox may still take on the host.
//!
//! The limit is one number per sandbox. It covers every layer that the sandbox wrote itself, frozen or not, and the
//! memory of its checkpoints. Layers of the snapshot it was started from are shared and do not count. Each new layer is
//! given what is left, so that cuts, checkpoints and roll-backs do not start the limit anew.
//!
//! The guest goes on writing while a cut is prepared. The bytes of that moment are found by the next measurement, so a
//! sandbox can exceed its limit by at most what was left before one cut.

use std::collections::{BTreeMap, HashSet};

use forkd_formats::layer::BLOCK;
use forkd_store::{BlobRef, Manifest, Sizes};

use crate::app::App;
use crate::state::{LayerRef, SandboxRecord};

/// Bytes that a sandbox takes on the host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskUse {
    /// All disk layers, those of its snapshot included.
    pub layers: u64,
    /// The layers of the snapshot it was started from.
    pub inherited: u64,
    /// Memory of its checkpoints.
    pub checkpoints: u64,
}

impl DiskUse {
    /// Bytes that count against the limit of the sandbox.
    pub fn own(&self) -> u64 {
        // A merge of inherited and own layers can be smaller than the inherited ones were.
        self.layers.saturating_sub(self.inherited) + self.checkpoints
    }
}

/// The limit of one new layer in bytes, for a sandbox with that many writable disks. 0 is no limit, as in a layer's
/// header.
///
/// A sandbox that has used up its limit gets the smallest layer there is: it can be cut, rolled back and suspended, and
/// its guest sees a full disk.
pub fn layer_limit(limit: u64, used: &DiskUse, writable_disks: u64) -> u64 {
    if limit == 0 {
        return 0;
    }
    let left = limit.saturating_sub(used.own());
    (left / writable_disks.max(1)).max(BLOCK)
}

/// A checkpoint adds memory, so a sandbox that has used up its limit makes no more of them.
pub fn allows_checkpoint(limit: u64, used: &DiskUse) -> bool {
    limit == 0 || used.own() < limit
}

/// Bytes on disk of the layers of a snapshot, each layer once.
pub fn inherited(app: &App, manifest: &Manifest) -> u64 {
    let layers = manifest.disks.iter().flat_map(|disk| &disk.layers);
    let layers: HashSet<BlobRef> = layers.copied().collect();
    layers.iter().map(|layer| app.store.physical(layer)).sum()
}

/// Measures what a sandbox takes. A layer that is used twice, by its disk and by a checkpoint, counts once. Files that
/// cannot be read count nothing: the cut that follows fails by itself.
pub fn measure(app: &App, record: &SandboxRecord) -> DiskUse {
    let dir = app.dirs.vm(&record.id);
    let layers: HashSet<&LayerRef> = record.layers().collect();
    let layers = layers.into_iter().map(|layer| match layer {
        LayerRef::Blob(blob) => app.store.physical(blob),
        LayerRef::Own(name) => {
            let meta = std::fs::metadata(dir.join(name));
            meta.map_or(0, |meta| Sizes::from(meta).physical)
        }
    });
    // Several names of one checkpoint share its memory.
    let checkpoints: BTreeMap<u64, u64> = record
        .checkpoints
        .iter()
        .map(|checkpoint| (checkpoint.id, checkpoint.bytes))
        .collect();
    DiskUse {
        layers: layers.sum(),
        inherited: record.inherited_disk_bytes,
        checkpoints: checkpoints.values().sum(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use forkd_formats::layer::{HEADER_LEN, LayerHeader};
    use forkd_types::Digest;

    use super::super::layers::new_layers;
    use super::*;
    use crate::config::Config;
    use crate::state::CheckpointRecord;

    const MIB: u64 = 1 << 20;

    fn used(own: u64, checkpoints: u64) -> DiskUse {
        DiskUse {
            layers: 500 * MIB + own,
            inherited: 500 * MIB,
            checkpoints,
        }
    }

    #[test]
    fn frozen_layers_and_checkpoints_count_and_the_snapshot_does_not() {
        assert_eq!(layer_limit(100 * MIB, &used(0, 0), 1), 100 * MIB);
        assert_eq!(layer_limit(100 * MIB, &used(30 * MIB, 0), 1), 70 * MIB);
        assert_eq!(
            layer_limit(100 * MIB, &used(30 * MIB, 50 * MIB), 1),
            20 * MIB
        );
        assert_eq!(layer_limit(100 * MIB, &used(40 * MIB, 0), 2), 30 * MIB);
    }

    /// However often a sandbox is cut, its layers together stay within the limit.
    #[test]
    fn many_cuts_do_not_multiply_the_limit() {
        let limit = 64 * MIB;
        let mut frozen = 0;
        for _ in 0..1000 {
            // The guest fills each layer.
            frozen += layer_limit(limit, &used(frozen, 0), 1);
        }
        assert!(frozen <= limit + 1000 * BLOCK, "{frozen}");
    }

    #[test]
    fn a_spent_limit_leaves_a_full_disk_and_never_an_unlimited_one() {
        let spent = used(200 * MIB, 0);
        assert_eq!(layer_limit(100 * MIB, &spent, 1), BLOCK);
        assert!(!allows_checkpoint(100 * MIB, &spent));
        assert!(allows_checkpoint(300 * MIB, &spent));
    }

    #[test]
    fn no_limit_stays_no_limit() {
        let much = used(u64::MAX / 2, 0);
        assert_eq!(layer_limit(0, &much, 3), 0);
        assert!(allows_checkpoint(0, &much));
    }

    #[test]
    fn merged_layers_never_count_below_zero() {
        let merged = DiskUse {
            layers: 400,
            inherited: 500,
            checkpoints: 7,
        };
        assert_eq!(merged.own(), 7);
    }

    /// The layer that a cut makes carries what is left, measured from the files of the sandbox.
    #[tokio::test]
    async fn a_new_layer_is_given_what_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config {
            disk_limit_bytes: 8 * MIB,
            ..Config::below(dir.path())
        };
        let (app, _endings) = App::open(config).unwrap();
        let digest = Digest([0; 32]);
        let base = serde_json::json!({"digest": digest, "bytes": 64 * MIB});
        let mut record: SandboxRecord = serde_json::from_value(serde_json::json!({
            "id": "sb-1", "state": "running", "tag": "base", "manifest": digest,
            "pid": 1, "owner": "me", "created_at_unix": 1, "memory_mib": 1, "vcpus": 1, "cpu": "host",
            "memory": {"layers": [base]}, "source": forkd_store::Source::default(),
            "disks": [{"base": base, "layers": [{"own": "top.layer"}], "read_only": false, "serial": "root"}],
        }))
        .unwrap();
        let vm = app.dirs.vm(&record.id);
        std::fs::create_dir(&vm).unwrap();
        std::fs::write(vm.join("top.layer"), vec![1; 3 * MIB as usize]).unwrap();
        let given = |record: &SandboxRecord| {
            let layers = new_layers(&app, record).unwrap();
            let mut header = [0; HEADER_LEN];
            layers[0].file.read_exact_at(&mut header, 0).unwrap();
            LayerHeader::decode(&header).unwrap().max_bytes
        };
        assert_eq!(given(&record), 5 * MIB);
        record.checkpoints.push(CheckpointRecord {
            name: "a".into(),
            id: 1,
            created_at_unix: 1,
            pause_us: 1,
            bytes: 2 * MIB,
            disks: Vec::new(),
            volumes: Vec::new(),
        });
        assert_eq!(given(&record), 3 * MIB);
        std::fs::write(vm.join("top.layer"), vec![1; 9 * MIB as usize]).unwrap();
        assert_eq!(given(&record), BLOCK);
    }
}
