//! The program `forkd-gateway`.

fn main() -> std::process::ExitCode {
    forkd_gateway::main()
}
