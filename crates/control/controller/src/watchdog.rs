//! The sign of life that systemd wants.

use std::sync::Arc;

use forkd_sandboxes::app::App;
use forkd_sandboxes::health;

/// Tells systemd, as often as it wants to hear it, that the daemon can do its work. One that cannot is silent, and is
/// started again; sandboxes outlive that.
pub async fn keep_watchdog_quiet(app: Arc<App>) {
    let Some(limit) = sd_notify::watchdog_enabled() else {
        return;
    };
    let mut ticks = tokio::time::interval(limit / 3);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = app.stopping.cancelled() => return,
        }
        let problems = health::problems(&app).await;
        if problems.is_empty() {
            let _ = sd_notify::notify(&[sd_notify::NotifyState::Watchdog]);
        } else {
            tracing::error!(problems = problems.join("; "), "not well");
        }
    }
}
