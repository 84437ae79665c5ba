//! Checks that `unsafe` stands only in the listed places.
//!
//! The sources are parsed with `syn`. In macro calls the keyword alone counts, because the expansion is
//! unknown.

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

use crate::finding::Finding;
use crate::source::{SourceFile, Tree};

/// Folders (with a slash at the end) and files that may contain `unsafe`.
pub const PLACES: [&str; 5] = [
    "crates/host/sys/",
    "crates/host/memory/",
    "crates/host/probe/",
    "crates/host/vmm/src/kvm/",
    "crates/guest/agent/src/sys/",
];

pub fn check(tree: &Tree) -> anyhow::Result<Vec<Finding>> {
    Ok(tree
        .with_extension("rs")
        .filter(|file| !allowed(&file.path))
        .flat_map(check_file)
        .collect())
}

fn allowed(path: &str) -> bool {
    PLACES.iter().any(|place| {
        if place.ends_with('/') {
            path.starts_with(place)
        } else {
            path == *place
        }
    })
}

fn check_file(file: &SourceFile) -> Vec<Finding> {
    // The budget gate reports a file that does not parse.
    let Ok(syntax) = syn::parse_file(&file.text) else {
        return Vec::new();
    };
    let mut seen = Unsafe { lines: Vec::new() };
    seen.visit_file(&syntax);
    seen.lines
        .into_iter()
        .map(|line| {
            Finding::at(
                &file.path,
                line,
                "unsafe outside the places that may have it",
            )
        })
        .collect()
}

struct Unsafe {
    lines: Vec<usize>,
}

impl Unsafe {
    fn keyword(&mut self, token: Option<&syn::token::Unsafe>) {
        self.lines
            .extend(token.map(|token| token.span.start().line));
    }

    fn tokens(&mut self, tokens: &TokenStream) {
        for token in tokens.clone() {
            match token {
                TokenTree::Ident(ident) if ident == "unsafe" => {
                    self.lines.push(ident.span().start().line);
                }
                TokenTree::Group(group) => self.tokens(&group.stream()),
                _ => {}
            }
        }
    }
}

impl<'ast> Visit<'ast> for Unsafe {
    fn visit_expr_unsafe(&mut self, item: &'ast syn::ExprUnsafe) {
        self.keyword(Some(&item.unsafe_token));
        visit::visit_expr_unsafe(self, item);
    }

    fn visit_signature(&mut self, item: &'ast syn::Signature) {
        self.keyword(item.unsafety.as_ref());
        visit::visit_signature(self, item);
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        self.keyword(item.unsafety.as_ref());
        visit::visit_item_impl(self, item);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.keyword(item.unsafety.as_ref());
        visit::visit_item_trait(self, item);
    }

    fn visit_item_foreign_mod(&mut self, item: &'ast syn::ItemForeignMod) {
        self.keyword(item.unsafety.as_ref());
        visit::visit_item_foreign_mod(self, item);
    }

    fn visit_attribute(&mut self, item: &'ast syn::Attribute) {
        if item.path().is_ident("unsafe") {
            self.lines.push(item.pound_token.span.start().line);
        }
        visit::visit_attribute(self, item);
    }

    // The expansion of a macro is unknown, so the keyword alone counts.
    fn visit_macro(&mut self, item: &'ast syn::Macro) {
        self.tokens(&item.tokens);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(path: &str, text: &str) -> Vec<Option<usize>> {
        check(&Tree::of(&[(path, text)]))
            .unwrap()
            .into_iter()
            .map(|f| f.line)
            .collect()
    }

    #[test]
    fn every_form_is_found() {
        for text in [
            "fn f() {\n    unsafe { g() }\n}",
            "struct S;\nunsafe impl Send for S {}",
            "\nunsafe fn f() {}",
            "\nunsafe trait T {}",
            "\nunsafe extern \"C\" { fn f(); }",
            "\n#[unsafe(no_mangle)] fn f() {}",
            "fn f() {\n    m!({ unsafe { g() } })\n}",
        ] {
            assert_eq!(
                lines("crates/control/store/src/lib.rs", text),
                [Some(2)],
                "{text}"
            );
        }
    }

    #[test]
    fn its_places_may_have_it_and_tests_elsewhere_may_not() {
        let text = "fn f() { unsafe { g() } }";
        assert_eq!(lines("crates/host/sys/src/lib.rs", text), []);
        assert_eq!(lines("crates/host/vmm/src/kvm/vm.rs", text), []);
        assert_eq!(lines("crates/guest/agent/src/sys/mod.rs", text), []);
        assert_eq!(lines("crates/host/vmm/src/vcpu.rs", text), [Some(1)]);
        assert_eq!(lines("crates/host/sysfs/src/lib.rs", text), [Some(1)]);
        assert_eq!(lines("crates/control/store/tests/a.rs", text), [Some(1)]);
    }

    #[test]
    fn the_word_in_a_comment_or_string_is_no_finding() {
        assert_eq!(lines("a.rs", "// unsafe\nconst A: &str = \"unsafe\";"), []);
    }
}
