//! Compiles the Node.js add-on that the agent carries in itself.
//!
//! The add-on is a shared object and the agent a static program, so one crate cannot be both. The add-on needs nothing
//! but `core`; the flags of the agent (static linking) do not apply to it.

use std::env;
use std::path::PathBuf;
use std::process::Command;

const SOURCE: &str = "src/sys/node_addon.rs";

fn main() {
    println!("cargo:rerun-if-changed={SOURCE}");
    let target = env::var("TARGET").unwrap_or_default();
    let output = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default()).join("reseed.node");
    let mut rustc = Command::new(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    rustc
        .args([
            "--edition",
            "2024",
            "--crate-type",
            "cdylib",
            "--crate-name",
            "node_addon",
        ])
        .args(["--target", &target])
        .args([
            "-C",
            "panic=abort",
            "-C",
            "opt-level=s",
            "-C",
            "strip=symbols",
        ])
        .args(["-C", "link-arg=-nostdlib"])
        .arg("-o")
        .arg(&output)
        .arg(SOURCE);
    if let Some(linker) = env::var_os("RUSTC_LINKER") {
        let mut option = std::ffi::OsString::from("linker=");
        option.push(linker);
        rustc.arg("-C").arg(option);
    }
    match rustc.status() {
        Ok(status) if status.success() => {}
        other => {
            eprintln!("cannot compile {SOURCE}: {other:?}");
            std::process::exit(1);
        }
    }
}
