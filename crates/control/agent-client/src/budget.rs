//! The memory that answers of agents may take together.
//!
//! A host talks to many guests, and each of them may send as much as its own limits allow. A [`Budget`] is shared by
//! all connections: an answer takes its bytes from the budget as they come and gives them back when it is dropped. An
//! answer that finds the budget used up fails; it does not wait, since answers that wait for each other would hold
//! their parts for ever.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::Error;

/// Bytes in one permit of the semaphore. An answer takes at least one.
const UNIT: usize = 4096;

/// The memory that answers of agents may take together. Clones share it.
#[derive(Debug, Clone)]
pub struct Budget {
    free: Arc<Semaphore>,
    limit: usize,
}

impl Budget {
    /// A budget of this many bytes.
    #[must_use]
    pub fn of(bytes: usize) -> Self {
        let units = (bytes / UNIT).clamp(1, Semaphore::MAX_PERMITS.min(u32::MAX as usize));
        Self {
            free: Arc::new(Semaphore::new(units)),
            limit: units.saturating_mul(UNIT),
        }
    }

    /// No limit, for a program that talks to one guest.
    #[must_use]
    pub fn unlimited() -> Self {
        Self::of(usize::MAX)
    }

    /// Bytes that no answer holds.
    #[must_use]
    pub fn free(&self) -> usize {
        self.free.available_permits().saturating_mul(UNIT)
    }

    pub(crate) fn hold(&self) -> Held {
        Held {
            budget: self.clone(),
            bytes: 0,
            permit: None,
        }
    }
}

/// The part of a budget that one answer holds; given back when dropped.
#[derive(Debug)]
pub struct Held {
    budget: Budget,
    bytes: usize,
    permit: Option<OwnedSemaphorePermit>,
}

impl Held {
    /// Takes more bytes from the budget.
    pub(crate) fn grow(&mut self, bytes: usize) -> Result<(), Error> {
        self.bytes = self.bytes.saturating_add(bytes);
        let have = self
            .permit
            .as_ref()
            .map_or(0, OwnedSemaphorePermit::num_permits);
        let missing = self.bytes.div_ceil(UNIT).saturating_sub(have);
        let used_up = || Error::OverBudget {
            limit: self.budget.limit,
        };
        let count = u32::try_from(missing).map_err(|_| used_up())?;
        if count == 0 {
            return Ok(());
        }
        let more = Arc::clone(&self.budget.free)
            .try_acquire_many_owned(count)
            .map_err(|_| used_up())?;
        match &mut self.permit {
            Some(permit) => permit.merge(more),
            none => *none = Some(more),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_share_a_budget_and_give_it_back() {
        let budget = Budget::of(10 * UNIT);
        let (mut one, mut other) = (budget.hold(), budget.hold());
        one.grow(1).unwrap();
        one.grow(6 * UNIT - 1).unwrap();
        assert_eq!(budget.free(), 4 * UNIT);
        other.grow(4 * UNIT).unwrap();
        let refused = other.grow(1).unwrap_err();
        assert!(matches!(refused, Error::OverBudget { limit } if limit == 10 * UNIT));
        drop(one);
        other.grow(1).unwrap();
        drop(other);
        assert_eq!(budget.free(), 10 * UNIT);
    }
}
