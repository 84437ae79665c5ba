//! The recipes that are compiled into the program, with the files beside them.

/// A recipe of the program.
#[derive(Debug)]
pub struct BuiltIn {
    pub name: &'static str,
    pub text: &'static str,
    /// The other files of its folder.
    pub files: &'static [(&'static str, &'static [u8])],
}

/// `recipe!("name", "file", …)`: the recipe in `recipes/name`, with the files that it names.
macro_rules! recipe {
    ($name:literal $(, $file:literal)*) => {
        BuiltIn {
            name: $name,
            text: include_str!(concat!("../../../../../recipes/", $name, "/recipe.toml")),
            files: &[$(($file, include_bytes!(concat!("../../../../../recipes/", $name, "/", $file)))),*],
        }
    };
}

pub const ALL: &[BuiltIn] = &[
    recipe!("python-numpy"),
    recipe!("code-interpreter", "requirements.lock", "package-lock.json"),
    recipe!("jupyter-kernel", "kernel.py"),
    recipe!("coding-agent", "requirements.lock"),
    recipe!("nodejs", "check.js"),
    recipe!(
        "playwright",
        "package-lock.json",
        "browser.js",
        "check.js",
        "page.html"
    ),
    recipe!("postgres", "fixture.sql", "check.sh"),
    recipe!("machine"),
];

/// Names that recipes had in forkd 0.5.
const ALIASES: [(&str, &str); 3] = [
    ("e2b-codeinterpreter", "code-interpreter"),
    ("playwright-browser", "playwright"),
    ("postgres-fixture", "postgres"),
];

/// The recipe of a name or of an earlier name.
pub fn find(name: &str) -> Option<&'static BuiltIn> {
    let name = ALIASES
        .iter()
        .find(|(alias, _)| *alias == name)
        .map_or(name, |(_, name)| name);
    ALL.iter().find(|one| one.name == name)
}
