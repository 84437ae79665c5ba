//! A small machine as files, and its artifact.

#![allow(dead_code)]

pub mod registry;

use std::fs::File;
use std::io::Cursor;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use forkd_hub::archive::{StreamReader, StreamWriter};
use forkd_hub::config::{Blob, Config, Cpu, Disk, Memory, SCHEMA, Source, Versions};
use forkd_hub::documents::Documents;
use forkd_hub::known::Known;
use forkd_hub::manifest::Role;
use forkd_hub::pack::{Base, Input, NewPack, pack};
use forkd_hub::unpack::{self, NewBlob};
use forkd_hub::{HubError, limits::PAGE};
use forkd_types::Digest;

/// Pages with random content: a number per page, and the length of the file.
pub struct Content {
    pub pages: Vec<(u64, u64)>,
    pub bytes: u64,
}

impl Content {
    pub fn new(pages: impl IntoIterator<Item = (u64, u64)>, bytes: u64) -> Self {
        Self {
            pages: pages.into_iter().collect(),
            bytes,
        }
    }

    pub fn file(&self) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(self.bytes).unwrap();
        for (page, seed) in &self.pages {
            let offset = page * PAGE as u64;
            let room = (self.bytes - offset).min(PAGE as u64) as usize;
            file.write_all_at(&page_of(*seed)[..room], offset).unwrap();
        }
        file
    }
}

/// A page that does not compress, different for each seed.
pub fn page_of(seed: u64) -> Vec<u8> {
    let mut page = vec![0; PAGE];
    blake3::Hasher::new()
        .update(&seed.to_le_bytes())
        .finalize_xof()
        .fill(&mut page);
    page
}

/// The digest of a file; any function of the content serves in these tests.
pub fn digest(file: &File) -> Digest {
    let len = file.metadata().unwrap().len() as usize;
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, 0).unwrap();
    Digest(*blake3::hash(&bytes).as_bytes())
}

/// An artifact and its packs in a folder.
pub struct Made {
    pub documents: Documents,
    pub packs: Vec<NewPack>,
    pub pages: u64,
}

/// Packs a disk, memory and a state.
pub fn make(contents: [&Content; 3], base: &Base, folder: &Path) -> Made {
    let roles = [Role::Disk, Role::Memory, Role::Memory];
    let inputs: Vec<Input> = contents
        .into_iter()
        .zip(roles)
        .map(|(content, role)| {
            let file = content.file();
            Input {
                blob: Blob {
                    digest: digest(&file),
                    bytes: content.bytes,
                },
                file,
                role,
            }
        })
        .collect();
    let packed = pack(&inputs, base, folder, &AtomicBool::new(false)).unwrap();
    let config = Config {
        schema: SCHEMA,
        name: "py".into(),
        description: None,
        created_at_unix: 7,
        engine: "forkd".into(),
        state_format: Some(1),
        memory_mib: 1,
        vcpus: 1,
        cpu: Cpu::default(),
        blobs: inputs.iter().map(|input| input.blob).collect(),
        state: 2,
        memory: Memory {
            layers: vec![1],
            index: None,
        },
        disks: vec![Disk {
            base: 0,
            layers: Vec::new(),
            read_only: false,
            serial: "root".into(),
        }],
        source: Source::default(),
        booted: true,
        versions: Versions::default(),
        spare_disks: 0,
    };
    Made {
        documents: Documents::new(config, &packed).unwrap(),
        packs: packed.new,
        pages: packed.pages,
    }
}

/// The artifact as a stream, with those of its packs that are in the folder and wanted.
pub fn stream(made: &Made, wanted: impl Fn(usize) -> bool) -> Vec<u8> {
    let mut writer = StreamWriter::begin(Vec::new(), &made.documents, "py").unwrap();
    for (number, descriptor) in made.documents.artifact.packs.iter().enumerate() {
        let file = made
            .packs
            .iter()
            .find(|pack| pack.digest == descriptor.digest);
        if let Some(pack) = file.filter(|_| wanted(number)) {
            writer
                .pack(descriptor, File::open(&pack.path).unwrap())
                .unwrap();
        }
    }
    writer.finish().unwrap()
}

/// Unpacks everything and compares each blob with its digest, as the daemon does.
pub fn unpack_all(bytes: &[u8], local: &[&Content]) -> Result<Vec<NewBlob>, HubError> {
    let folder = tempfile::tempdir().unwrap();
    let (documents, mut reader, next) = StreamReader::open(Cursor::new(bytes))?;
    let all: Vec<usize> = (0..documents.config.blobs.len()).collect();
    let wanted = unpack::wanted_pages(&documents, &all);
    let files = local.iter().map(|content| content.file());
    let known = Known::find(files, &wanted).unwrap();
    let plan = unpack::plan(&documents, all, &known);
    let never = AtomicBool::new(false);
    let made = unpack::unpack(
        &documents,
        &plan,
        &known,
        &mut reader,
        next,
        folder.path(),
        &never,
    )?;
    for blob in &made {
        let expected = documents.config.blobs[blob.number];
        let file = File::open(&blob.path).unwrap();
        assert_eq!(file.metadata().unwrap().len(), expected.bytes);
        if digest(&file) != expected.digest {
            return Err(HubError::Digest {
                what: "a blob".into(),
                expected: expected.digest.to_string(),
                found: String::new(),
            });
        }
    }
    Ok(made)
}

/// A machine with 300 pages on disk, 200 in memory (half of them from the disk), and a short state.
pub fn machine(seed: u64) -> [Content; 3] {
    let disk = Content::new((0..300).map(|n| (n * 2, n)), 1 << 22);
    let memory = Content::new(
        (0..200).map(|n| (n + 5, if n % 2 == 0 { n } else { 10_000 * seed + n })),
        1 << 20,
    );
    let state = Content::new([(0, 500_000 + seed), (1, 600_000)], 5000);
    [disk, memory, state]
}
