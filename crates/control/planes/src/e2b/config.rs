//! Settings of the E2B plane.

use std::collections::BTreeMap;

use forkd_types::Tag;
use thiserror::Error;

use crate::ports::Domain;

/// How the E2B plane is set up.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct E2bConfig {
    /// The domain under which sandboxes have host names (`PORT-ID.domain`), with a port if it is not the usual one.
    pub domain: Option<Domain>,
    /// Template names that stand for snapshots of another name.
    pub templates: BTreeMap<String, Tag>,
}

/// Why a setting is rejected.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum InvalidSetting {
    /// The text is not a host name with an optional port.
    #[error("{0:?} is not a domain: lower-case letters, digits, '-', '.', and perhaps a port")]
    Domain(String),
    /// The text is not NAME=TAG.
    #[error("{0:?} is not a template: NAME=TAG, where TAG is a snapshot")]
    Template(String),
}

impl E2bConfig {
    /// Checks the settings as they were typed.
    pub fn new(domain: Option<&str>, templates: &[String]) -> Result<Self, InvalidSetting> {
        let parse =
            |text: &str| Domain::new(text).ok_or_else(|| InvalidSetting::Domain(text.to_owned()));
        let domain = domain.map(parse).transpose()?;
        let templates = templates
            .iter()
            .map(|text| {
                let parsed = text.split_once('=').and_then(|(name, tag)| {
                    Some((name.to_owned(), tag.parse::<Tag>().ok()?))
                        .filter(|(name, _)| !name.is_empty() && name.len() <= 128)
                });
                parsed.ok_or_else(|| InvalidSetting::Template(text.clone()))
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { domain, templates })
    }

    /// The domain without its port.
    pub fn host(&self) -> Option<&str> {
        self.domain.as_ref().map(Domain::host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn domains_and_templates_are_checked() {
        let good = E2bConfig::new(Some("a.example.com:8443"), &["base=run-x".into()]).unwrap();
        assert_eq!(good.host(), Some("a.example.com"));
        assert_eq!(good.templates["base"].as_str(), "run-x");
        for bad in ["", "A.b", "a..b", "a:b", "a:0", "-a", "a/b"] {
            assert!(E2bConfig::new(Some(bad), &[]).is_err(), "{bad}");
        }
        for bad in ["base", "=x", "base=", "base=a/b"] {
            assert!(E2bConfig::new(None, &[bad.to_owned()]).is_err(), "{bad}");
        }
    }
}
