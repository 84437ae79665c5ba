//! Injection of secrets: which header of requests to which host gets which secret.
//!
//! ```text
//!   host   = name [":" port]                                 api.example, api.example:8443
//!   value  = text with one or more "${secret:" NAME "}"      Bearer ${secret:openai}
//! ```
//!
//! An [`InjectRule`] has names of secrets and never a value. With a variable, programs in the guest find a placeholder
//! in it, and only this placeholder is replaced, inside the header of the rule.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{DomainName, InvalidDomain};
use crate::secret::{InvalidSecretName, SecretName};

/// The most injections of one policy. They fit into one message to the broker.
pub const MAX_INJECTIONS: usize = 16;
const MAX_HEADER: usize = 64;
const MAX_TEMPLATE: usize = 512;
const MAX_VARIABLE: usize = 64;
const HTTPS: u16 = 443;
/// Headers that decide where a request goes or where it ends.
const FRAMING: [&str; 12] = [
    "connection",
    "content-length",
    "expect",
    "host",
    "http2-settings",
    "keep-alive",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// A host by its name, and a port: 443 unless the text names another one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HostPort {
    pub host: DomainName,
    pub port: u16,
}

/// The name of a header, in lower case.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HeaderName(String);

/// The value of a header with secrets in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Template {
    parts: Vec<TemplatePart>,
}

/// A part of a [`Template`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TemplatePart {
    Text(String),
    Secret(SecretName),
}

/// The name of an environment variable.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VariableName(String);

/// One header of requests to one host gets a secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InjectRule {
    pub to: HostPort,
    pub header: HeaderName,
    pub value: Template,
    /// The guest has a placeholder of the secret in this variable.
    pub variable: Option<VariableName>,
}

/// Why an injection is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum InvalidInject {
    #[error("the host {text:?} of an injection is invalid; it is a name, without a star")]
    Host {
        text: String,
        #[source]
        source: InvalidDomain,
    },
    #[error("the port of {text:?} is not between 1 and 65535")]
    Port { text: String },
    #[error("{text:?} is not the name of a header")]
    Header { text: String },
    #[error("the header {name} frames the request and cannot have a secret")]
    Framing { name: String },
    #[error(
        "the value of the header has more than {MAX_TEMPLATE} characters or one that is not printable"
    )]
    Text,
    #[error("the value of the header names no secret: write ${{secret:NAME}}")]
    NoSecret,
    #[error("the value of the header has \"${{\" that does not begin ${{secret:NAME}}")]
    Reference,
    #[error("the value of the header names a secret in a wrong way")]
    Name(#[from] InvalidSecretName),
    #[error("{text:?} is not the name of an environment variable")]
    Variable { text: String },
    #[error("with a variable, the value is one secret and nothing else: ${{secret:NAME}}")]
    VariableWithText,
    #[error("two injections have the header {header} of {to}")]
    Twice { to: String, header: String },
    #[error("two injections have the variable {variable}")]
    VariableTwice { variable: String },
    #[error("a network policy has at most {MAX_INJECTIONS} injections, this one has {count}")]
    TooMany { count: usize },
}

fn shown(text: &str) -> String {
    text.chars().take(64).collect()
}

impl FromStr for HostPort {
    type Err = InvalidInject;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (host, port) = match text.rsplit_once(':') {
            None => (text, HTTPS),
            Some((host, port)) => {
                let parsed = port.parse().ok().filter(|port| *port > 0);
                let invalid = || InvalidInject::Port { text: shown(text) };
                (host, parsed.ok_or_else(invalid)?)
            }
        };
        let host = host.parse().map_err(|source| InvalidInject::Host {
            text: shown(host),
            source,
        })?;
        Ok(Self { host, port })
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            HTTPS => write!(f, "{}", self.host),
            port => write!(f, "{}:{port}", self.host),
        }
    }
}

