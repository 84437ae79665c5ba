//! Secrets: fake VMMs, the real engine and the real broker.

use std::path::Path;

use forkd_api::{
    BranchMode, CreateSandboxes, ErrorCode, ForkRequest, Inject, NetworkPolicy, NetworkRequest,
    PutSecret, UpdateNetwork,
};
use forkd_daemon_tests::{Daemon, Sandbox, until};
use forkd_types::SecretValue;

use crate::{TAG, daemon};

const VALUE: &str = "sk-live-3b9f07c1d2";
const BUNDLE: &str = "/etc/forkd/ca-bundle.pem";

fn secret(value: &str) -> PutSecret {
    PutSecret {
        value: SecretValue::new(value.to_owned()).unwrap(),
    }
}

fn inject(name: &str) -> Inject {
    Inject {
        host: "api.example".into(),
        header: "authorization".into(),
        value: format!("${{secret:{name}}}"),
        env: Some("API_KEY".into()),
    }
}

fn policy(inject: Vec<Inject>) -> NetworkRequest {
    NetworkRequest::Policy(NetworkPolicy {
        mode: "custom".into(),
        rules: vec!["allow api.example:443".into()],
        inject,
        ..NetworkPolicy::default()
    })
}

fn request(inject: Vec<Inject>) -> CreateSandboxes {
    CreateSandboxes {
        snapshot_tag: TAG.to_owned(),
        network: Some(policy(inject)),
        ..CreateSandboxes::default()
    }
}

async fn child(daemon: &Daemon) -> Sandbox {
    let made = daemon
        .client()
        .spawn(&request(vec![inject("key")]))
        .await
        .unwrap();
    Sandbox::running(daemon.client(), &made).remove(0)
}

async fn variable(sandbox: &Sandbox, name: &str) -> String {
    sandbox.run(&["printenv", name]).await.unwrap().stdout
}

/// Every file below a folder that has the text.
fn holding(folder: &Path, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            found.extend(holding(&path, text));
        } else if kind.is_file() {
            let bytes = std::fs::read(&path).unwrap_or_default();
            if bytes
                .windows(text.len())
                .any(|part| part == text.as_bytes())
            {
                found.push(path.display().to_string());
            }
        }
    }
    found
}

#[tokio::test]
async fn a_value_goes_in_and_never_comes_out() {
    let mut daemon = daemon().await;
    let client = daemon.client();
    let missing = client
        .spawn(&request(vec![inject("key")]))
        .await
        .unwrap_err();
    assert_eq!(missing.code(), Some(ErrorCode::SecretNotFound));
    assert!(
        daemon.brokers().is_empty(),
        "a broker without a need for one"
    );
    let info = client.set_secret("key", &secret(VALUE)).await.unwrap();
    assert_eq!(info.name, "key");
    let sandbox = child(&daemon).await;
    assert_eq!(daemon.brokers().len(), 1);
    // The guest has a placeholder and a certificate.
    let placeholder = variable(&sandbox, "API_KEY").await;
    assert!(
        placeholder.starts_with("fkd_") && placeholder.len() == 36,
        "{placeholder}"
    );
    assert_eq!(variable(&sandbox, "SSL_CERT_FILE").await, BUNDLE);
    assert!(
        sandbox
            .read(BUNDLE)
            .await
            .unwrap()
            .contains("BEGIN CERTIFICATE")
    );
    let shown = daemon.client().network(&sandbox.id).await.unwrap();
    assert_eq!(shown.policy.inject, [inject("key")]);
    sandbox.branch("cut", BranchMode::Diff).await.unwrap();
    // Every answer about it, every file and the log.
    let answers = format!(
        "{:?}{:?}{:?}{}",
        daemon.client().secrets().await.unwrap(),
        sandbox.info().await.unwrap(),
        shown,
        daemon.client().metrics().await.unwrap()
    );
    assert!(!answers.contains(VALUE));
    assert_eq!(holding(&daemon.data(), VALUE), Vec::<String>::new());
    assert!(!daemon.log_tail().contains(VALUE));
    // The next daemon has the secret, the placeholder and the broker.
    let broker = daemon.brokers();
    daemon.restart().await;
    let sandbox = Sandbox::new(daemon.client(), &sandbox.id);
    assert_eq!(variable(&sandbox, "API_KEY").await, placeholder);
    assert_eq!(daemon.brokers(), broker);
    daemon.client().delete_secret("key").await.unwrap();
    let gone = daemon.client().delete_secret("key").await.unwrap_err();
    assert_eq!(gone.code(), Some(ErrorCode::SecretNotFound));
    daemon.ends_clean().await;
}

#[tokio::test]
async fn forks_inherit_no_secret_unless_they_ask() {
    let daemon = daemon().await;
    daemon
        .client()
        .set_secret("key", &secret(VALUE))
        .await
        .unwrap();
    let source = child(&daemon).await;
    let plain = source.fork(1).await.unwrap().remove(0);
    let network = daemon.client().network(&plain.id).await.unwrap();
    assert_eq!(
        (network.policy.mode.as_str(), network.policy.inject.len()),
        ("custom", 0)
    );
    assert_eq!(variable(&plain, "API_KEY").await, "");
    let asks = ForkRequest {
        n: 1,
        timeout_secs: None,
        labels: Default::default(),
        freeze: false,
        network: Some(policy(vec![inject("key")])),
    };
    let asked = daemon.client().fork(&source.id, &asks).await.unwrap();
    let asked = Sandbox::running(daemon.client(), &asked).remove(0);
    assert_eq!(
        variable(&asked, "API_KEY").await,
        variable(&source, "API_KEY").await
    );
    daemon.ends_clean().await;
}

#[tokio::test]
async fn injections_change_live_and_a_lost_broker_comes_back() {
    let daemon = daemon().await;
    daemon
        .client()
        .set_secret("key", &secret(VALUE))
        .await
        .unwrap();
    let plain = daemon.child(TAG).await;
    assert_eq!(variable(&plain, "API_KEY").await, "");
    let edit = UpdateNetwork {
        mode: Some("custom".into()),
        inject: Some(vec![inject("key")]),
        ..UpdateNetwork::default()
    };
    daemon
        .client()
        .edit_network(&plain.id, &edit)
        .await
        .unwrap();
    assert!(variable(&plain, "API_KEY").await.starts_with("fkd_"));
    let [first] = daemon.brokers()[..] else {
        panic!("no broker")
    };
    Daemon::kill_process(first);
    until("another broker", async || {
        matches!(daemon.brokers()[..], [other] if other != first).then_some(())
    })
    .await;
    let none = UpdateNetwork {
        inject: Some(Vec::new()),
        ..UpdateNetwork::default()
    };
    let info = daemon
        .client()
        .edit_network(&plain.id, &none)
        .await
        .unwrap();
    assert!(info.policy.inject.is_empty());
    assert_eq!(variable(&plain, "API_KEY").await, "");
    let wrong = UpdateNetwork {
        inject: Some(vec![Inject {
            header: "host".into(),
            ..inject("key")
        }]),
        ..UpdateNetwork::default()
    };
    let refused = daemon
        .client()
        .edit_network(&plain.id, &wrong)
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Some(ErrorCode::PolicyInvalid));
    daemon.ends_clean().await;
}
