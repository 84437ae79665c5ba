use super::*;

const OLD: BlobRef = BlobRef {
    digest: Digest([1; 32]),
    bytes: 1,
};
const NEW: BlobRef = BlobRef {
    digest: Digest([2; 32]),
    bytes: 2,
};

/// A record that names `OLD` in every place that can name content but the base of a disk, which is an image.
fn full() -> SandboxRecord {
    let memory = MemoryManifest {
        layers: vec![OLD, OLD],
        index: Some(OLD),
    };
    let own = LayerRef::Own("layer".to_owned());
    let layers = vec![LayerRef::Blob(OLD), own.clone(), LayerRef::Blob(OLD)];
    let disk = DiskStack {
        base: NEW,
        layers: layers.clone(),
        read_only: false,
        serial: String::new(),
    };
    let checkpoint = CheckpointRecord {
        name: "c".to_owned(),
        id: 1,
        created_at_unix: 0,
        pause_us: 0,
        bytes: 0,
        disks: vec![layers, vec![LayerRef::Blob(OLD)]],
        volumes: Vec::new(),
    };
    SandboxRecord {
        memory: memory.clone(),
        built: Some(BuiltRecord {
            image: ImageId(7),
            memory,
        }),
        disks: vec![disk.clone(), disk],
        checkpoints: vec![checkpoint.clone(), checkpoint],
        ..SandboxRecord::unreadable("sb-1".parse().unwrap())
    }
}

/// How often the stored form names content.
fn names(record: &SandboxRecord, blob: BlobRef) -> usize {
    let stored = serde_json::to_string(record).unwrap();
    stored.matches(&blob.digest.to_string()).count()
}

#[test]
fn every_use_of_content_is_found_and_replaced() {
    let mut record = full();
    let uses = names(&record, OLD);
    let listed = record.blobs();
    let found = listed.iter().filter(|name| **name == OLD.digest).count();
    assert_eq!(found, uses, "blobs() lists every use");
    assert_eq!(uses, 16);
    record.replace_content(&OLD.digest, NEW);
    assert_eq!(names(&record, OLD), 0);
    assert_eq!(names(&record, NEW), uses + record.disks.len());
    assert!(!record.blobs().contains(&OLD.digest));
}

#[test]
fn a_file_that_became_content_is_replaced_everywhere() {
    let mut record = full();
    record.layer_is_content("layer", NEW);
    assert_eq!(record.layers().count(), 14);
    assert!(
        record
            .layers()
            .all(|layer| matches!(layer, LayerRef::Blob(_)))
    );
}
