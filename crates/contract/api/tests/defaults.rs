//! Defaults of Rust types equal the defaults of missing JSON fields.

use forkd_api::{BranchRequest, CreateSandboxes, CreateSnapshot, ExecRequest};
use serde::de::DeserializeOwned;

fn read<T: DeserializeOwned>(json: &str) -> T {
    serde_json::from_str(json).unwrap()
}

#[test]
fn a_default_is_the_shortest_request() {
    assert_eq!(CreateSandboxes::default(), read(r#"{"snapshot_tag": ""}"#));
    assert_eq!(CreateSnapshot::default(), read(r#"{"tag": ""}"#));
    assert_eq!(BranchRequest::default(), read("{}"));
    assert_eq!(ExecRequest::default(), read(r#"{"args": []}"#));
}
