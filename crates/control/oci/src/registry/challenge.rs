//! The `WWW-Authenticate` header: how a registry wants to be asked.

use std::collections::BTreeMap;

const MAX: usize = 8 << 10;

/// How a registry wants to be asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Challenge {
    /// User name and password with every request.
    Basic,
    /// A token from this service.
    Bearer {
        realm: String,
        service: Option<String>,
        scope: Option<String>,
    },
}

/// Parses one header. Several schemes may stand in it; the first that is known counts.
pub fn parse(header: &str) -> Option<Challenge> {
    let header = header.get(..header.len().min(MAX))?;
    let (scheme, rest) = header.trim().split_once(' ').unwrap_or((header.trim(), ""));
    if scheme.eq_ignore_ascii_case("basic") {
        return Some(Challenge::Basic);
    }
    if !scheme.eq_ignore_ascii_case("bearer") {
        return None;
    }
    let mut values = parameters(rest);
    Some(Challenge::Bearer {
        realm: values.remove("realm")?,
        service: values.remove("service"),
        scope: values.remove("scope"),
    })
}

/// `key="value", key=value`. A comma inside quotes belongs to the value.
fn parameters(text: &str) -> BTreeMap<String, String> {
    let mut values = BTreeMap::new();
    let mut rest = text;
    while let Some((key, after)) = rest.split_once('=') {
        let key = key.trim_matches([' ', ',', '\t']).to_ascii_lowercase();
        let (value, after) = match after.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"').unwrap_or((quoted, "")),
            None => after.split_once(',').unwrap_or((after, "")),
        };
        values.entry(key).or_insert_with(|| value.trim().to_owned());
        rest = after;
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_registries_are_read() {
        assert_eq!(parse("Basic realm=\"x\""), Some(Challenge::Basic));
        assert_eq!(parse("basic"), Some(Challenge::Basic));
        let text = r#"Bearer realm="https://auth.example/token",service="r",scope="repository:a:pull,push""#;
        assert_eq!(
            parse(text),
            Some(Challenge::Bearer {
                realm: "https://auth.example/token".into(),
                service: Some("r".into()),
                scope: Some("repository:a:pull,push".into()),
            })
        );
        for bad in [
            "",
            "Negotiate",
            "Bearer",
            "Bearer service=x",
            "Bearer realm",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
