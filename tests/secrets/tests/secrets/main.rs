//! Secrets between real processes.

mod broker;
#[path = "../../../../crates/host/net/tests/engine/namespaces.rs"]
#[expect(dead_code, reason = "the tests of the engine need more of it")]
mod namespaces;
#[path = "../../../../crates/host/net/tests/engine/rig.rs"]
#[expect(dead_code, reason = "the tests of the engine need more of it")]
mod rig;
mod world;

/// The program that the rig starts.
const ENGINE: &str = env!("CARGO_BIN_EXE_net-with-secrets");
