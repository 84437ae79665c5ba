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
