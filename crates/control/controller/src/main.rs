//! The program `forkd-controller`, the daemon.

fn main() -> std::process::ExitCode {
    forkd_controller::program::main()
}
