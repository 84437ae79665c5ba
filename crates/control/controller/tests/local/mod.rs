//! The daemon in this process, without VMs.

use std::path::Path;
use std::sync::Arc;

use forkd_sandboxes::app::App;
use forkd_sandboxes::config::Config;

/// A daemon with everything below one directory.
pub fn app(root: &Path) -> Arc<App> {
    let config = Config {
        max_sandboxes: 100,
        max_sandboxes_per_token: 100,
        pool: 8,
        ..Config::below(root)
    };
    App::open(config).unwrap().0
}
