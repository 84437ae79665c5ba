//! The reference of the REST API lists every route and every error code.

use std::collections::BTreeSet;

use forkd_api::{ErrorCode, routes};

const GUIDE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/guides/api.md");

/// The code spans of a line.
fn spans(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// The routes in the rows of tables. `…/` in a row stands for the first route of the row, with or without its last part.
fn listed(guide: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for row in guide.lines().filter(|line| line.starts_with("| `/")) {
        let first = spans(row).next().unwrap_or_default();
        let folder = first.rsplit_once('/').map_or("", |(folder, _)| folder);
        for span in spans(row) {
            match span.strip_prefix('…') {
                Some(rest) => found.extend([first, folder].map(|begin| format!("{begin}{rest}"))),
                None => drop(found.insert(span.to_owned())),
            }
        }
    }
    found
}

#[test]
fn every_route_and_every_code_is_described() {
    let guide = std::fs::read_to_string(GUIDE).unwrap();
    let listed = listed(&guide);
    let missing = routes::ALL
        .iter()
        .copied()
        .filter(|route| !listed.contains(*route));
    assert_eq!(missing.collect::<Vec<_>>(), [""; 0]);
    let rows: String = guide
        .lines()
        .filter(|line| line.starts_with("| `"))
        .collect();
    let missing = ErrorCode::ALL
        .iter()
        .map(|code| code.as_str())
        .filter(|code| !rows.contains(&format!("`{code}`")));
    assert_eq!(missing.collect::<Vec<_>>(), [""; 0]);
}