impl HeaderName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for HeaderName {
    type Err = InvalidInject;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // A narrow part of the characters of RFC 9110: real headers have no others.
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        if text.is_empty() || text.len() > MAX_HEADER || !text.bytes().all(allowed) {
            return Err(InvalidInject::Header { text: shown(text) });
        }
        let name = text.to_ascii_lowercase();
        if FRAMING.contains(&name.as_str()) {
            return Err(InvalidInject::Framing { name });
        }
        Ok(Self(name))
    }
}

impl fmt::Display for HeaderName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Template {
    pub fn parts(&self) -> &[TemplatePart] {
        &self.parts
    }

    /// The secrets in the value, in their order.
    pub fn secrets(&self) -> impl Iterator<Item = &SecretName> {
        self.parts.iter().filter_map(|part| match part {
            TemplatePart::Secret(name) => Some(name),
            TemplatePart::Text(_) => None,
        })
    }

    /// The secret, if the value is one secret and nothing else.
    pub fn only_secret(&self) -> Option<&SecretName> {
        match self.parts.as_slice() {
            [TemplatePart::Secret(name)] => Some(name),
            _ => None,
        }
    }
}

impl FromStr for Template {
    type Err = InvalidInject;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let printable = text.bytes().all(|byte| matches!(byte, b' '..=b'~'));
        if text.len() > MAX_TEMPLATE || !printable || text.trim().len() != text.len() {
            return Err(InvalidInject::Text);
        }
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("${") {
            if !before.is_empty() {
                parts.push(TemplatePart::Text(before.to_owned()));
            }
            let reference = after.strip_prefix("secret:");
            let (name, left) = reference
                .and_then(|reference| reference.split_once('}'))
                .ok_or(InvalidInject::Reference)?;
            parts.push(TemplatePart::Secret(name.parse()?));
            rest = left;
        }
        if !rest.is_empty() {
            parts.push(TemplatePart::Text(rest.to_owned()));
        }
        let is_secret = |part: &TemplatePart| matches!(part, TemplatePart::Secret(_));
        match parts.iter().any(is_secret) {
            true => Ok(Self { parts }),
            false => Err(InvalidInject::NoSecret),
        }
    }
}

impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for part in &self.parts {
            match part {
                TemplatePart::Text(text) => f.write_str(text)?,
                TemplatePart::Secret(name) => write!(f, "${{secret:{name}}}")?,
            }
        }
        Ok(())
    }
}

impl VariableName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for VariableName {
    type Err = InvalidInject;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        let digit = text.bytes().next().is_none_or(|byte| byte.is_ascii_digit());
        match text.len() <= MAX_VARIABLE && !digit && text.bytes().all(allowed) {
            true => Ok(Self(text.to_owned())),
            false => Err(InvalidInject::Variable { text: shown(text) }),
        }
    }
}

impl fmt::Display for VariableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

macro_rules! text {
    ($($kind:ty),*) => {$(
        impl TryFrom<String> for $kind {
            type Error = InvalidInject;

            fn try_from(text: String) -> Result<Self, Self::Error> {
                text.parse()
            }
        }

        impl From<$kind> for String {
            fn from(value: $kind) -> Self {
                value.to_string()
            }
        }
    )*};
}

text!(HostPort, HeaderName, Template, VariableName);

impl InjectRule {
    /// Checks that the parts fit together.
    pub fn new(
        to: HostPort,
        header: HeaderName,
        value: Template,
        variable: Option<VariableName>,
    ) -> Result<Self, InvalidInject> {
        if variable.is_some() && value.only_secret().is_none() {
            return Err(InvalidInject::VariableWithText);
        }
        Ok(Self {
            to,
            header,
            value,
            variable,
        })
    }
}

