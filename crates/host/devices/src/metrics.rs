//! Counters of devices.
//!
//! A device bumps its counters without a lock, and any thread reads them at any time. The names are listed in
//! [`forkd_vmm_proto::COUNTERS`].

use std::sync::atomic::{AtomicU64, Ordering};

/// A number that only goes up.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub fn inc(&self) {
        self.add(1);
    }

    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Sets it, for values that are measured rather than counted.
    pub fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A set of counters with names.
pub trait Counters: Send + Sync {
    /// Calls `visit` with the name and value of each.
    fn visit(&self, visit: &mut dyn FnMut(&'static str, u64));
}

/// Declares a struct of [`Counter`]s and its [`Counters`] implementation.
macro_rules! counters {
    ($(#[$meta:meta])* $vis:vis struct $name:ident { $($(#[$field_meta:meta])* $field:ident),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Default)]
        $vis struct $name {
            $($(#[$field_meta])* pub $field: $crate::metrics::Counter,)*
        }

        impl $crate::metrics::Counters for $name {
            fn visit(&self, visit: &mut dyn FnMut(&'static str, u64)) {
                $(visit(stringify!($field), self.$field.get());)*
            }
        }
    };
}
pub(crate) use counters;

#[cfg(test)]
mod tests {
    use super::*;

    counters! {
        struct Two { first, second }
    }

    #[test]
    fn names_are_field_names() {
        let two = Two::default();
        two.second.add(7);
        let mut seen = Vec::new();
        two.visit(&mut |name, value| seen.push((name, value)));
        assert_eq!(seen, [("first", 0), ("second", 7)]);
    }
}
