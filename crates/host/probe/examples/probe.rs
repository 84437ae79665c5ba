//! Prints what the probe finds on this host.

fn main() {
    println!("{:#?}", forkd_probe::probe());
}
