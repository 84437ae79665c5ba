//! Directories of forkd, by the rules of the XDG base directory specification.
//!
//! [`Dirs`] has one path each for data, cache and state. Relative paths in XDG variables are ignored, as the
//! specification demands.

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;

use forkd_types::data_dir;

/// The directories in which forkd writes on behalf of a user.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Dirs {
    /// Snapshots and images of a daemon of this user: kept until removed on purpose.
    pub data: PathBuf,
    /// Files that can be built again: machine images, kernels, downloads.
    pub cache: PathBuf,
    /// Run-time state of machines: sockets, logs, data disks.
    pub state: PathBuf,
}

impl Dirs {
    /// The directories of the calling user. `None` if neither an XDG variable nor `HOME` defines one of them.
    #[must_use]
    pub fn of_user() -> Option<Self> {
        let root = rustix::process::geteuid().is_root();
        Self::from_lookup(root, |key| env::var_os(key))
    }

    fn from_lookup(root: bool, lookup: impl Fn(&str) -> Option<OsString>) -> Option<Self> {
        // The specification says that a relative path in an XDG variable is to be ignored.
        let absolute = |key: &str| {
            lookup(key)
                .map(PathBuf::from)
                .filter(|path| path.is_absolute())
        };
        let home = absolute("HOME");
        let pick = |key: &str, under_home: &str| {
            absolute(key)
                .or_else(|| home.as_ref().map(|home| home.join(under_home)))
                .map(|base| base.join("forkd"))
        };
        Some(Self {
            data: data_dir(root, &lookup)?,
            cache: pick("XDG_CACHE_HOME", ".cache")?,
            state: pick("XDG_STATE_HOME", ".local/state")?,
        })
    }
}

/// The path in an environment variable. An empty variable counts as unset.
pub(crate) fn named(key: &str) -> Option<PathBuf> {
    env::var_os(key)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lookup<'a>(pairs: &'a [(&str, &str)]) -> impl Fn(&str) -> Option<OsString> + 'a {
        move |key| {
            let found = pairs.iter().find(|(k, _)| *k == key)?;
            Some(found.1.into())
        }
    }

    #[test]
    fn home_is_the_fallback() {
        let dirs = Dirs::from_lookup(false, lookup(&[("HOME", "/home/a")])).unwrap();
        assert_eq!(dirs.state, PathBuf::from("/home/a/.local/state/forkd"));
        assert_eq!(dirs.cache, PathBuf::from("/home/a/.cache/forkd"));
        assert_eq!(dirs.data, PathBuf::from("/home/a/.local/share/forkd"));
    }

    #[test]
    fn variables_win_and_relative_ones_do_not_count() {
        let dirs = Dirs::from_lookup(
            false,
            lookup(&[
                ("HOME", "/home/a"),
                ("XDG_STATE_HOME", "/s"),
                ("XDG_CACHE_HOME", "relative"),
            ]),
        )
        .unwrap();
        assert_eq!(dirs.state, PathBuf::from("/s/forkd"));
        assert_eq!(dirs.cache, PathBuf::from("/home/a/.cache/forkd"));
    }

    #[test]
    fn nothing_known_is_not_guessed() {
        assert_eq!(Dirs::from_lookup(false, lookup(&[])), None);
    }
}
