//! All documents of one artifact, checked against one another.

use forkd_oci::digest::Digest;

use crate::config::Config;
use crate::error::HubError;
use crate::index::PageIndex;
use crate::limits;
use crate::manifest::{
    Artifact, CONFIG_TYPE, Descriptor, EMPTY, EMPTY_TYPE, HASHES_TYPE, MANIFEST_TYPE, Manifest,
    PACK_TYPE, PAGES_TYPE, ROLE, SIGNATURE_TYPE, SSHSIG_TYPE, bounded, checked, parse, to_bytes,
};
use crate::pack::{Base, Packed};
use crate::pages::PageHash;

/// Everything of an artifact but its packs.
#[derive(Debug, Clone)]
pub struct Documents {
    pub artifact: Artifact,
    pub config: Config,
    pub index: PageIndex,
    /// Hashes of the stored pages; needed to find pages that are known already.
    pub hashes: Option<Vec<PageHash>>,
    pub signatures: Vec<Signature>,
    config_bytes: Vec<u8>,
    index_bytes: Vec<u8>,
}

/// A signature and the manifest that binds it to the artifact.
#[derive(Debug, Clone)]
pub struct Signature {
    pub manifest: Vec<u8>,
    /// The signature in the form of `ssh-keygen -Y sign`.
    pub text: Vec<u8>,
}

impl Signature {
    /// Binds a signature to a manifest.
    pub fn of(subject: &Artifact, text: Vec<u8>) -> Self {
        let manifest = Manifest {
            schema_version: 2,
            media_type: MANIFEST_TYPE.into(),
            artifact_type: Some(SIGNATURE_TYPE.into()),
            config: Descriptor::of(EMPTY_TYPE, EMPTY),
            layers: vec![Descriptor::of(SSHSIG_TYPE, &text)],
            subject: Some(subject.descriptor()),
            annotations: Default::default(),
        };
        Self {
            manifest: to_bytes(&manifest),
            text,
        }
    }

    pub fn descriptor(&self) -> Descriptor {
        let mut descriptor = Descriptor::of(MANIFEST_TYPE, &self.manifest);
        descriptor.artifact_type = Some(SIGNATURE_TYPE.into());
        descriptor
    }

    /// The blob of the signature that a manifest names, if the manifest is a signature of `subject`.
    pub fn blob_of(manifest: &[u8], subject: Digest) -> Result<Option<Descriptor>, HubError> {
        let manifest: Manifest = parse(manifest, "the manifest of a signature")?;
        let ours = manifest.artifact_type.as_deref() == Some(SIGNATURE_TYPE)
            && manifest
                .subject
                .is_some_and(|found| found.digest == subject);
        let blob = manifest
            .layers
            .into_iter()
            .find(|layer| layer.media_type == SSHSIG_TYPE && layer.size <= limits::SIGNATURE);
        Ok(blob.filter(|_| ours))
    }
}

impl Documents {
    /// The documents of what was packed.
    pub fn new(config: Config, packed: &Packed) -> Result<Self, HubError> {
        let config_bytes = config.to_bytes();
        let index_bytes = packed.index.encode()?;
        let hashes = Descriptor::of(HASHES_TYPE, packed.hashes.as_flattened());
        let packs = packed
            .index
            .packs
            .iter()
            .map(|pack| {
                let mut descriptor = Descriptor::new(PACK_TYPE, pack.digest, pack.bytes);
                let role = pack.role.as_str().to_owned();
                descriptor.annotations.insert(ROLE.to_owned(), role);
                descriptor
            })
            .collect();
        let artifact = Artifact::new(
            &config.name,
            Descriptor::of(CONFIG_TYPE, &config_bytes),
            Descriptor::of(PAGES_TYPE, &index_bytes),
            Some(hashes),
            packs,
        );
        Ok(Self {
            artifact,
            config,
            index: packed.index.clone(),
            hashes: Some(packed.hashes.clone()),
            signatures: Vec::new(),
            config_bytes,
            index_bytes,
        })
    }

    /// Parses and compares the documents of an artifact. Page hashes may be missing.
    pub fn parse(
        artifact: Artifact,
        config_bytes: Vec<u8>,
        index_bytes: Vec<u8>,
    ) -> Result<Self, HubError> {
        checked("the configuration", &config_bytes, artifact.config.digest)?;
        checked("the page index", &index_bytes, artifact.index.digest)?;
        let config = Config::parse(&config_bytes)?;
        let index = PageIndex::decode(&index_bytes)?;
        config.check_blobs(&index.blobs)?;
        let packs = artifact.packs.iter().map(|pack| (pack.digest, pack.size));
        if !packs.eq(index.packs.iter().map(|pack| (pack.digest, pack.bytes))) {
            return Err(HubError::invalid(
                "the manifest and the page index name different packs",
            ));
        }
        Ok(Self {
            artifact,
            config,
            index,
            hashes: None,
            signatures: Vec::new(),
            config_bytes,
            index_bytes,
        })
    }

    /// Adds the page hashes. Their digest and their number must fit.
    pub fn set_hashes(&mut self, bytes: &[u8]) -> Result<(), HubError> {
        let Some(descriptor) = &self.artifact.hashes else {
            return Err(HubError::invalid("the manifest names no page hashes"));
        };
        checked("the list of page hashes", bytes, descriptor.digest)?;
        let (hashes, rest) = bytes.as_chunks::<32>();
        if hashes.len() as u64 != self.index.pages() || !rest.is_empty() {
            return Err(HubError::invalid(
                "the list of page hashes has another length than the page index",
            ));
        }
        self.hashes = Some(hashes.to_vec());
        Ok(())
    }

    /// Bytes of the page hashes, after the page index was read.
    pub fn hashes_limit(&self) -> u64 {
        self.index.pages() * 32
    }

    /// Adds a signature, up to the limit of how many are looked at.
    pub fn add_signature(&mut self, signature: Signature) -> Result<(), HubError> {
        bounded(
            "signatures",
            self.signatures.len() as u64 + 1,
            limits::SIGNATURES as u64,
        )?;
        self.signatures.push(signature);
        Ok(())
    }

    /// The documents as blobs, in the order of a stream.
    pub fn blobs(&self) -> Vec<(Digest, Vec<u8>)> {
        let mut all = vec![
            (self.artifact.digest, self.artifact.bytes.clone()),
            (self.artifact.config.digest, self.config_bytes.clone()),
            (self.artifact.index.digest, self.index_bytes.clone()),
        ];
        if let (Some(descriptor), Some(hashes)) = (&self.artifact.hashes, &self.hashes) {
            all.push((descriptor.digest, hashes.as_flattened().to_vec()));
        }
        if !self.signatures.is_empty() {
            all.push((Digest::of(EMPTY), EMPTY.to_vec()));
        }
        for signature in &self.signatures {
            all.push((signature.descriptor().digest, signature.manifest.clone()));
            all.push((Digest::of(&signature.text), signature.text.clone()));
        }
        all
    }

    /// The pages of this artifact as the base of the next one; nothing without page hashes.
    pub fn base(&self) -> Base {
        match &self.hashes {
            Some(hashes) => Base {
                packs: self.index.packs.clone(),
                hashes: hashes.clone(),
            },
            None => Base::default(),
        }
    }
}
