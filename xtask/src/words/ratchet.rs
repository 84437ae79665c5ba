//! Counts of unclear wording per area, which may only fall.
//!
//! An area is a crate, a top-level folder or a top-level file. `xtask/words.toml` holds the count of each pattern that
//! an area may have; an area or pattern without an entry may have none. [`check`] reports rises, [`report_falls`]
//! tells whether entries can be lowered, and [`update`] lowers them and adds new areas. An area that is clean keeps an
//! empty entry, so that `update` never raises a count.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::process::Command;

use anyhow::Context;
use serde::Deserialize;

use super::patterns::{self, Pattern};
use super::{SourceFile, is_handwritten};
use crate::finding::Finding;
use crate::source::Tree;

const FILE: &str = "xtask/words.toml";
const COMMITS: &str = "commits";

/// A rise names at most this many places: the author knows which of them is new.
const PLACES_SHOWN: usize = 20;

type Counts = BTreeMap<Pattern, usize>;

#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Ratchet {
    /// Commits after this one are checked.
    commits_since: String,
    areas: BTreeMap<String, Counts>,
}

/// One occurrence of a pattern: `file:line`, or the commit.
struct Hit {
    area: String,
    pattern: Pattern,
    place: String,
}

pub fn check(tree: &Tree) -> anyhow::Result<Vec<Finding>> {
    let ratchet = read(tree)?;
    let hits = all_hits(tree, &ratchet)?;
    Ok(rises(&ratchet.areas, &count(tree, &hits), &hits))
}

/// Prints every occurrence of every pattern.
pub fn list(tree: &Tree) -> anyhow::Result<()> {
    for hit in all_hits(tree, &read(tree)?)? {
        println!("{}: {}", hit.place, hit.pattern);
    }
    Ok(())
}

/// Prints the entries that are higher than the tree needs.
pub fn report_falls(tree: &Tree) -> anyhow::Result<()> {
    let ratchet = read(tree)?;
    let now = count(tree, &all_hits(tree, &ratchet)?);
    let lowered = lower(&ratchet.areas, &now);
    if lowered != ratchet.areas {
        println!(
            "fewer unclear words than {FILE} allows: run `cargo xtask words --update` to lower it"
        );
    }
    Ok(())
}

/// Lowers the entries to the present counts and adds areas that have no entry yet.
pub fn update(tree: &Tree) -> anyhow::Result<()> {
    let ratchet = read(tree)?;
    let now = count(tree, &all_hits(tree, &ratchet)?);
    let next = Ratchet {
        areas: lower(&ratchet.areas, &now),
        ..ratchet
    };
    fs::write(tree.root.join(FILE), render(&next)).with_context(|| format!("cannot write {FILE}"))
}

fn read(tree: &Tree) -> anyhow::Result<Ratchet> {
    let file = tree.files.iter().find(|file| file.path == FILE);
    let file = file.with_context(|| format!("{FILE} is missing"))?;
    toml::from_str(&file.text).with_context(|| format!("cannot parse {FILE}"))
}

fn checked_files(tree: &Tree) -> impl Iterator<Item = &SourceFile> {
    tree.files
        .iter()
        .filter(|file| is_handwritten(&file.path) && patterns::is_checked(file))
}

fn all_hits(tree: &Tree, ratchet: &Ratchet) -> anyhow::Result<Vec<Hit>> {
    let mut hits: Vec<Hit> = checked_files(tree).flat_map(hits_in).collect();
    hits.extend(bad_commits(tree, &ratchet.commits_since)?);
    Ok(hits)
}

fn hits_in(file: &SourceFile) -> impl Iterator<Item = Hit> {
    patterns::in_file(file)
        .into_iter()
        .map(|(line, pattern)| Hit {
            area: area(&file.path).to_owned(),
            pattern,
            place: format!("{}:{line}", file.path),
        })
}

/// Three path components below `crates`, two below `tests`, one elsewhere.
fn area(path: &str) -> &str {
    let parts = match path.split('/').next() {
        Some("crates") => 3,
        Some("tests") => 2,
        _ => 1,
    };
    let end = path.match_indices('/').nth(parts - 1);
    end.map_or(path, |(at, _)| &path[..at])
}

/// Empty in a clone without the base commit: a shallow clone must pass.
fn bad_commits(tree: &Tree, base: &str) -> anyhow::Result<Vec<Hit>> {
    let output = Command::new("git")
        .args(["log", "--no-merges", "--format=%h %s"])
        .arg(format!("{base}..HEAD"))
        .current_dir(&tree.root)
        .output()
        .context("cannot run git")?;
    let log = String::from_utf8_lossy(&output.stdout);
    let bad = log.lines().filter(|line| {
        let subject = line.split_once(' ').map_or("", |(_, subject)| subject);
        patterns::is_bad_subject(subject)
    });
    Ok(bad
        .map(|line| Hit {
            area: COMMITS.to_owned(),
            pattern: Pattern::Subject,
            place: line.to_owned(),
        })
        .collect())
}

/// The counts of every area of the tree, clean ones included.
fn count(tree: &Tree, hits: &[Hit]) -> BTreeMap<String, Counts> {
    let files = checked_files(tree).map(|file| area(&file.path).to_owned());
    let mut areas: BTreeMap<String, Counts> = files
        .chain([COMMITS.to_owned()])
        .map(|area| (area, Counts::new()))
        .collect();
    for hit in hits {
        let counts = areas.entry(hit.area.clone()).or_default();
        *counts.entry(hit.pattern).or_default() += 1;
    }
    areas
}

