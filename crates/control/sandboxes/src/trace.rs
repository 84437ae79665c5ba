//! Spans of operations. The daemon exports those of this target to a trace collector.

use tokio::task::JoinHandle;
use tracing::Instrument;

/// The target of spans that are exported.
pub const TARGET: &str = "forkd_trace";

/// Runs work in a task of its own, as part of the current trace.
pub fn spawn<F>(work: F) -> JoinHandle<F::Output>
where
    F: Future<Output: Send> + Send + 'static,
{
    tokio::spawn(work.in_current_span())
}
