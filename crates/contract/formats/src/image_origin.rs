//! `origin.json`: how a daemon came to an image, and who may see it. Images that an administrator installed have none.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Version of the record.
pub const SCHEMA: u32 = 1;
/// Name of the record, in the folder of the image.
pub const ORIGIN: &str = "origin.json";
/// The largest record that is read.
pub const MAX_BYTES: u64 = 1 << 20;

/// Why bytes are not an origin.
#[derive(Debug, Error)]
pub enum OriginError {
    #[error("the origin of the image does not parse")]
    Parse(#[source] serde_json::Error),
    #[error("the origin of the image has version {found}, this program knows {SCHEMA}")]
    Version { found: u32 },
}

/// How a daemon came to an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Origin {
    /// The version of the form, [`SCHEMA`].
    pub schema: u32,
    /// The names under which the image was asked for, as they were written.
    pub asked: Vec<String>,
    /// The platform that was asked for; none is that of the guests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<String>,
    /// Those whose requests fetched it.
    pub owners: Vec<String>,
    /// Whether every owner sees it.
    pub public: bool,
    /// Seconds since 1970.
    pub created_at_unix: u64,
}

impl Origin {
    /// Parses a record. Another version is refused before anything else of it is looked at.
    pub fn parse(text: &[u8]) -> Result<Self, OriginError> {
        #[derive(Deserialize)]
        struct Version {
            schema: u32,
        }
        let version: Version = serde_json::from_slice(text).map_err(OriginError::Parse)?;
        if version.schema != SCHEMA {
            return Err(OriginError::Version {
                found: version.schema,
            });
        }
        serde_json::from_slice(text).map_err(OriginError::Parse)
    }

    /// The record as text.
    pub fn to_json(&self) -> String {
        format!("{:#}\n", serde_json::json!(self))
    }

    /// Adds another request that led to the same image.
    pub fn merge(&mut self, other: Self) {
        let add = |into: &mut Vec<String>, from: Vec<String>| {
            for one in from {
                if !into.contains(&one) {
                    into.push(one);
                }
            }
        };
        add(&mut self.asked, other.asked);
        add(&mut self.owners, other.owners);
        self.public |= other.public;
        self.created_at_unix = self.created_at_unix.max(other.created_at_unix);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(asked: &str, owner: &str, public: bool) -> Origin {
        Origin {
            schema: SCHEMA,
            asked: vec![asked.into()],
            platform: None,
            owners: vec![owner.into()],
            public,
            created_at_unix: 1,
        }
    }

    #[test]
    fn an_origin_survives_its_text_and_another_version_is_refused() {
        let one = origin("a:1", "o", false);
        assert_eq!(Origin::parse(one.to_json().as_bytes()).unwrap(), one);
        let newer = one.to_json().replace("\"schema\": 1", "\"schema\": 2");
        let error = Origin::parse(newer.as_bytes());
        assert!(matches!(error, Err(OriginError::Version { found: 2 })));
    }

    #[test]
    fn two_requests_for_one_image_share_it() {
        let mut one = origin("a:1", "o", false);
        one.merge(origin("a:2", "p", true));
        one.merge(origin("a:2", "p", false));
        assert_eq!(one.asked, ["a:1", "a:2"]);
        assert_eq!(one.owners, ["o", "p"]);
        assert!(one.public);
    }
}
