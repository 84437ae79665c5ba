//! The files that a cut is written to.

use std::fs::File;
use std::sync::Arc;

use forkd_store::{Staging, volatile_file};

use super::{CutMode, Place};
use crate::error::Error;
use crate::launch::NewLayer;
use crate::sandbox::layers::new_layers;
use crate::sandbox::owner::SandboxOwner;

/// The files that a cut is written to, opened before the source is stopped.
pub(super) struct CutFiles {
    /// The directory of files that have a name.
    _staging: Option<Staging>,
    pub state: File,
    pub memory: File,
    /// The page index; a cut of all memory has none.
    pub index: Option<File>,
    /// New layers for the source. A source that does not go on needs none.
    pub layers: Vec<NewLayer>,
}

impl CutFiles {
    pub async fn open(
        owner: &SandboxOwner,
        mode: CutMode,
        place: Place,
        goes_on: bool,
    ) -> Result<Self, Error> {
        let record = owner.sandbox.record();
        let app = Arc::clone(&owner.app);
        // A held source goes on after a failure, so only the end of a VM makes layers needless.
        let needs_layers = goes_on || owner.recorded;
        app.blocking(move |app| {
            let no_place = || Error::store("no place to write the cut");
            let staging = match place {
                Place::Memory => None,
                Place::MixedMemory | Place::Disk => Some(app.store.stage().map_err(no_place())?),
            };
            let on_disk = |name: &str| match &staging {
                Some(staging) => staging.create(name).map_err(no_place()),
                None => in_memory(name),
            };
            let small = |name: &str| match place {
                Place::Disk => on_disk(name),
                Place::Memory | Place::MixedMemory => in_memory(name),
            };
            let state = small("state")?;
            let memory = on_disk("memory")?;
            let index = (mode == CutMode::Diff)
                .then(|| small("index"))
                .transpose()?;
            let layers = if needs_layers {
                new_layers(app, &record)?
            } else {
                Vec::new()
            };
            Ok(Self {
                _staging: staging,
                state,
                memory,
                index,
                layers,
            })
        })
        .await
    }

    /// The names of the new layers.
    pub fn layer_names(&self) -> Vec<String> {
        self.layers.iter().map(|layer| layer.name.clone()).collect()
    }
}

fn in_memory(name: &str) -> Result<File, Error> {
    volatile_file(name).map_err(Error::io("create", "a file in memory"))
}
