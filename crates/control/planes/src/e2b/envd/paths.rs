//! Paths as clients write them: absolute, relative to the home of the user, or with `~`.

use super::users::User;

/// The longest path.
const MAX_PATH: usize = 4096;

/// An absolute path without `.` and `..`; none if the text cannot be a path.
pub fn resolve(text: &str, user: &User) -> Option<String> {
    if text.len() > MAX_PATH || text.contains('\0') {
        return None;
    }
    let whole = match text.strip_prefix('~') {
        Some("") => user.home.clone(),
        Some(rest) if rest.starts_with('/') => format!("{}{rest}", user.home),
        // The home of another user.
        Some(_) => return None,
        None if text.starts_with('/') => text.to_owned(),
        None => format!("{}/{text}", user.home),
    };
    Some(clean(&whole))
}

/// Removes `.`, `..` and double slashes from an absolute path.
pub fn clean(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    format!("/{}", parts.join("/"))
}

/// The last part of a path; `/` for the root.
pub fn name(path: &str) -> String {
    let name = path.rsplit('/').next().unwrap_or_default();
    if name.is_empty() { "/" } else { name }.to_owned()
}

/// The directory of a path.
pub fn parent(path: &str) -> &str {
    match path.rsplit_once('/') {
        Some(("", _)) | None => "/",
        Some((parent, _)) => parent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_those_of_the_user() {
        let user = User {
            name: "user".into(),
            home: "/home/user".into(),
        };
        for (text, expected) in [
            ("/a/../b//c/.", Some("/b/c")),
            ("x/y", Some("/home/user/x/y")),
            ("~", Some("/home/user")),
            ("~/x", Some("/home/user/x")),
            ("", Some("/home/user")),
            ("../../../..", Some("/")),
            ("~other/x", None),
            ("a\0b", None),
        ] {
            assert_eq!(resolve(text, &user).as_deref(), expected, "{text:?}");
        }
        assert_eq!((name("/a/b"), name("/")), ("b".into(), "/".into()));
        assert_eq!((parent("/a/b"), parent("/a")), ("/a", "/"));
    }
}
