//! Expected times of the main operations on the instruction clock.
//!
//! The file has a version, a tolerance in per cent, and the fastest round of each row of `operations` in milliseconds. A
//! row that takes longer than its value and the tolerance fails the run, and so does a row that has become much faster:
//! its value would hide the next regression. Rows that are not in the file are not compared.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, bail};
use serde::Deserialize;

const VERSION: u32 = 1;
/// A row that is faster than its value by this many tolerances needs a new value.
const MUCH_FASTER: f64 = 4.0;

/// The expected times.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expected {
    version: u32,
    tolerance_percent: f64,
    /// Milliseconds by the name of the row.
    fastest_ms: BTreeMap<String, f64>,
}

impl Expected {
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        let expected: Self = serde_json::from_str(&text)
            .with_context(|| format!("{} is not a file of expected times", path.display()))?;
        if expected.version != VERSION {
            bail!(
                "{} has version {}, this program reads {VERSION}",
                path.display(),
                expected.version
            );
        }
        Ok(expected)
    }

    /// Whether a row is slower than expected, so that a second look is worth while.
    pub fn is_slow(&self, name: &str, fastest_ms: f64) -> bool {
        self.limits(name).is_some_and(|(_, most)| fastest_ms > most)
    }

    /// One line for each row that does not keep to its value.
    pub fn complaints<'a>(&self, rows: impl Iterator<Item = (&'a str, f64)>) -> Vec<String> {
        let complaint = |(name, found): (&str, f64)| {
            let (least, most) = self.limits(name)?;
            let wanted = self.fastest_ms.get(name)?;
            if found > most {
                Some(format!(
                    "{name} takes {found:.2} ms, expected are {wanted:.2}: find out which change made it slower"
                ))
            } else if found < least {
                Some(format!(
                    "{name} takes {found:.2} ms only, expected are {wanted:.2}: lower the value in the file"
                ))
            } else {
                None
            }
        };
        rows.filter_map(complaint).collect()
    }

    fn limits(&self, name: &str) -> Option<(f64, f64)> {
        let wanted = *self.fastest_ms.get(name)?;
        let slack = wanted * self.tolerance_percent / 100.0;
        Some((wanted - MUCH_FASTER * slack, wanted + slack))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expected() -> Expected {
        let text =
            r#"{"version": 1, "tolerance_percent": 5, "fastest_ms": {"spawn": 40.0, "eval": 2.0}}"#;
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn a_row_keeps_to_its_value_or_is_named() {
        let expected = expected();
        let complaints = |spawn| expected.complaints([("spawn", spawn), ("fork", 9e9)].into_iter());
        assert_eq!(complaints(42.0), [""; 0]);
        assert_eq!(complaints(32.0), [""; 0]);
        assert!(complaints(42.1)[0].contains("slower"));
        assert!(complaints(31.9)[0].contains("lower the value"));
        assert!(expected.is_slow("spawn", 42.1));
        assert!(!expected.is_slow("spawn", 31.9));
        assert!(!expected.is_slow("fork", 9e9));
    }

    #[test]
    fn the_file_of_the_repository_is_valid() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("expected.json");
        assert!(!Expected::read(&file).unwrap().fastest_ms.is_empty());
    }

    #[test]
    fn another_version_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("expected.json");
        std::fs::write(
            &path,
            r#"{"version": 2, "tolerance_percent": 5, "fastest_ms": {}}"#,
        )
        .unwrap();
        let error = Expected::read(&path).unwrap_err();
        assert!(error.to_string().contains("version 2"), "{error}");
    }
}
