//! Secrets of an owner *(extension)*. A value goes in and never comes out.

use forkd_types::SecretValue;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of `PUT /v1/secrets/{name}`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, ToSchema)]
pub struct PutSecret {
    /// Printable ASCII characters, at most 4096, without spaces at the ends. No answer ever contains it.
    #[schema(value_type = String, min_length = 1, max_length = 4096, pattern = "^[!-~]([ -~]*[!-~])?$")]
    pub value: SecretValue,
}

impl Serialize for PutSecret {
    /// For clients only: the daemon never writes a value.
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeStruct;
        let mut object = serializer.serialize_struct("PutSecret", 1)?;
        object.serialize_field("value", self.value.expose())?;
        object.end()
    }
}

/// A secret without its value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SecretInfo {
    pub name: String,
    /// Seconds since the epoch.
    pub created_at_unix: u64,
    /// When the value was last set, in seconds since the epoch.
    pub updated_at_unix: u64,
}