fn rises(
    allowed: &BTreeMap<String, Counts>,
    now: &BTreeMap<String, Counts>,
    hits: &[Hit],
) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (area, counts) in now {
        for (pattern, now) in counts {
            let entry = allowed.get(area).and_then(|counts| counts.get(pattern));
            let allowed = entry.copied().unwrap_or(0);
            if *now > allowed {
                let places: Vec<&str> = hits
                    .iter()
                    .filter(|hit| hit.area == *area && hit.pattern == *pattern)
                    .map(|hit| hit.place.as_str())
                    .take(PLACES_SHOWN)
                    .collect();
                let message = format!(
                    "{now} times `{pattern}`, {FILE} allows {allowed} (rules: docs/style.md): {}",
                    places.join(", ")
                );
                findings.push(Finding::in_file(area, message));
            }
        }
    }
    findings
}

fn lower(
    allowed: &BTreeMap<String, Counts>,
    now: &BTreeMap<String, Counts>,
) -> BTreeMap<String, Counts> {
    let mut lowered = BTreeMap::new();
    for (area, counts) in now {
        let mut counts = counts.clone();
        if let Some(allowed) = allowed.get(area) {
            counts.retain(|pattern, _| allowed.contains_key(pattern));
            for (pattern, count) in &mut counts {
                *count = (*count).min(allowed[pattern]);
            }
        }
        lowered.insert(area.clone(), counts);
    }
    lowered
}

/// One line per area, so that changes of two areas merge without a conflict.
fn render(ratchet: &Ratchet) -> String {
    let mut text = format!(
        "# Unclear wording that each area may have. The counts only fall: `cargo xtask words --update`.\n\
         commits_since = \"{}\"\n\n[areas]\n",
        ratchet.commits_since
    );
    for (area, counts) in &ratchet.areas {
        let counts: Vec<String> = counts
            .iter()
            .map(|(pattern, count)| format!("{pattern} = {count}"))
            .collect();
        let counts = match counts.join(", ") {
            none if none.is_empty() => "{}".to_owned(),
            some => format!("{{ {some} }}"),
        };
        let _ = writeln!(text, "\"{area}\" = {counts}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(of: &[(&str, Pattern, usize)]) -> BTreeMap<String, Counts> {
        let mut areas: BTreeMap<String, Counts> = BTreeMap::new();
        for (area, pattern, count) in of {
            let counts = areas.entry((*area).to_owned()).or_default();
            counts.insert(*pattern, *count);
        }
        areas
    }

    fn hits(area: &str, pattern: Pattern, count: usize) -> Vec<Hit> {
        (1..=count)
            .map(|line| Hit {
                area: area.to_owned(),
                pattern,
                place: format!("{area}/a.rs:{line}"),
            })
            .collect()
    }

    #[test]
    fn areas_are_crates_folders_and_files() {
        assert_eq!(area("crates/host/vmm/src/kvm/vm.rs"), "crates/host/vmm");
        assert_eq!(area("tests/e2e/src/main.rs"), "tests/e2e");
        assert_eq!(area("docs/guides/api.md"), "docs");
        assert_eq!(area("README.md"), "README.md");
    }

    #[test]
    fn a_rise_is_a_finding_and_a_fall_is_none() {
        let allowed = counts(&[("bench", Pattern::What, 2)]);
        let rises = |area, pattern, times| {
            let hits = hits(area, pattern, times);
            rises(&allowed, &count(&Tree::of(&[]), &hits), &hits)
        };
        assert_eq!(rises("bench", Pattern::What, 2), []);
        assert_eq!(rises("bench", Pattern::What, 1), []);
        let findings = rises("bench", Pattern::What, 3);
        assert_eq!(findings.len(), 1);
        assert!(findings[0].message.contains("bench/a.rs:3"));
        // Neither another area nor another pattern has room.
        assert_eq!(rises("xtask", Pattern::What, 1).len(), 1);
        assert_eq!(rises("bench", Pattern::Person, 1).len(), 1);
    }

    #[test]
    fn an_update_lowers_adds_new_areas_and_never_raises() {
        let allowed = counts(&[
            ("bench", Pattern::What, 5),
            ("docs", Pattern::LongLine, 1),
            ("gone", Pattern::What, 1),
        ]);
        let now = counts(&[
            ("bench", Pattern::What, 3),
            ("bench", Pattern::Person, 1),
            ("docs", Pattern::LongLine, 9),
            ("new", Pattern::IsNone, 2),
        ]);
        let expected = counts(&[
            ("bench", Pattern::What, 3),
            ("docs", Pattern::LongLine, 1),
            ("new", Pattern::IsNone, 2),
        ]);
        assert_eq!(lower(&allowed, &now), expected);
    }

    #[test]
    fn a_clean_area_stays_clean() {
        let tree = Tree::of(&[("docs/a.md", "clean")]);
        let clean = count(&tree, &[]);
        assert!(clean["docs"].is_empty());
        let worse = count(&tree, &hits("docs", Pattern::LongLine, 1));
        assert_eq!(lower(&clean, &worse), clean);
    }

    #[test]
    fn the_file_can_be_read_back() {
        let ratchet = Ratchet {
            commits_since: "abc".to_owned(),
            areas: counts(&[("a/b", Pattern::What, 1), ("a/b", Pattern::LongSentence, 2)]),
        };
        let read: Ratchet = toml::from_str(&render(&ratchet)).unwrap();
        assert_eq!(read, ratchet);
    }
}
