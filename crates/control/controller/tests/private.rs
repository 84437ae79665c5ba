//! Who may read the daemon's files.

mod stand_in;
mod support;

use std::os::unix::fs::{MetadataExt, PermissionsExt};

use forkd_sandboxes::app::App;
use forkd_sandboxes::config::Config;
use rustix::fs::Mode;
use support::Daemon;

#[test]
fn files_are_the_daemons_alone_whatever_the_umask() {
    let root = tempfile::tempdir().unwrap();
    // As in most shells; the daemon inherits it.
    rustix::process::umask(Mode::from_raw_mode(0o022));
    let socket = root.path().join("api.sock");
    let daemon = Daemon::start(root.path(), &["--socket", socket.to_str().unwrap()]);
    let mode = |name: &str| {
        let found = std::fs::symlink_metadata(root.path().join(name)).unwrap();
        found.mode() & 0o777
    };
    assert_eq!(mode("data"), 0o700);
    assert_eq!(mode("data/state.db"), 0o600);
    assert_eq!(mode("data/audit.log"), 0o600);
    assert_eq!(mode("run/vm"), 0o700);
    assert_eq!(mode("run") & 0o066, 0);
    // The group of the socket may use the API.
    assert_eq!(mode("api.sock"), 0o660);
    let (status, _) = daemon.stop();
    assert!(status.success());
}

#[test]
fn a_data_directory_that_others_can_write_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let config = Config::below(root.path());
    std::fs::create_dir(&config.data_dir).unwrap();
    let open = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(&config.data_dir, open).unwrap();
    let error = App::open(config).unwrap_err().to_string();
    assert!(error.contains("other users may write"), "{error}");
}
