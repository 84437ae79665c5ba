//! Builds of images: a Dockerfile, carried out step by step in a microVM.
//!
//! ```text
//!   archive of the client ──upload──► Dockerfile and Context
//!                                        │
//!   FROM ──base──► snapshot of a parent ─┤
//!                                        ▼
//!   each step: key ──cache──► hit: go on with that snapshot
//!                      └────► miss: run it in the Machine, branch the machine under the key
//!                                        │
//!   last state ──layer──► root as tar ──► OCI archive ──► `forkd-image fetch` ──► image
//! ```
//!
//! [`build`] owns everything that a build makes: the sandbox of the current stage ([`machine::Machine`]), the staging
//! folder and the operation that installs the image. Dropping its future ends all three, so a client that goes away leaves
//! nothing. A step that fails is the exception: its sandbox stays for an hour, and the error names it.
//!
//! The key of a step is a digest of the key above it, the instruction after its expansion, the settings it runs with and
//! the content of the files it copies. Owners have separate caches: the owner is part of the first key.

mod base;
mod cache;
mod config;
mod context;
mod copy;
mod error;
mod events;
mod execute;
mod export;
mod install;
mod key;
mod layer;
mod machine;
mod mounts;
mod select;
mod settings;
mod stage;
mod upload;
mod wish;

pub use cache::{prune, remove_all};
pub use context::Context;
pub use error::BuildError;
pub use events::Events;
pub use export::{Export, export};
pub use machine::end_orphans;
pub use upload::Upload;
pub use wish::{BuildWish, Owns};

use std::sync::Arc;
use std::time::Duration;

use forkd_api::ImageInfo;
use forkd_sandboxes::app::App;
use forkd_sandboxes::error::Error;

use stage::Builder;

/// The longest that a build may take.
pub const LONGEST: Duration = Duration::from_secs(2 * 3600);

/// A build that succeeded.
#[derive(Debug)]
pub struct Built {
    pub image: ImageInfo,
    /// Steps that ran.
    pub ran: u32,
    /// Steps whose result was in the cache.
    pub cached: u32,
}

/// Builds an image.
pub async fn build(
    app: &Arc<App>,
    wish: BuildWish,
    context: Context,
    events: Events,
) -> Result<Built, BuildError> {
    app.check_open()?;
    let _slot = app.limits.image_build()?;
    app.limits.store_room(&app.store)?;
    install::check_name(app, &wish).await?;
    cache::prune(app).await?;
    let work = async {
        let mut builder = Builder::new(app, &wish, &context, &events)?;
        let done = builder.run().await?;
        let image = install::install(app, &wish, &done, &events).await?;
        let (ran, cached) = builder.counts();
        Ok(Built { image, ran, cached })
    };
    match tokio::time::timeout(LONGEST, work).await {
        Ok(result) => result,
        Err(_) => Err(Error::Timeout {
            what: format!("the build of {}", wish.name),
            seconds: LONGEST.as_secs(),
        }
        .into()),
    }
}
