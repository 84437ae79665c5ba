//! Prints the report of the probe on this host.

fn main() {
    println!("{:#?}", forkd_probe::probe());
}
