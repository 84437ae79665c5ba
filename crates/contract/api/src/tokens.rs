//! Tokens and what they allow *(extension)*.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The rights of a token. Each role includes the ones before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// See what belongs to the owner and what is public; change nothing.
    Read,
    /// Make, use, change and delete what belongs to the owner.
    Use,
    /// The same for what belongs to any owner; manage tokens; use files of the host.
    Admin,
}

impl Role {
    /// The role as it is written.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Use => "use",
            Self::Admin => "admin",
        }
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.as_str())
    }
}

impl std::str::FromStr for Role {
    type Err = UnknownRole;

    fn from_str(text: &str) -> Result<Self, UnknownRole> {
        [Self::Read, Self::Use, Self::Admin]
            .into_iter()
            .find(|role| role.as_str() == text)
            .ok_or(UnknownRole)
    }
}

/// The text names no role.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnknownRole;

impl std::fmt::Display for UnknownRole {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a role is read, use or admin")
    }
}

impl std::error::Error for UnknownRole {}

/// Body of `POST /v1/tokens`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CreateToken {
    /// The name under which the token is listed, logged and revoked.
    #[schema(min_length = 1, max_length = 32, pattern = "^[A-Za-z0-9_-]+$")]
    pub name: String,
    /// Who owns what the token makes; the token's name if left out. Several tokens may have one owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 32, pattern = "^[A-Za-z0-9_-]+$")]
    pub owner: Option<String>,
    /// The rights of the token.
    #[serde(default = "default_role")]
    pub role: Role,
}

fn default_role() -> Role {
    Role::Use
}

/// A token in a list. The secret is not kept and cannot be shown again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TokenInfo {
    pub name: String,
    /// Who owns what the token makes.
    pub owner: String,
    /// The rights of the token.
    pub role: Role,
    /// When it was made, in seconds since 1970.
    pub created_at_unix: u64,
}

/// Answer of `POST /v1/tokens`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CreatedToken {
    pub name: String,
    /// Who owns what the token makes.
    pub owner: String,
    /// The rights of the token.
    pub role: Role,
    /// When it was made, in seconds since 1970.
    pub created_at_unix: u64,
    /// The secret for `Authorization: Bearer`. It is shown only here.
    pub token: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_is_written_as_it_is_serialised_and_parsed_back() {
        for role in [Role::Read, Role::Use, Role::Admin] {
            assert_eq!(serde_json::to_value(role).unwrap(), role.as_str());
            assert_eq!(role.as_str().parse(), Ok(role));
        }
        assert!(Role::Read < Role::Use && Role::Use < Role::Admin);
        assert!("root".parse::<Role>().is_err());
    }
}
