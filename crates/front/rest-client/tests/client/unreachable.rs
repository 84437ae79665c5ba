//! Connections that fail.

use std::io;
use std::path::PathBuf;

use forkd_rest_client::{Client, Error, Target};

async fn kind(target: &Target) -> io::ErrorKind {
    let client = Client::new(target, None).unwrap();
    match client.version().await {
        Err(Error::Unreachable { source, .. }) => {
            let error = source.downcast_ref::<io::Error>();
            error.unwrap_or_else(|| panic!("{source:?}")).kind()
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn what_the_system_says_keeps_its_kind() {
    let nowhere = Target::Unix(PathBuf::from("/nonexistent/forkd.sock"));
    assert_eq!(kind(&nowhere).await, io::ErrorKind::NotFound);
    let closed = "http://127.0.0.1:1".parse().unwrap();
    assert_eq!(kind(&closed).await, io::ErrorKind::ConnectionRefused);
}

#[test]
fn a_closed_door_is_told_from_an_empty_house() {
    let unreachable = |kind: io::ErrorKind| Error::Unreachable {
        target: "unix:///run/forkd/forkd.sock".into(),
        source: Box::new(io::Error::from(kind)),
    };
    assert!(unreachable(io::ErrorKind::PermissionDenied).is_forbidden());
    assert!(!unreachable(io::ErrorKind::ConnectionRefused).is_forbidden());
}
