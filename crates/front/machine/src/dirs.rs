//! Where forkd keeps its files, after the XDG base directory rules.

use std::env;
use std::path::PathBuf;

/// The four places forkd writes to on behalf of a user.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Dirs {
    /// Snapshots and images: kept until removed on purpose.
    pub data: PathBuf,
    /// What can be built again: machine images, kernels, downloads.
    pub cache: PathBuf,
    /// Run-time state of machines: sockets, logs, data disks.
    pub state: PathBuf,
    /// What the user writes: tokens, defaults.
    pub config: PathBuf,
}

impl Dirs {
    /// The directories of the calling user. `None` when neither an XDG variable nor `HOME` says
    /// where one of them should be.
    #[must_use]
    pub fn of_user() -> Option<Self> {
        Self::from_lookup(|key| env::var_os(key).map(PathBuf::from))
    }

    fn from_lookup(lookup: impl Fn(&str) -> Option<PathBuf>) -> Option<Self> {
        // The specification says that a relative path in an XDG variable is to be ignored.
        let absolute = |key: &str| lookup(key).filter(|path| path.is_absolute());
        let home = absolute("HOME");
        let pick = |key: &str, under_home: &str| {
            absolute(key)
                .or_else(|| home.as_ref().map(|home| home.join(under_home)))
                .map(|base| base.join("forkd"))
        };
        Some(Self {
            data: pick("XDG_DATA_HOME", ".local/share")?,
            cache: pick("XDG_CACHE_HOME", ".cache")?,
            state: pick("XDG_STATE_HOME", ".local/state")?,
            config: pick("XDG_CONFIG_HOME", ".config")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lookup<'a>(pairs: &'a [(&str, &str)]) -> impl Fn(&str) -> Option<PathBuf> + 'a {
        move |key| {
            pairs
                .iter()
                .find(|(k, _)| *k == key)
                .map(|(_, v)| PathBuf::from(v))
        }
    }

    #[test]
    fn home_is_the_fallback() {
        let dirs = Dirs::from_lookup(lookup(&[("HOME", "/home/a")])).unwrap();
        assert_eq!(dirs.state, PathBuf::from("/home/a/.local/state/forkd"));
        assert_eq!(dirs.cache, PathBuf::from("/home/a/.cache/forkd"));
    }

    #[test]
    fn variables_win_and_relative_ones_do_not_count() {
        let dirs = Dirs::from_lookup(lookup(&[
            ("HOME", "/home/a"),
            ("XDG_STATE_HOME", "/s"),
            ("XDG_CACHE_HOME", "relative"),
        ]))
        .unwrap();
        assert_eq!(dirs.state, PathBuf::from("/s/forkd"));
        assert_eq!(dirs.cache, PathBuf::from("/home/a/.cache/forkd"));
    }

    #[test]
    fn nothing_known_is_not_guessed() {
        assert_eq!(Dirs::from_lookup(lookup(&[])), None);
    }
}
