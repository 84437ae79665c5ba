//! Checks the lint tables of all manifests.
//!
//! Every crate forbids `unsafe_code`, except the crates in [`PLACES`], which deny it and allow it locally.

use serde::Deserialize;

use crate::finding::Finding;
use crate::placement::PLACES;
use crate::source::{SourceFile, Tree};

pub fn check(tree: &Tree) -> anyhow::Result<Vec<Finding>> {
    Ok(tree
        .files
        .iter()
        .filter(|file| is_member(&file.path))
        .flat_map(check_manifest)
        .collect())
}

/// Whether the manifest belongs to a crate of the workspace. The fuzz targets are a workspace of their own.
fn is_member(path: &str) -> bool {
    path.ends_with("/Cargo.toml") && !path.starts_with("fuzz/") && !path.starts_with("sdk/")
}

#[derive(Deserialize)]
struct Manifest {
    lints: Option<Lints>,
}

#[derive(Deserialize)]
struct Lints {
    #[serde(default)]
    workspace: bool,
    #[serde(default)]
    rust: toml::Table,
    #[serde(default)]
    clippy: toml::Table,
}

fn check_manifest(file: &SourceFile) -> Vec<Finding> {
    let manifest: Manifest = match toml::from_str(&file.text) {
        Ok(manifest) => manifest,
        Err(error) => return vec![Finding::in_file(&file.path, error.to_string())],
    };
    let mut findings = Vec::new();
    let mut complain = |message: String| findings.push(Finding::in_file(&file.path, message));
    let Some(lints) = manifest.lints else {
        complain("no [lints] table".to_owned());
        return findings;
    };
    let wanted = if may_have_unsafe(&file.path) {
        ["deny", "forbid"]
    } else {
        ["forbid"; 2]
    };
    // The shared table leaves `unsafe_code` to the crates, so only crates that may contain `unsafe` can
    // inherit it.
    let inherits = lints.workspace && wanted.contains(&"deny");
    if !inherits {
        if !wanted
            .iter()
            .any(|level| level_of(&lints.rust, "unsafe_code") == Some(level))
        {
            complain(format!(
                "[lints.rust] must say unsafe_code = \"{}\"",
                wanted[0]
            ));
        }
        if level_of(&lints.clippy, "undocumented_unsafe_blocks") != Some("deny") {
            complain("[lints.clippy] must say undocumented_unsafe_blocks = \"deny\"".to_owned());
        }
    }
    findings
}

fn level_of<'a>(table: &'a toml::Table, lint: &str) -> Option<&'a str> {
    let value = table.get(lint)?;
    value.as_str().or_else(|| value.get("level")?.as_str())
}

/// Whether one of the places lies in the crate of this manifest.
fn may_have_unsafe(manifest: &str) -> bool {
    let folder = manifest.trim_end_matches("Cargo.toml");
    PLACES.iter().any(|place| place.starts_with(folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORBID: &str = "[lints.rust]\nunsafe_code = \"forbid\"\n";
    const DENY: &str = "[lints.rust]\nunsafe_code = { level = \"deny\", priority = 1 }\n";
    const CLIPPY: &str = "[lints.clippy]\nundocumented_unsafe_blocks = \"deny\"\n";
    const INHERIT: &str = "[lints]\nworkspace = true\n";

    fn count(path: &str, text: &str) -> usize {
        check(&Tree::of(&[(path, text)])).unwrap().len()
    }

    #[test]
    fn an_ordinary_crate_forbids() {
        let path = "crates/control/store/Cargo.toml";
        assert_eq!(count(path, &format!("{FORBID}{CLIPPY}")), 0);
        assert_eq!(count(path, &format!("{DENY}{CLIPPY}")), 1);
        assert_eq!(count(path, FORBID), 1);
        assert_eq!(count(path, ""), 1);
        assert_ne!(count(path, INHERIT), 0);
    }

    #[test]
    fn a_crate_that_may_have_unsafe_denies_or_inherits() {
        for path in ["crates/host/sys/Cargo.toml", "crates/host/vmm/Cargo.toml"] {
            assert_eq!(count(path, &format!("{DENY}{CLIPPY}")), 0);
            assert_eq!(count(path, INHERIT), 0);
            assert_eq!(count(path, CLIPPY), 1);
        }
    }

    #[test]
    fn the_fuzz_workspace_is_left_alone() {
        assert_eq!(count("fuzz/Cargo.toml", ""), 0);
    }
}
