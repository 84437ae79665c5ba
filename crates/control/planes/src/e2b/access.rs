//! Who may send requests to a sandbox.
//!
//! Access tokens are those of [`crate::ports`]. Signed URLs carry a signature that is made with the token.

use axum::http::{HeaderMap, Method, StatusCode, Uri};
use base64::Engine;
use forkd_sandboxes::clock;
use forkd_sandboxes::state::Access;
use forkd_types::SandboxId;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::error::Refusal;
use super::route::{ENVD_PORT, INTERPRETER_PORT};
use super::state::E2b;
use super::text::{query, value};
use crate::ports::TokenKind;

fn same(a: &str, b: &str) -> bool {
    bool::from(a.as_bytes().ct_eq(b.as_bytes()))
}

fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).map(|value| value.to_str().unwrap_or(""))
}

/// The parts of a request that say whether it may use a sandbox.
#[derive(Debug, Clone, Copy)]
pub struct Credentials<'a> {
    pub method: &'a Method,
    pub uri: &'a Uri,
    pub headers: &'a HeaderMap,
}

/// Refuses a request without a valid token or signature. A port that is not public needs a token too.
pub fn check(
    e2b: &E2b,
    id: &SandboxId,
    port: u16,
    access: Access,
    sent: Credentials<'_>,
) -> Result<(), Refusal> {
    let headers = sent.headers;
    let denied = |message: &str| Refusal::new(StatusCode::UNAUTHORIZED, message);
    let given = header(headers, "x-access-token");
    let is_envd = given.map(|given| same(given, &e2b.token(TokenKind::Envd, id)));
    let is_traffic = e2b.ports.has_token(id, headers);
    let path = sent.uri.path().trim_start_matches('/');
    match port {
        ENVD_PORT if path == "health" => Ok(()),
        ENVD_PORT => match is_envd {
            Some(true) => Ok(()),
            Some(false) => Err(denied("invalid access token")),
            None if path == "files" => {
                let query = query(sent.uri.query().unwrap_or_default());
                let signature = value(&query, "signature")
                    .ok_or_else(|| denied("missing access token or signature"))?;
                let wanted = if sent.method == Method::POST {
                    Operation::Write
                } else {
                    Operation::Read
                };
                match e2b.signs(id, &query, signature) {
                    Some((operation, false)) if operation == wanted => Ok(()),
                    Some((_, true)) => Err(denied("signature is already expired")),
                    _ => Err(denied("invalid signature")),
                }
            }
            None => Err(denied("missing access token")),
        },
        INTERPRETER_PORT if path == "health" => Ok(()),
        INTERPRETER_PORT if is_traffic || is_envd == Some(true) => Ok(()),
        INTERPRETER_PORT => Err(denied("missing or invalid access token")),
        _ if access == Access::Public || (access == Access::Token && is_traffic) => Ok(()),
        _ => Err(Refusal::new(
            StatusCode::FORBIDDEN,
            "missing or invalid traffic access token",
        )),
    }
}

/// The operation that a signature allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Read,
    Write,
}

/// The signature of a URL.
pub fn signature(
    token: &str,
    path: &str,
    operation: Operation,
    user: &str,
    expires: Option<&str>,
) -> String {
    let operation = match operation {
        Operation::Read => "read",
        Operation::Write => "write",
    };
    let mut text = format!("{path}:{operation}:{user}:{token}");
    if let Some(expires) = expires {
        text.push(':');
        text.push_str(expires);
    }
    let digest = Sha256::digest(text.as_bytes());
    let encoded = base64::engine::general_purpose::STANDARD_NO_PAD.encode(digest);
    format!("v1_{encoded}")
}

/// Whether a query is signed with this token, and then for which operation and whether its time is over.
pub fn signed(token: &str, query: &[(String, String)], given: &str) -> Option<(Operation, bool)> {
    let text = |name| value(query, name);
    let (path, user) = (text("path").unwrap_or(""), text("username").unwrap_or(""));
    let expires = text("signature_expiration");
    let operation = [Operation::Read, Operation::Write]
        .into_iter()
        .find(|operation| same(given, &signature(token, path, *operation, user, expires)))?;
    let expired = match expires {
        None => false,
        Some(text) => text.parse::<u64>().map_or(true, |at| at < clock::unix()),
    };
    Some((operation, expired))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_are_those_of_the_sdks() {
        let read = signature("tok", "x", Operation::Read, "", None);
        assert_eq!(read, "v1_TI4S50Nh8MUWOtVDleM+vgl8NOli7nwskuHOWpYWfFc");
        let write = signature(
            "tok",
            "/home/user/a.txt",
            Operation::Write,
            "root",
            Some("1794727450"),
        );
        assert_eq!(write, "v1_NdEEInka5E3TGlNwZcPVSpT9o7yxzQTHGF930dkFbiU");
    }

    #[test]
    fn a_signature_holds_for_one_query_until_its_time_is_over() {
        let made = signature("tok", "x", Operation::Read, "", None);
        let with = |path: &str| vec![("path".to_owned(), path.to_owned())];
        assert_eq!(
            signed("tok", &with("x"), &made),
            Some((Operation::Read, false))
        );
        assert_eq!(signed("tok", &with("y"), &made), None);
        assert_eq!(signed("other", &with("x"), &made), None);
        let old = signature("tok", "x", Operation::Read, "", Some("1"));
        let mut query = with("x");
        query.push(("signature_expiration".into(), "1".into()));
        assert_eq!(signed("tok", &query, &old), Some((Operation::Read, true)));
    }
}
