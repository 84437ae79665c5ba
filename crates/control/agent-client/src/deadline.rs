//! Limits in time for calls to an agent.
//!
//! The guest is not trusted to answer, so there is no call without a [`Deadline`]: see [`crate::Client::by`]. A call that
//! meets its deadline is cancelled like one that is dropped.

use std::time::Duration;

use tokio::time::Instant;

use crate::Error;

/// Stands in for a time that the clock cannot express.
const FAR: Duration = Duration::from_secs(365 * 24 * 3600);

/// The moment at which a call gives up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline(Instant);

impl Deadline {
    /// So long from now.
    #[must_use]
    pub fn within(time: Duration) -> Self {
        let now = Instant::now();
        Self(now.checked_add(time).unwrap_or(now + FAR))
    }

    /// At this moment.
    #[must_use]
    pub const fn at(instant: Instant) -> Self {
        Self(instant)
    }

    /// The time that is left.
    #[must_use]
    pub fn left(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }

    /// Waits for the work, at most until the deadline.
    pub(crate) async fn bound<T>(
        self,
        work: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        tokio::time::timeout_at(self.0, work)
            .await
            .unwrap_or(Err(Error::Timeout))
    }
}

/// The limit of the calls that one [`crate::Calls`] makes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Limit {
    /// All of them end by this moment.
    By(Deadline),
    /// Each of them has this much time.
    Each(Duration),
}

impl Limit {
    /// The deadline of a call that begins now.
    pub(crate) fn deadline(self) -> Deadline {
        match self {
            Self::By(deadline) => deadline,
            Self::Each(time) => Deadline::within(time),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_beyond_the_clock_is_a_deadline_all_the_same() {
        assert!(Deadline::within(Duration::MAX).left() > FAR / 2);
        assert_eq!(Deadline::at(Instant::now()).left(), Duration::ZERO);
    }

    #[tokio::test]
    async fn work_that_never_ends_ends_at_its_deadline() {
        let never = std::future::pending::<Result<(), Error>>();
        let ended = Deadline::within(Duration::ZERO).bound(never).await;
        assert!(matches!(ended, Err(Error::Timeout)));
    }
}
