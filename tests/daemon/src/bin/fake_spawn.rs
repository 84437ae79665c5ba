//! Starts fake VMMs, in place of `forkd-spawn`.

use std::path::PathBuf;

use anyhow::{Context, bail};

fn main() -> anyhow::Result<()> {
    let mut args = std::env::args_os();
    let program = PathBuf::from(args.next().context("a program has a name")?);
    let socket = match (args.next(), args.next()) {
        (Some(option), Some(path)) if option == "--socket" => PathBuf::from(path),
        _ => bail!("usage: fake-spawn --socket PATH"),
    };
    forkd_daemon_tests::fake::spawn(&socket, &program.with_file_name("forkd-vmm"))
}
