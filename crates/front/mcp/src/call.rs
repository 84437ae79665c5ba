//! One call of a tool: the daemon, the options, and a note for progress messages.

use forkd_rest_client::Client;
use parking_lot::Mutex;

use crate::options::Options;
use crate::refusal::Refusal;

/// The label of every sandbox that a tool makes.
pub const LABEL: &str = "mcp";
/// The longest note of a progress message, in characters.
const NOTE: usize = 200;

/// Everything a tool can use during one call.
#[derive(Debug)]
pub struct Call<'a> {
    /// The daemon, as the client of this call.
    pub client: &'a Client,
    /// The choices of the operator.
    pub options: &'a Options,
    /// The newest note for progress messages.
    note: Mutex<String>,
}

impl<'a> Call<'a> {
    /// A call without progress so far.
    pub fn new(client: &'a Client, options: &'a Options) -> Self {
        Self {
            client,
            options,
            note: Mutex::new(String::new()),
        }
    }

    /// Sets the note: the last line of this text.
    pub fn note(&self, text: &str) {
        if let Some(line) = text.lines().rev().find(|line| !line.trim().is_empty()) {
            *self.note.lock() = line.chars().take(NOTE).collect();
        }
    }

    /// The newest note of the call.
    pub fn newest_note(&self) -> String {
        self.note.lock().clone()
    }

    /// Refuses to make this many more sandboxes if the tools would then have made too many.
    pub async fn check_room(&self, more: u32) -> Result<(), Refusal> {
        let made = self.client.sandboxes().await?;
        let made = made
            .iter()
            .filter(|sandbox| sandbox.labels.contains_key(LABEL))
            .count();
        let limit = self.options.max_sandboxes;
        if made.saturating_add(more as usize) <= limit {
            return Ok(());
        }
        let error = format!("{made} sandboxes exist, {more} more would exceed {limit}");
        Err(
            Refusal::new(forkd_api::ErrorCode::LimitReached, error).with_hint(
                "delete sandboxes that are no longer needed with kill_sandbox, or start fewer",
            ),
        )
    }

    /// The lifetime of a new sandbox.
    pub fn ttl(&self, asked: Option<u64>) -> Option<u64> {
        let ttl = asked.unwrap_or(self.options.ttl_secs);
        (ttl > 0).then_some(ttl)
    }
}
