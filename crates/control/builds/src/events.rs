//! The progress of a build, on its way to the client.

use forkd_api::{BuildEvent, ErrorCode};
use forkd_sandboxes::error::Error;
use tokio::sync::mpsc;

/// Where a build tells its progress. A slow client holds the build up.
#[derive(Debug, Clone)]
pub struct Events(mpsc::Sender<BuildEvent>);

impl Events {
    pub fn new(sender: mpsc::Sender<BuildEvent>) -> Self {
        Self(sender)
    }

    /// Tells one event. Fails if the client went away.
    pub(crate) async fn tell(&self, event: BuildEvent) -> Result<(), Error> {
        let sent = self.0.send(event).await;
        sent.map_err(|_| Error::refused(ErrorCode::WrongState, "the build was cancelled"))
    }

    pub(crate) async fn note(&self, text: impl Into<String>) -> Result<(), Error> {
        self.tell(BuildEvent::Note { text: text.into() }).await
    }
}
