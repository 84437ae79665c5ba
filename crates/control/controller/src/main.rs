//! `forkd-controller`.

fn main() -> std::process::ExitCode {
    forkd_controller::program::main()
}
