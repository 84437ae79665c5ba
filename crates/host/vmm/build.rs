//! Compiles the system call filters, so that a mistake in them is a mistake at build time.

use std::error::Error;
use std::fs;
use std::path::Path;

use seccompiler::{TargetArch, compile_from_json};

const FILTERS: &str = "../../../resources/seccomp/forkd-vmm.json";
const KILL: &str = r#""mismatch_action": "kill_process""#;
const TRAP: &str = r#""mismatch_action": "trap""#;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed={FILTERS}");
    println!("cargo::rerun-if-changed=build.rs");
    let arch: TargetArch = std::env::var("CARGO_CFG_TARGET_ARCH")?
        .as_str()
        .try_into()?;
    let mut filters = fs::read_to_string(FILTERS)?;
    // In a debug build a forbidden call is named before the process ends.
    if std::env::var("PROFILE")? != "release" {
        filters = filters.replace(KILL, TRAP);
    }
    let programs = compile_from_json(filters.as_bytes(), arch)?;
    let out = std::env::var("OUT_DIR")?;
    for (thread, program) in programs {
        let mut bytes = Vec::with_capacity(program.len() * 8);
        for step in program {
            bytes.extend(step.code.to_le_bytes());
            bytes.extend([step.jt, step.jf]);
            bytes.extend(step.k.to_le_bytes());
        }
        fs::write(Path::new(&out).join(format!("{thread}.bpf")), bytes)?;
    }
    Ok(())
}
