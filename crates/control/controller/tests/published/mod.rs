//! Snapshots without VMs.

use std::collections::BTreeMap;

use forkd_sandboxes::app::App;
use forkd_store::{Cpu, Manifest, MemoryManifest, Origin, SCHEMA, Source, Versions};
use forkd_types::Engine;

/// Stores a snapshot of a machine without disks, cut from a sandbox.
pub fn publish(app: &App, tag: &str, sandbox: &str) -> Manifest {
    let staging = app.store.stage().unwrap();
    let ingest = |name: &str, bytes: u64| {
        std::fs::File::create(staging.file(name))
            .unwrap()
            .set_len(bytes)
            .unwrap();
        app.store.ingest(&staging.file(name)).unwrap()
    };
    let (state, memory) = (ingest("state", 4096), ingest("memory", 1 << 20));
    let manifest = Manifest {
        schema: SCHEMA,
        tag: tag.parse().unwrap(),
        created_at_unix: 1,
        memory_mib: 1,
        vcpus: 1,
        cpu: Cpu::Host,
        state: state.blob,
        memory: MemoryManifest {
            layers: vec![memory.blob],
            index: None,
        },
        disks: Vec::new(),
        engine: Engine::FORKD,
        source: Source::default(),
        parent: None,
        origin: Origin::Branch {
            sandbox: sandbox.to_owned(),
            pause_us: 1,
            total_us: 1,
            pages: 1,
        },
        versions: Versions::default(),
        labels: BTreeMap::new(),
        spare_disks: 0,
        volumes: Vec::new(),
    };
    app.store.publish(manifest.clone()).unwrap();
    manifest
}
