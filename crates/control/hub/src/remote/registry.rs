//! A repository of a registry as a place for artifacts. The tag of the repository is the name of the artifact.
//!
//! Signatures are manifests that refer to the artifact. Where the registry has no list of referrers, the list is kept
//! under the tag `sha256-DIGEST`, as OCI defines it.

use std::io::Read;

use forkd_oci::digest::Digest;
use forkd_oci::registry::{Pull, Repository};
use serde::Deserialize;

use super::{Cache, wanted};
use crate::documents::{Documents, Signature};
use crate::error::HubError;
use crate::layout::{Content, Place, Shelf, signatures_in};
use crate::limits;
use crate::manifest::{
    Artifact, Descriptor, INDEX_TYPE, Index, MANIFEST_TYPE, REF_NAME, bounded, parse, to_bytes,
};

/// Names that an error lists.
const LISTED: usize = 20;

/// A repository that holds artifacts under its tags.
#[derive(Debug)]
pub struct Registry {
    repository: Repository,
    cache: Cache,
}

impl Registry {
    /// Nothing is asked yet. The platform of the request has no meaning here.
    pub fn open(access: &Pull<'_>, cache: Cache) -> Result<Self, HubError> {
        let repository = Repository::open(access, cache.notes.clone())?;
        Ok(Self { repository, cache })
    }

    fn no_name(&self, name: &str) -> HubError {
        #[derive(Deserialize)]
        struct Tags {
            tags: Option<Vec<String>>,
        }
        let listed = self.repository.tags().ok().flatten();
        let listed = listed.and_then(|bytes| serde_json::from_slice::<Tags>(&bytes).ok());
        let mut there = listed.and_then(|tags| tags.tags).unwrap_or_default();
        there.retain(|tag| super::is_plain(tag));
        there.truncate(LISTED);
        HubError::NoName {
            name: name.to_owned(),
            place: self.describe(),
            there: match there.is_empty() {
                true => "nothing".into(),
                false => there.join(", "),
            },
        }
    }

    /// The list of referrers under its tag.
    fn listed(&self, subject: Digest) -> Result<Index, HubError> {
        let bytes = self.repository.manifest(&referrers_tag(subject))?;
        bytes.map_or_else(
            || Ok(Index::default()),
            |bytes| parse(&bytes, "the list of signatures"),
        )
    }
}

fn referrers_tag(subject: Digest) -> String {
    format!("sha256-{}", subject.hex())
}

impl Place for Registry {
    fn describe(&self) -> String {
        self.repository.describe()
    }

    fn index(&self, name: Option<&str>) -> Result<Index, HubError> {
        let name = name.unwrap_or(forkd_oci::name::LATEST);
        let manifest = self.repository.manifest(name)?;
        let manifest = manifest.ok_or_else(|| self.no_name(name))?;
        if serde_json::from_slice::<Index>(&manifest).is_ok() {
            return Err(HubError::ContainerImage {
                place: format!("{}:{name}", self.describe()),
            });
        }
        let mut entry = Descriptor::of(MANIFEST_TYPE, &manifest);
        entry.annotations.insert(REF_NAME.into(), name.to_owned());
        Ok(Index {
            manifests: vec![entry],
            ..Index::default()
        })
    }

    fn referrers(&self, artifact: &Artifact) -> Result<Vec<Descriptor>, HubError> {
        let index = match self.repository.referrers(artifact.digest)? {
            Some(bytes) => parse(&bytes, "the list of signatures")?,
            None => self.listed(artifact.digest)?,
        };
        Ok(signatures_in(&index))
    }

    fn small(&self, blob: &Descriptor, limit: u64) -> Result<Vec<u8>, HubError> {
        if blob.media_type != MANIFEST_TYPE {
            return Ok(self.repository.small(blob.digest, limit)?);
        }
        let digest = blob.digest.to_string();
        let bytes = self.repository.manifest(&digest)?;
        let bytes = bytes.ok_or_else(|| self.no_name(&digest))?;
        bounded("bytes in a document", bytes.len() as u64, limit)?;
        Ok(bytes)
    }

    fn pack(&self, pack: &Descriptor) -> Result<Box<dyn Read + Send>, HubError> {
        self.cache.fetch(pack, |wanted, blobs, watch| {
            self.repository.blob(wanted, blobs, watch)
        })
    }

    fn arrived(&self, packs: &[Descriptor]) {
        self.cache.forget(packs);
    }
}

impl Shelf for Registry {
    fn has(&self, blob: &Descriptor) -> Result<bool, HubError> {
        Ok(self.repository.has(blob.digest, blob.size)?)
    }

    fn put(&self, blob: &Descriptor, content: Content<'_>) -> Result<u64, HubError> {
        let content = || self.cache.stoppable(content);
        Ok(self.repository.put_blob(&wanted(blob), &content)?)
    }

    fn publish(&self, name: &str, documents: &Documents) -> Result<(), HubError> {
        let subject = documents.artifact.digest;
        // Signatures first: the name never leads to an artifact whose signature is still on its way.
        for signature in &documents.signatures {
            let digest = signature.descriptor().digest.to_string();
            self.repository
                .put_manifest(&digest, MANIFEST_TYPE, &signature.manifest)?;
        }
        if !documents.signatures.is_empty() && self.repository.referrers(subject)?.is_none() {
            let mut index = self.listed(subject)?;
            let new = documents.signatures.iter().map(Signature::descriptor);
            let known = index.manifests.clone();
            index
                .manifests
                .extend(new.filter(|new| !known.contains(new)));
            let kept = index.manifests.len().saturating_sub(limits::SIGNATURES);
            index.manifests.drain(..kept);
            self.repository
                .put_manifest(&referrers_tag(subject), INDEX_TYPE, &to_bytes(&index))?;
        }
        let bytes = &documents.artifact.bytes;
        Ok(self.repository.put_manifest(name, MANIFEST_TYPE, bytes)?)
    }
}
