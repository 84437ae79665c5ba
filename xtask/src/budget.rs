//! Checks the length of files and functions. Tests are not counted.
//!
//! A file of declarations (a table, a list of flags) may exceed the limit, with a line `// budget: <reason>`
//! near its top. Rust is parsed with `syn`; shell and Python are recognised by indentation.

use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use crate::finding::Finding;
use crate::source::{SourceFile, Tree};

const FILE_LINES: usize = 800;
const FUNCTION_LINES: usize = 120;
/// An exception stands among the first lines, where a reader sees it.
const EXCEPTION_WITHIN: usize = 10;

pub fn check(tree: &Tree) -> anyhow::Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for file in tree.files.iter().filter(|file| !file.is_test_code()) {
        match file.extension() {
            "rs" => findings.extend(check_rust(file)),
            "sh" => findings.extend(check_blocks(file, &shell_functions(&file.text))),
            "py" => findings.extend(check_blocks(file, &python_functions(&file.text))),
            _ => {}
        }
    }
    Ok(findings)
}

/// A named range of lines. Both ends are included and counted from 1.
struct Block {
    name: String,
    first: usize,
    last: usize,
}

impl Block {
    fn lines(&self) -> usize {
        self.last - self.first + 1
    }
}

fn check_rust(file: &SourceFile) -> Vec<Finding> {
    let syntax = match syn::parse_file(&file.text) {
        Ok(syntax) => syntax,
        Err(error) => {
            let line = error.span().start().line;
            return vec![Finding::at(
                &file.path,
                line,
                format!("does not parse: {error}"),
            )];
        }
    };
    let mut functions = Functions::default();
    functions.visit_file(&syntax);
    check_lines(file, file.text.lines().count() - functions.test_lines)
        .into_iter()
        .chain(too_long(file, &functions.blocks))
        .collect()
}

fn check_blocks(file: &SourceFile, blocks: &[Block]) -> Vec<Finding> {
    check_lines(file, file.text.lines().count())
        .into_iter()
        .chain(too_long(file, blocks))
        .collect()
}

fn check_lines(file: &SourceFile, lines: usize) -> Option<Finding> {
    let excused = file.text.lines().take(EXCEPTION_WITHIN).any(|line| {
        line.split_once("budget: ").is_some_and(|(before, reason)| {
            matches!(before.trim(), "//" | "#") && !reason.trim().is_empty()
        })
    });
    (lines > FILE_LINES && !excused).then(|| {
        Finding::in_file(
            &file.path,
            format!("{lines} lines without tests, at most {FILE_LINES}"),
        )
    })
}

fn too_long(file: &SourceFile, blocks: &[Block]) -> Vec<Finding> {
    blocks
        .iter()
        .filter(|block| block.lines() > FUNCTION_LINES)
        .map(|block| {
            let message = format!(
                "function {} has {} lines, at most {FUNCTION_LINES}",
                block.name,
                block.lines()
            );
            Finding::at(&file.path, block.first, message)
        })
        .collect()
}

#[derive(Default)]
struct Functions {
    blocks: Vec<Block>,
    test_lines: usize,
}

impl Functions {
    fn add(&mut self, name: &syn::Ident, signature: &impl Spanned, body: &syn::Block) {
        self.blocks.push(Block {
            name: name.to_string(),
            first: signature.span().start().line,
            last: body.span().end().line,
        });
    }
}

impl<'ast> Visit<'ast> for Functions {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if is_test(&item.attrs) {
            let span = item.span();
            self.test_lines += span.end().line - span.start().line + 1;
        } else {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if !is_test(&item.attrs) {
            self.add(&item.sig.ident, &item.sig, &item.block);
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !is_test(&item.attrs) {
            self.add(&item.sig.ident, &item.sig, &item.block);
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(body) = &item.default {
            self.add(&item.sig.ident, &item.sig, body);
        }
        visit::visit_trait_item_fn(self, item);
    }
}

/// `#[test]`, `#[tokio::test]`, `#[cfg(test)]` and `#[cfg(all(test, …))]`.
pub fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let path = attribute.path();
        if path
            .segments
            .last()
            .is_some_and(|segment| segment.ident == "test")
        {
            return true;
        }
        path.is_ident("cfg")
            && attribute.meta.require_list().is_ok_and(|list| {
                let condition = list.tokens.to_string();
                !condition.contains("not")
                    && condition
                        .split(|c: char| !c.is_alphanumeric())
                        .any(|word| word == "test")
            })
    })
}

