//! Packing a snapshot into an artifact.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use forkd_api::ErrorCode;
use forkd_hub::archive::{StreamReader, StreamWriter, stream_length};
use forkd_hub::config::Blob;
use forkd_hub::documents::Documents;
use forkd_hub::manifest::Descriptor;
use forkd_hub::pack::{Base, Input};
use forkd_hub::{HubError, secrets};
use forkd_store::Staging;
use forkd_types::{Digest, Tag, path_error};

use super::portable;
use crate::app::App;
use crate::error::Error;
use crate::limits::TransferSlot;

/// A checked request for an artifact.
#[derive(Debug)]
pub struct PackRequest {
    pub tag: Tag,
    /// Pages that the target has already.
    pub base: Base,
    /// Pack a snapshot that holds keys or tokens.
    pub allow_secrets: bool,
    pub description: Option<String>,
}

/// An artifact whose packs are files in the staging directory.
#[derive(Debug)]
pub struct PackedSnapshot {
    documents: Documents,
    packs: BTreeMap<String, PathBuf>,
    _staging: Staging,
    _slot: TransferSlot,
}

/// Reads the documents of an artifact that the target has. An empty stream is no base.
pub async fn base(app: &Arc<App>, mut stream: impl Read + Send + 'static) -> Result<Base, Error> {
    app.blocking(move |_| {
        let mut first = [0; 1];
        let read = stream.read(&mut first).map_err(HubError::Stream);
        if read.map_err(Error::hub("the base cannot be read"))? == 0 {
            return Ok(Base::default());
        }
        let whole = std::io::Cursor::new(first).chain(stream);
        let (documents, _, _) =
            StreamReader::open(whole).map_err(Error::hub("the base cannot be read"))?;
        Ok(documents.base())
    })
    .await
}

/// Packs a snapshot. Stops soon after `cancel` is set.
pub async fn pack(
    app: &Arc<App>,
    request: PackRequest,
    cancel: Arc<AtomicBool>,
) -> Result<PackedSnapshot, Error> {
    app.check_open()?;
    let slot = app.limits.transfer()?;
    if app.writing.is_writing(&request.tag) {
        return Err(Error::StillWriting { tag: request.tag });
    }
    app.blocking(move |app| pack_now(app, request, slot, &cancel))
        .await
}

fn pack_now(
    app: &App,
    request: PackRequest,
    slot: TransferSlot,
    cancel: &AtomicBool,
) -> Result<PackedSnapshot, Error> {
    let tag = &request.tag;
    let failed = || format!("snapshot {tag} was not packed");
    // The lease keeps the blobs until the packs are written.
    let source = app.store.get(tag).map_err(Error::store(failed()))?;
    if let Some(volume) = source.manifest.volumes.first() {
        return Err(Error::hinted(
            ErrorCode::WrongState,
            format!("snapshot {tag} holds a clone of volume {}", volume.name),
            "freeze a sandbox without volumes; a volume belongs to its host",
        ));
    }
    let staging = app.store.stage().map_err(Error::store(failed()))?;
    let open = |digest: &Digest| {
        let file = app.store.open_blob(digest);
        file.map_err(Error::store(failed()))
    };
    let state = open(&source.manifest.state.digest)?;
    let mut config = portable::config(&source.manifest, &state, &portable::host());
    config.description = request.description;
    let mut inputs = Vec::new();
    for (blob, role) in portable::blobs(&source.manifest) {
        inputs.push(Input {
            blob: Blob {
                digest: blob.digest,
                bytes: blob.bytes,
            },
            file: open(&blob.digest)?,
            role,
        });
    }
    let packed = forkd_hub::pack::pack(&inputs, &request.base, staging.path(), cancel)
        .map_err(Error::hub(failed()))?;
    if !packed.secrets.is_empty() && !request.allow_secrets {
        return Err(Error::hub(failed())(HubError::Secrets {
            count: packed.secrets.iter().map(|found| found.count).sum(),
            found: secrets::describe(&packed.secrets),
        }));
    }
    let documents = Documents::new(config, &packed).map_err(Error::hub(failed()))?;
    let packs = packed
        .new
        .into_iter()
        .map(|pack| (pack.digest.to_string(), pack.path));
    Ok(PackedSnapshot {
        documents,
        packs: packs.collect(),
        _staging: staging,
        _slot: slot,
    })
}

impl PackedSnapshot {
    /// Digest of the manifest.
    pub fn digest(&self) -> String {
        self.documents.artifact.digest.to_string()
    }

    fn sent(&self) -> impl Iterator<Item = &Descriptor> {
        let all = self.documents.artifact.packs.iter();
        all.filter(|pack| self.packs.contains_key(&pack.digest.to_string()))
    }

    /// Bytes of the stream.
    pub fn length(&self) -> u64 {
        stream_length(&self.documents, &self.documents.config.name, self.sent())
    }

    /// Writes the artifact as a stream. Packs of the base are left out.
    pub fn write(&self, out: impl Write) -> Result<(), HubError> {
        let name = &self.documents.config.name;
        let mut writer = StreamWriter::begin(out, &self.documents, name)?;
        for pack in self.sent() {
            if let Some(path) = self.packs.get(&pack.digest.to_string()) {
                let file = File::open(path).map_err(path_error("open", path))?;
                writer.pack(pack, file)?;
            }
        }
        writer.finish().map(drop)
    }
}
