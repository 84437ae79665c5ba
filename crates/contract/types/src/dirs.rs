//! The default data directory of a daemon.

use std::ffi::OsString;
use std::path::PathBuf;

/// Of a daemon that runs as root.
const OF_ROOT: &str = "/var/lib/forkd";

/// The directory for a daemon of root, or of the user with these variables. `None` when they do not say where.
#[must_use]
pub fn data_dir(root: bool, variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    if root {
        return Some(OF_ROOT.into());
    }
    // The XDG specification says that a relative path is to be ignored.
    let absolute = |key: &str| {
        variable(key)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    absolute("XDG_DATA_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".local/share")))
        .map(|base| base.join("forkd"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_user(pairs: &[(&str, &str)]) -> Option<PathBuf> {
        data_dir(false, |key| {
            let found = pairs.iter().find(|(name, _)| *name == key)?;
            Some(found.1.into())
        })
    }

    #[test]
    fn root_has_a_place_of_its_own() {
        assert_eq!(data_dir(true, |_| None), Some("/var/lib/forkd".into()));
    }

    #[test]
    fn a_user_has_the_one_that_the_variables_say() {
        let home = ("HOME", "/home/a");
        let at_home = Some("/home/a/.local/share/forkd".into());
        assert_eq!(of_user(&[home]), at_home);
        assert_eq!(
            of_user(&[home, ("XDG_DATA_HOME", "/d")]),
            Some("/d/forkd".into())
        );
        assert_eq!(of_user(&[home, ("XDG_DATA_HOME", "")]), at_home);
        assert_eq!(of_user(&[home, ("XDG_DATA_HOME", "d")]), at_home);
        assert_eq!(of_user(&[("HOME", "")]), None);
    }
}
