//! Sets of named flags, one bit per flag on the wire.

use std::fmt;
use std::marker::PhantomData;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A flag with a bit of its own, 0 to 31.
pub trait Flag: Copy + fmt::Debug + 'static {
    /// Every flag of the set.
    const ALL: &'static [Self];

    /// The position of the flag's bit. It never changes its meaning.
    fn bit(self) -> u8;
}

/// A set of flags. Bits that this version does not know survive decoding, so a peer may know more flags.
pub struct FlagSet<T> {
    bits: u32,
    kind: PhantomData<T>,
}

impl<T: Flag> FlagSet<T> {
    /// The set without any flag.
    pub const fn empty() -> Self {
        Self {
            bits: 0,
            kind: PhantomData,
        }
    }

    /// The set of every known flag.
    pub fn all() -> Self {
        T::ALL.iter().copied().collect()
    }

    /// Whether the flag is in the set.
    pub fn contains(self, flag: T) -> bool {
        self.bits & mask(flag) != 0
    }

    /// Adds a flag.
    pub fn insert(&mut self, flag: T) {
        self.bits |= mask(flag);
    }

    /// Removes a flag.
    pub fn remove(&mut self, flag: T) {
        self.bits &= !mask(flag);
    }

    /// The known flags in the set.
    pub fn iter(self) -> impl Iterator<Item = T> {
        T::ALL
            .iter()
            .copied()
            .filter(move |flag| self.contains(*flag))
    }

    /// The known flags of this set that `other` lacks.
    pub fn missing_from(self, other: Self) -> impl Iterator<Item = T> {
        self.iter().filter(move |flag| !other.contains(*flag))
    }
}

fn mask<T: Flag>(flag: T) -> u32 {
    1 << (flag.bit() & 31)
}

impl<T: Flag> FromIterator<T> for FlagSet<T> {
    fn from_iter<I: IntoIterator<Item = T>>(flags: I) -> Self {
        let mut set = Self::empty();
        flags.into_iter().for_each(|flag| set.insert(flag));
        set
    }
}

impl<T> Clone for FlagSet<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for FlagSet<T> {}

impl<T> PartialEq for FlagSet<T> {
    fn eq(&self, other: &Self) -> bool {
        self.bits == other.bits
    }
}

impl<T> Eq for FlagSet<T> {}

impl<T: Flag> Default for FlagSet<T> {
    fn default() -> Self {
        Self::empty()
    }
}

impl<T: Flag> fmt::Debug for FlagSet<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

impl<T> Serialize for FlagSet<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.bits.serialize(serializer)
    }
}

impl<'de, T> Deserialize<'de> for FlagSet<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self {
            bits: u32::deserialize(deserializer)?,
            kind: PhantomData,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Capabilities, Capability};

    #[test]
    fn every_flag_has_a_bit_of_its_own() {
        let mut seen = Capabilities::empty();
        for flag in Capability::ALL {
            assert!(!seen.contains(*flag), "{flag:?}");
            seen.insert(*flag);
        }
        assert_eq!(seen, Capabilities::all());
    }

    #[test]
    fn unknown_bits_survive_the_wire() {
        let newer = u32::MAX;
        let bytes = crate::encode(&newer).unwrap();
        let set: Capabilities = crate::decode(&bytes).unwrap();
        assert!(Capability::ALL.iter().all(|flag| set.contains(*flag)));
        assert_eq!(crate::encode(&set).unwrap(), bytes);
    }

    #[test]
    fn missing_flags_are_named() {
        let have: Capabilities = [Capability::LiveCut].into_iter().collect();
        let want: Capabilities = [Capability::LiveCut, Capability::Rollback]
            .into_iter()
            .collect();
        assert_eq!(
            want.missing_from(have).collect::<Vec<_>>(),
            [Capability::Rollback]
        );
    }
}