/// Checks that injections fit together.
pub(super) fn check(rules: &[InjectRule]) -> Result<(), InvalidInject> {
    if rules.len() > MAX_INJECTIONS {
        return Err(InvalidInject::TooMany { count: rules.len() });
    }
    for (index, rule) in rules.iter().enumerate() {
        if rule.variable.is_some() && rule.value.only_secret().is_none() {
            return Err(InvalidInject::VariableWithText);
        }
        for earlier in rules.iter().take(index) {
            if earlier.to == rule.to && earlier.header == rule.header {
                return Err(InvalidInject::Twice {
                    to: rule.to.to_string(),
                    header: rule.header.to_string(),
                });
            }
            // One variable may serve several hosts if it is the same secret.
            if let Some(variable) = &rule.variable
                && earlier.variable.as_ref() == Some(variable)
                && earlier.value != rule.value
            {
                let variable = variable.to_string();
                return Err(InvalidInject::VariableTwice { variable });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rule(to: &str, header: &str, value: &str, variable: Option<&str>) -> InjectRule {
        let variable = variable.map(|name| name.parse().unwrap());
        InjectRule::new(
            to.parse().unwrap(),
            header.parse().unwrap(),
            value.parse().unwrap(),
            variable,
        )
        .unwrap()
    }

    #[test]
    fn parts_have_one_form() {
        let to: HostPort = "API.example".parse().unwrap();
        assert_eq!((to.to_string().as_str(), to.port), ("api.example", 443));
        let other: HostPort = "api.example:8443".parse().unwrap();
        assert_eq!(other.to_string(), "api.example:8443");
        let value: Template = "Basic ${secret:a}:${secret:b-1} $x".parse().unwrap();
        assert_eq!(value.to_string(), "Basic ${secret:a}:${secret:b-1} $x");
        assert_eq!(value.secrets().count(), 2);
        assert_eq!(
            "X-Api-Key".parse::<HeaderName>().unwrap().as_str(),
            "x-api-key"
        );
    }

    #[test]
    fn invalid_parts_are_refused() {
        for text in [
            "",
            "*.example",
            "10.0.0.1",
            "a.example:0",
            "a.example:x",
            "a.example:70000",
        ] {
            assert!(text.parse::<HostPort>().is_err(), "{text}");
        }
        for text in [
            "",
            "a b",
            "a:b",
            "Host",
            "Content-Length",
            "transfer-encoding",
            "a\r\nb",
        ] {
            assert!(text.parse::<HeaderName>().is_err(), "{text}");
        }
        for text in [
            "",
            "Bearer x",
            "${secret:}",
            "${secret:a",
            "${other:a}",
            "a\n${secret:a}",
            " ${secret:a}",
        ] {
            assert!(text.parse::<Template>().is_err(), "{text}");
        }
        for text in ["", "9A", "A-B", "A=B"] {
            assert!(text.parse::<VariableName>().is_err(), "{text}");
        }
    }

    #[test]
    fn rules_must_fit_together() {
        let one = rule("a.example", "authorization", "${secret:a}", Some("A_KEY"));
        let same = rule("b.example", "authorization", "${secret:a}", Some("A_KEY"));
        check(&[one.clone(), same]).unwrap();
        let other = rule("b.example", "authorization", "${secret:b}", Some("A_KEY"));
        assert!(check(&[one.clone(), other]).is_err());
        let again = rule("a.example", "Authorization", "x ${secret:b}", None);
        assert!(check(&[one.clone(), again]).is_err());
        assert!(check(&vec![one.clone(); MAX_INJECTIONS + 1]).is_err());
        let text = "Bearer ${secret:a}".parse().unwrap();
        assert!(InjectRule::new(one.to, one.header, text, one.variable).is_err());
    }

    proptest! {
        #[test]
        fn a_template_prints_what_it_read(text in "[ -~]{0,40}(\\$\\{secret:[a-z]{1,9}\\})?[ -~]{0,40}") {
            if let Ok(template) = text.parse::<Template>() {
                prop_assert_eq!(template.to_string(), text);
            }
        }
    }
}
