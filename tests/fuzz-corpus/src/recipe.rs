//! The parser of recipes. Its text may come from a stranger.

use std::path::Path;

use forkd_image::recipe::{Folder, Recipe};

/// Files that a recipe may name.
const FILES: &[(&str, &[u8])] = &[
    ("file", b"content"),
    (
        "requirements.lock",
        b"a==1 --hash=sha256:0000000000000000000000000000000000000000000000000000000000000000\n",
    ),
    (
        "package-lock.json",
        br#"{"lockfileVersion":3,"packages":{"node_modules/a":{"integrity":"sha512-AA=="}}}"#,
    ),
];

/// A recipe is read or refused. One that is read names nothing outside of its image, and its error is one line.
pub fn recipe(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    match Recipe::parse(text, Path::new("recipe.toml"), &Folder::BuiltIn(FILES)) {
        Ok(recipe) => {
            for file in &recipe.files {
                let inside = file
                    .path
                    .split('/')
                    .all(|part| !matches!(part, "" | "." | ".."));
                assert!(inside, "{:?}", file.path);
            }
            assert!(
                recipe
                    .prepare
                    .services
                    .iter()
                    .all(|one| !one.exec.is_empty())
            );
            assert!(!recipe.fingerprint().is_empty());
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
