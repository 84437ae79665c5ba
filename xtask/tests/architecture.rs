//! `ARCHITECTURE.md` against the code.

use std::fs;
use std::path::{Path, PathBuf};

use syn::visit::Visit;

/// More functions than this are too many to read for one operation.
const MOST: usize = 24;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Files and functions of the table below a heading.
fn table(text: &str, heading: &str) -> Vec<(String, String)> {
    let below = text.lines().skip_while(|line| *line != heading);
    let rows = below
        .skip_while(|line| !line.starts_with("|---"))
        .skip(1)
        .take_while(|line| line.starts_with('|'));
    let words = |cell: &str| -> Vec<String> {
        let quoted = cell.split('`').skip(1).step_by(2);
        quoted.map(str::to_owned).collect()
    };
    rows.flat_map(|row| {
        let cells: Vec<&str> = row.split('|').collect();
        let file = words(cells[1]).remove(0);
        let functions = words(cells[2]);
        functions
            .into_iter()
            .map(move |function| (file.clone(), function))
    })
    .collect()
}

/// The names of all functions of a file.
#[derive(Default)]
struct Names(Vec<String>);

impl<'ast> Visit<'ast> for Names {
    fn visit_signature(&mut self, signature: &'ast syn::Signature) {
        self.0.push(signature.ident.to_string());
    }
}

#[test]
fn a_live_fork_is_short_and_its_functions_exist() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let listed = table(&text, "### Live fork, function by function");
    assert!((20..=MOST).contains(&listed.len()), "{}", listed.len());
    for (file, function) in listed {
        let path = root().join("crates/control").join(&file);
        let source = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{file}: {error}"));
        let mut names = Names::default();
        names.visit_file(&syn::parse_file(&source).unwrap());
        assert!(names.0.contains(&function), "{file} has no {function}");
    }
}

/// The names of the entries of a folder that `wanted` accepts.
fn names(folder: &Path, wanted: impl Fn(&Path) -> bool) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let mut names: Vec<String> = entries
        .filter(|entry| wanted(&entry.path()))
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn is_page(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "md")
}

#[test]
fn every_decision_and_crate_is_listed() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let mut missing = names(&root().join("docs/decisions"), is_page);
    missing.retain(|name| !text.contains(&format!("](docs/decisions/{name})")));
    let crates = names(&root().join("crates"), Path::is_dir);
    for group in crates {
        let prefix = format!("crates/{group}/");
        let row = text.lines().find(|line| line.starts_with(&prefix)).unwrap();
        let listed: Vec<&str> = row.split_whitespace().collect();
        let mut unlisted = names(&root().join(&prefix), Path::is_dir);
        unlisted.retain(|name| !listed.contains(&name.as_str()));
        missing.extend(unlisted.into_iter().map(|name| prefix.clone() + &name));
    }
    assert!(missing.is_empty(), "not in ARCHITECTURE.md: {missing:?}");
}

#[test]
fn every_guide_is_linked_from_the_readme() {
    let text = fs::read_to_string(root().join("README.md")).unwrap();
    let mut missing = Vec::new();
    for folder in ["docs", "docs/guides"] {
        let pages = names(&root().join(folder), is_page);
        missing.extend(pages.into_iter().map(|name| format!("{folder}/{name}")));
    }
    // CONTRIBUTING.md links the rules for text.
    missing.retain(|page| !text.contains(&format!("]({page})")) && page != "docs/style.md");
    assert!(missing.is_empty(), "not in README.md: {missing:?}");
}
