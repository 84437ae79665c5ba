//! Arguments of `forkd bench`.

use clap::Args;

/// Arguments of `forkd bench`.
#[derive(Debug, Args)]
#[command(
    disable_help_flag = true,
    after_help = "Examples:\n  \
    forkd bench primitives                the fork path alone, on any /dev/kvm\n  \
    forkd bench fork --n 1,10 --json      children of a warm Python parent\n  \
    forkd bench branch --dirty 8M         the pause of a branched sandbox\n  \
    forkd bench --help                    every benchmark and its flags"
)]
pub struct BenchArgs {
    /// Benchmark and its flags
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "BENCHMARK"
    )]
    pub args: Vec<String>,
}