/// `name() {` in the first column until the `}` in the first column.
fn shell_functions(text: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut open: Option<Block> = None;
    for (index, line) in text.lines().enumerate() {
        if let Some(name) = line
            .strip_suffix("() {")
            .filter(|name| !name.starts_with(' '))
        {
            open = Some(Block {
                name: name.to_owned(),
                first: index + 1,
                last: index + 1,
            });
        } else if line == "}" {
            blocks.extend(open.take().map(|block| Block {
                last: index + 1,
                ..block
            }));
        }
    }
    blocks
}

/// `def` until the next line that is not indented deeper.
fn python_functions(text: &str) -> Vec<Block> {
    let lines: Vec<&str> = text.lines().collect();
    let indent = |line: &str| line.len() - line.trim_start().len();
    let mut blocks = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let head = line.trim_start();
        let head = head.strip_prefix("async ").unwrap_or(head);
        let Some(rest) = head.strip_prefix("def ") else {
            continue;
        };
        let name = rest.split('(').next().unwrap_or(rest).to_owned();
        let outer = indent(line);
        let mut last = index;
        // The closing line of a long signature has the indentation of the `def` itself.
        for (offset, inner) in lines.iter().enumerate().skip(index + 1) {
            let text = inner.trim();
            if text.is_empty() {
                continue;
            }
            if indent(inner) <= outer && !text.starts_with(')') {
                break;
            }
            last = offset;
        }
        blocks.push(Block {
            name,
            first: index + 1,
            last: last + 1,
        });
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn long_function(lines: usize) -> String {
        format!("fn long() {{\n{}}}\n", "    let _ = 1;\n".repeat(lines - 2))
    }

    fn findings(path: &str, text: &str) -> Vec<Finding> {
        check(&Tree::of(&[(path, text)])).unwrap()
    }

    #[test]
    fn a_function_may_have_exactly_the_budget() {
        assert_eq!(findings("a/src/lib.rs", &long_function(FUNCTION_LINES)), []);
        let over = findings("a/src/lib.rs", &long_function(FUNCTION_LINES + 1));
        assert_eq!(over.len(), 1);
        assert_eq!(over[0].line, Some(1));
        assert!(
            over[0].message.contains("function long has 121 lines"),
            "{}",
            over[0]
        );
    }

    #[test]
    fn methods_are_counted_too() {
        let text = format!(
            "struct S;\nimpl S {{\n{}}}\n",
            long_function(FUNCTION_LINES + 1)
        );
        assert_eq!(findings("a/src/lib.rs", &text).len(), 1);
    }

    #[test]
    fn tests_do_not_count() {
        let long = long_function(FUNCTION_LINES + 1);
        assert_eq!(
            findings(
                "a/src/lib.rs",
                &format!("#[cfg(test)]\nmod tests {{\n{long}}}")
            ),
            []
        );
        assert_eq!(findings("a/src/lib.rs", &format!("#[test]\n{long}")), []);
        assert_eq!(findings("a/tests/long.rs", &long), []);
        assert_eq!(
            findings("a/src/lib.rs", &format!("#[cfg(not(test))]\n{long}")).len(),
            1
        );
    }

    #[test]
    fn a_file_may_have_exactly_the_budget_without_its_tests() {
        let full = "// line\n".repeat(FILE_LINES);
        assert_eq!(findings("a/src/lib.rs", &full), []);
        let with_tests = format!("{full}#[cfg(test)]\nmod tests {{\n\n}}\n");
        assert_eq!(findings("a/src/lib.rs", &with_tests), []);
        assert_eq!(
            findings("a/src/lib.rs", &format!("{full}// one more\n")).len(),
            1
        );
    }

    #[test]
    fn an_exception_needs_a_reason() {
        let body = "// line\n".repeat(FILE_LINES);
        assert_eq!(
            findings("a/src/lib.rs", &format!("// budget: one table\n{body}")),
            []
        );
        assert_eq!(
            findings("a/src/lib.rs", &format!("// budget: \n{body}")).len(),
            1
        );
    }

    #[test]
    fn scripts_have_functions_as_well() {
        let shell = format!(
            "#!/bin/bash\nlong() {{\n{}}}\n",
            "    true\n".repeat(FUNCTION_LINES)
        );
        assert_eq!(findings("scripts/a.sh", &shell).len(), 1);
        let python = format!(
            "def long(\n    a,\n):\n{}x = 1\n",
            "    pass\n\n".repeat(60)
        );
        assert_eq!(findings("a.py", &python).len(), 1);
        assert_eq!(findings("a.py", "def short():\n    pass\n\n\nx = 1\n"), []);
    }

    #[test]
    fn rust_that_does_not_parse_is_a_finding() {
        assert!(
            findings("a/src/lib.rs", "fn (")[0]
                .message
                .starts_with("does not parse")
        );
    }
}
