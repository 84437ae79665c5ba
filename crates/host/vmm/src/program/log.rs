//! Lines on standard error.

/// Writes what the program has to say to standard error, one line each.
pub fn init() {
    // A second call, as in tests, changes nothing.
    let _ = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_max_level(tracing::Level::INFO)
        .with_ansi(false)
        .with_target(false)
        // It would print, and panic, where the line itself could not be written: on a full disk.
        .log_internal_errors(false)
        .try_init();
}
