//! Keys of the cache.

use std::fmt;

use forkd_types::Tag;
use serde_json::Value;

/// Changes when steps are carried out in another way: old results are then not found.
const VERSION: u32 = 1;

/// The state of a stage: a digest of everything that led to it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Key([u8; 32]);

impl Key {
    /// The state before any instruction.
    pub fn first(of: &Value) -> Self {
        Self(*blake3::hash(format!("forkd build {VERSION}\n{of}").as_bytes()).as_bytes())
    }

    /// The state after a step.
    pub fn then(&self, step: &Value) -> Self {
        Self(*blake3::keyed_hash(&self.0, step.to_string().as_bytes()).as_bytes())
    }

    pub fn hex(&self) -> String {
        hex::encode(self.0)
    }

    /// The tag of the snapshot with this state.
    pub fn tag(&self) -> Tag {
        let hex: String = self.hex().chars().take(40).collect();
        let text = format!("{}{hex}", forkd_sandboxes::ops::snapshots::BUILD_STEP);
        // Hexadecimal digits behind letters are a valid tag.
        text.parse().unwrap_or_else(|_| unreachable!("{text}"))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.hex())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forkd_sandboxes::ops::snapshots::is_build_step;
    use serde_json::json;

    #[test]
    fn a_key_has_everything_above_it_in_it() {
        let a = Key::first(&json!(["a"]));
        assert_eq!(a, Key::first(&json!(["a"])));
        assert_ne!(a, Key::first(&json!(["b"])));
        assert_ne!(a.then(&json!(1)), Key::first(&json!(["b"])).then(&json!(1)));
        assert_ne!(a.then(&json!(1)), a.then(&json!(1)).then(&json!(1)));
        assert!(is_build_step(&a.tag()));
        assert!(!is_build_step(&"build-it".parse().unwrap()));
    }
}
