//! For tests that need a facility which not every supported host has.

/// Names the facilities of a host whose tests are left out, separated by spaces.
const WITHOUT: &str = "FORKD_TEST_WITHOUT";

/// Called by a test that finds its facility missing. A test that cannot test anything fails, unless the person who runs it
/// has named the facility in `FORKD_TEST_WITHOUT`.
///
/// # Panics
///
/// Panics when the variable does not name the facility.
pub fn leave_out(facility: &str) {
    let named = std::env::var(WITHOUT).unwrap_or_default();
    assert!(
        named.split(' ').any(|word| word == facility),
        "this host has no {facility}: set {WITHOUT}={facility} to leave these tests out"
    );
    eprintln!("left out: this host has no {facility}");
}
