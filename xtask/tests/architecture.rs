//! `ARCHITECTURE.md` against the code.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use syn::visit::Visit;

/// More functions than this are too many to read for one operation.
const MOST: usize = 24;
/// A helper of at most this many statements need not be listed.
const SMALL: usize = 10;
/// Functions that the listed ones call for other operations: adoption, suspend, sandboxes whose VM has failed, and the
/// other requests to an owner.
const OTHER_WAYS: [&str; 9] = [
    "adopt",
    "lost",
    "release",
    "fail",
    "suspends",
    "serve_failed",
    "change",
    "counters",
    "update",
];

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

/// A function, as far as this test needs it.
#[derive(Debug, Default, Clone)]
struct Function {
    /// Statements, those in blocks and closures included.
    statements: usize,
    /// Called functions: the module that the call names, if any, and the name.
    calls: BTreeSet<(Option<String>, String)>,
}

impl Function {
    fn of(body: &syn::Block) -> Self {
        let mut function = Self::default();
        function.visit_block(body);
        function
    }
}

impl<'ast> Visit<'ast> for Function {
    fn visit_stmt(&mut self, statement: &'ast syn::Stmt) {
        self.statements += 1;
        syn::visit::visit_stmt(self, statement);
    }

    /// A function may be called or handed on by its path.
    fn visit_expr_path(&mut self, path: &'ast syn::ExprPath) {
        let mut names = path.path.segments.iter().rev();
        let mut next = || names.next().map(|segment| segment.ident.to_string());
        if let Some(name) = next() {
            self.calls.insert((next().filter(|of| of != "Self"), name));
        }
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        self.calls.insert((None, call.method.to_string()));
        syn::visit::visit_expr_method_call(self, call);
    }

    /// `select!` and `join!` have expressions of their own grammar: every name before a bracket counts as a call.
    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        let text = call.tokens.to_string();
        for part in text.split('(') {
            let name = part
                .trim_end()
                .rsplit(|c: char| !c.is_alphanumeric() && c != '_');
            self.calls
                .extend(name.take(1).map(|name| (None, name.to_owned())));
        }
    }
}

/// The functions of a file by name; tests are not among them.
#[derive(Default)]
struct Functions(BTreeMap<String, Function>);

impl<'ast> Visit<'ast> for Functions {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.0
            .insert(item.sig.ident.to_string(), Function::of(&item.block));
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.0
            .insert(item.sig.ident.to_string(), Function::of(&item.block));
    }

    fn visit_item_mod(&mut self, _tests: &'ast syn::ItemMod) {}
}

/// The module of a file: its own name, or that of its folder.
fn module(file: &str) -> String {
    let path = Path::new(file);
    let named = match path.file_stem() {
        Some(stem) if stem != "mod" => Some(stem),
        _ => path.parent().and_then(Path::file_name),
    };
    named.unwrap().to_string_lossy().into_owned()
}

#[test]
fn a_live_fork_is_short_and_no_large_function_is_left_out() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let listed = table(&text, "### Live fork, function by function");
    assert!((20..=MOST).contains(&listed.len()), "{}", listed.len());
    let mut files: BTreeMap<String, BTreeMap<String, Function>> = BTreeMap::new();
    for (file, _) in &listed {
        let path = root().join("crates/control").join(file);
        let source = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{file}: {error}"));
        let mut functions = Functions::default();
        functions.visit_file(&syn::parse_file(&source).unwrap());
        files.insert(file.clone(), functions.0);
    }
    let mut waiting = listed.clone();
    let mut seen: BTreeSet<(String, String)> = listed.iter().cloned().collect();
    let mut large = Vec::new();
    while let Some((file, name)) = waiting.pop() {
        let function = files[&file].get(&name);
        let function = function.unwrap_or_else(|| panic!("{file} has no {name}"));
        for (of, called) in &function.calls {
            // A method belongs to this file if it has one of that name; a path names its module.
            let found = files.iter().find(|(other, functions)| {
                let here = match of {
                    Some(of) => module(other) == *of,
                    None => **other == file,
                };
                here && functions.contains_key(called)
            });
            let Some((other, functions)) = found else {
                continue;
            };
            let step = (other.clone(), called.clone());
            if OTHER_WAYS.contains(&called.as_str()) || !seen.insert(step.clone()) {
                continue;
            }
            let statements = functions[called].statements;
            if statements > SMALL {
                large.push(format!("{other}: {called} has {statements} statements"));
            }
            waiting.push(step);
        }
    }
    assert!(large.is_empty(), "not listed: {large:#?}");
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
