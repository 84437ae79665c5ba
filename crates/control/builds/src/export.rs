//! Images of this host as OCI archives.

use std::sync::Arc;

use forkd_sandboxes::app::App;
use forkd_sandboxes::error::Error;
use forkd_types::{Policy, Tag};
use tokio::sync::mpsc;

use crate::base::Bases;
use crate::cache;
use crate::config::Config;
use crate::layer::Layer;
use crate::machine::Machine;
use crate::wish::Owns;

/// The size of a disk that is never made here.
const DISK_MIB: u32 = 8192;

/// An image that is ready to be sent.
#[derive(Debug)]
pub struct Export {
    name: Tag,
    layer: Layer,
    config: Config,
}

/// Packs an image: a child of it packs its own root.
pub async fn export(app: &Arc<App>, name: Tag, owner: String, owns: Owns) -> Result<Export, Error> {
    app.check_open()?;
    let _slot = app.limits.image_build()?;
    cache::prune(app).await?;
    let bases = Bases {
        app,
        owner: &owner,
        owns: &owns,
        memory_mib: None,
        vcpus: None,
        disk_mib: DISK_MIB,
    };
    let (base, config) = bases.named(&name).await?;
    let machine = Machine::start(app, &base.tag, &owner, Policy::none(), "export").await?;
    let layer = Layer::pack(app, &machine).await?;
    machine.end().await;
    Ok(Export {
        name,
        layer,
        config,
    })
}

impl Export {
    /// The digest of the layer.
    pub fn digest(&self) -> String {
        format!("sha256:{}", self.layer.digest())
    }

    /// Sends the archive.
    pub async fn send(self, to: mpsc::Sender<Vec<u8>>) -> Result<(), Error> {
        self.layer.send(&self.config, &self.name, &to).await
    }
}
