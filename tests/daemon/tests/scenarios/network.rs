//! The network of sandboxes: fake VMMs, the real engine, and a server on the loopback interface of the test.

use std::net::{Ipv4Addr, TcpListener};
use std::time::{Duration, Instant};

use forkd_api::{
    CreateSandboxes, ErrorCode, EventKind, ForkRequest, NetworkLimits, NetworkPolicy,
    NetworkRequest, UpdateNetwork, UpdateSandbox,
};
use forkd_daemon_tests::fake::{Fault, Step};
use forkd_daemon_tests::{Daemon, Options, Sandbox, until};

use crate::{TAG, daemon, daemon_with};

const HOST: Ipv4Addr = Ipv4Addr::LOCALHOST;

/// A server that accepts connections and never reads.
struct Server {
    listener: TcpListener,
}

impl Server {
    fn start() -> Self {
        let listener = TcpListener::bind((HOST, 0)).unwrap();
        Self { listener }
    }

    fn port(&self) -> u16 {
        self.listener.local_addr().unwrap().port()
    }

    /// A policy that opens this server and nothing else.
    fn policy(&self) -> NetworkRequest {
        custom(&[&format!("allow host:{}", self.port())])
    }
}

fn custom(rules: &[&str]) -> NetworkRequest {
    NetworkRequest::Policy(NetworkPolicy {
        mode: "custom".into(),
        rules: rules.iter().map(ToString::to_string).collect(),
        ..NetworkPolicy::default()
    })
}

async fn child(daemon: &Daemon, network: Option<NetworkRequest>) -> Sandbox {
    let request = CreateSandboxes {
        snapshot_tag: TAG.to_owned(),
        network,
        ..CreateSandboxes::default()
    };
    let made = daemon.client().spawn(&request).await.unwrap();
    Sandbox::running(daemon.client(), &made).remove(0)
}

/// How the network answers to a segment of the guest: `open`, `reset`, `silent` or `unplugged`.
async fn send(sandbox: &Sandbox, word: &str, port: u16) -> String {
    let (host, port) = (HOST.to_string(), port.to_string());
    let done = sandbox.run(&[word, &host, &port]).await.unwrap();
    done.stdout.trim().to_owned()
}

#[tokio::test]
async fn a_policy_decides_what_a_guest_reaches() {
    let daemon = daemon().await;
    let server = Server::start();
    let closed = child(&daemon, None).await;
    assert_eq!(closed.info().await.unwrap().network.mode, "none");
    assert_eq!(send(&closed, "knock", server.port()).await, "reset");
    let open = child(&daemon, Some(server.policy())).await;
    assert_eq!(send(&open, "knock", server.port()).await, "open");
    // The host needs a rule that names it.
    let public = child(&daemon, Some(NetworkRequest::Mode("public".into()))).await;
    assert_eq!(send(&public, "knock", server.port()).await, "reset");
    let info = daemon.client().network(&public.id).await.unwrap();
    assert!(info.attached);
    assert_eq!((info.counters.denied, info.counters.flows), (1, 0));
    let mut log = daemon
        .client()
        .network_log(&public.id, false)
        .await
        .unwrap();
    let entry = log.next().await.unwrap().unwrap();
    assert_eq!(
        (entry.verdict.as_str(), entry.reason.as_str()),
        ("denied", "the group host")
    );
    assert!(log.next().await.unwrap().is_none());
    let flows = daemon.client().network_flows(&open.id).await.unwrap();
    assert_eq!(flows[0].port, server.port());
    daemon.client().reset_network(&open.id).await.unwrap();
    assert_eq!(send(&open, "resume", server.port()).await, "reset");
    daemon.ends_clean().await;
    assert_eq!(daemon.engine_sandboxes().await, 0);
}

#[tokio::test]
async fn a_change_is_in_force_at_once_and_survives_the_daemon() {
    let mut daemon = daemon().await;
    let server = Server::start();
    let sandbox = child(&daemon, Some(server.policy())).await;
    assert_eq!(send(&sandbox, "knock", server.port()).await, "open");
    let none = UpdateSandbox {
        network: Some(NetworkRequest::Mode("none".into())),
        ..UpdateSandbox::default()
    };
    let info = daemon.client().update(&sandbox.id, &none).await.unwrap();
    assert_eq!(info.network.mode, "none");
    // The open connection was reset before the answer.
    let network = daemon.client().network(&sandbox.id).await.unwrap();
    assert_eq!((network.open_flows, network.generation), (0, 2));
    daemon.restart().await;
    let sandbox = Sandbox::new(daemon.client(), &sandbox.id);
    assert_eq!(sandbox.info().await.unwrap().network.mode, "none");
    assert_eq!(send(&sandbox, "knock", server.port()).await, "reset");
    let edit = UpdateNetwork {
        mode: Some("custom".into()),
        add: vec![format!("allow host:{}", server.port())],
        ..UpdateNetwork::default()
    };
    let network = daemon
        .client()
        .edit_network(&sandbox.id, &edit)
        .await
        .unwrap();
    assert_eq!((network.policy.rules.len(), network.generation), (1, 3));
    assert_eq!(send(&sandbox, "knock", server.port()).await, "open");
    daemon.ends_clean().await;
}

#[tokio::test]
async fn connections_survive_the_daemon_and_not_the_engine() {
    let mut daemon = daemon().await;
    let server = Server::start();
    let sandboxes = [
        child(&daemon, Some(server.policy())).await,
        child(&daemon, Some(server.policy())).await,
    ];
    for sandbox in &sandboxes {
        assert_eq!(send(sandbox, "knock", server.port()).await, "open");
    }
    let engine = daemon.engines();
    daemon.restart().await;
    assert_eq!(daemon.engines(), engine, "the engine is adopted");
    for sandbox in &sandboxes {
        let info = daemon.client().network(&sandbox.id).await.unwrap();
        assert_eq!((info.attached, info.open_flows), (true, 1));
    }
    daemon.kill_engine();
    let killed = Instant::now();
    for sandbox in &sandboxes {
        let sandbox = Sandbox::new(daemon.client(), &sandbox.id);
        until("the sandbox is attached again", async || {
            let info = daemon.client().network(&sandbox.id).await.ok()?;
            info.attached.then_some(())
        })
        .await;
        assert_eq!(send(&sandbox, "resume", server.port()).await, "reset");
        assert_eq!(send(&sandbox, "knock", server.port()).await, "open");
    }
    println!("back after {:?}", killed.elapsed());
    assert_ne!(daemon.engines(), engine);
    daemon.ends_clean().await;
}

/// How often the guest broke its connections.
async fn resets(sandbox: &Sandbox) -> usize {
    let done = sandbox.run(&["cat", "/run/resets"]).await.unwrap();
    done.stdout.trim().len()
}

#[tokio::test]
async fn guests_break_connections_that_ended_with_the_engine() {
    let daemon = daemon().await;
    let client = daemon.client();
    let server = Server::start();
    let running = child(&daemon, Some(server.policy())).await;
    let paused = child(&daemon, Some(server.policy())).await;
    client.pause(&paused.id).await.unwrap();
    daemon.kill_engine();
    for sandbox in [&running, &paused] {
        until("the sandbox is attached again", async || {
            let info = client.network(&sandbox.id).await.ok()?;
            info.attached.then_some(())
        })
        .await;
    }
    // The agent was asked before the sandbox had a network again.
    assert_eq!(resets(&running).await, 1);
    client.resume(&paused.id).await.unwrap();
    until("the paused guest broke its connections", async || {
        (resets(&paused).await == 1).then_some(())
    })
    .await;
    daemon.ends_clean().await;
}

#[tokio::test]
async fn an_engine_that_does_not_answer_is_replaced() {
    let daemon = daemon().await;
    let client = daemon.client();
    let server = Server::start();
    let sandbox = child(&daemon, Some(server.policy())).await;
    let engine = daemon.engines();
    daemon.stop_engine();
    let metrics = client.metrics().await.unwrap();
    assert!(metrics.contains("forkd_sandboxes_active 1"), "{metrics}");
    let none = UpdateSandbox {
        network: Some(NetworkRequest::Mode("none".into())),
        ..UpdateSandbox::default()
    };
    let late = client.update(&sandbox.id, &none).await.unwrap_err();
    assert_eq!(late.code(), Some(ErrorCode::NetworkUnavailable));
    until("the sandbox is attached again", async || {
        let info = client.network(&sandbox.id).await.ok()?;
        info.attached.then_some(())
    })
    .await;
    assert_ne!(daemon.engines(), engine);
    // A policy is durable before it is in force, so the next engine has the one of the failed request.
    assert_eq!(send(&sandbox, "knock", server.port()).await, "reset");
    daemon.ends_clean().await;
}

#[tokio::test]
async fn an_engine_that_dies_with_the_daemon_is_replaced() {
    let mut daemon = daemon().await;
    let server = Server::start();
    let sandbox = child(&daemon, Some(server.policy())).await;
    daemon.kill().await;
    daemon.kill_engine();
    daemon.launch().await;
    let sandbox = Sandbox::new(daemon.client(), &sandbox.id);
    until("the sandbox is attached again", async || {
        let info = daemon.client().network(&sandbox.id).await.ok()?;
        info.attached.then_some(())
    })
    .await;
    assert_eq!(send(&sandbox, "knock", server.port()).await, "open");
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_fork_inherits_the_policy_and_no_connection() {
    let daemon = daemon().await;
    let server = Server::start();
    let source = child(&daemon, Some(server.policy())).await;
    assert_eq!(send(&source, "knock", server.port()).await, "open");
    let children = source.fork(2).await.unwrap();
    for child in &children {
        assert_eq!(child.info().await.unwrap().network.mode, "custom");
        assert_eq!(send(child, "resume", server.port()).await, "reset");
        assert_eq!(send(child, "knock", server.port()).await, "open");
    }
    let network = daemon.client().network(&source.id).await.unwrap();
    assert_eq!((network.open_flows, network.counters.resets), (1, 0));
    let request = ForkRequest {
        n: 1,
        timeout_secs: None,
        labels: Default::default(),
        freeze: false,
        network: Some(NetworkRequest::Mode("none".into())),
    };
    let made = daemon.client().fork(&source.id, &request).await.unwrap();
    let closed = Sandbox::running(daemon.client(), &made).remove(0);
    assert_eq!(send(&closed, "knock", server.port()).await, "reset");
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_roll_back_resets_connections() {
    let daemon = daemon().await;
    let server = Server::start();
    let sandbox = child(&daemon, Some(server.policy())).await;
    assert_eq!(send(&sandbox, "knock", server.port()).await, "open");
    let client = daemon.client();
    client
        .checkpoint(&sandbox.id, &Default::default())
        .await
        .unwrap();
    client
        .rollback(&sandbox.id, &Default::default())
        .await
        .unwrap();
    assert_eq!(client.network(&sandbox.id).await.unwrap().open_flows, 0);
    assert_eq!(send(&sandbox, "resume", server.port()).await, "reset");
    assert_eq!(send(&sandbox, "knock", server.port()).await, "open");
    daemon.ends_clean().await;
}

#[tokio::test]
async fn the_operator_denies_more_than_any_policy_allows() {
    let server = Server::start();
    let floor = format!("deny host:{}", server.port());
    let daemon = daemon_with(Options::args(&["--network-floor", &floor])).await;
    let sandbox = child(&daemon, Some(server.policy())).await;
    let mut events = daemon.client().events().await.unwrap();
    assert_eq!(send(&sandbox, "knock", server.port()).await, "reset");
    let event = events.next().await.unwrap().unwrap();
    assert_eq!(
        (event.kind, &event.object),
        (EventKind::NetworkDenied, &sandbox.id)
    );
    let detail = event.detail.unwrap();
    assert!(detail.contains(&floor), "{detail}");
    let status = daemon.client().status().await.unwrap().network.unwrap();
    assert_eq!((status.engine.as_str(), status.sandboxes), ("running", 1));
    assert_eq!(status.floor, [floor]);
    let walls = status.isolation.unwrap().walls;
    for wall in ["capabilities", "seccomp"] {
        assert!(walls.iter().any(|standing| standing == wall), "{walls:?}");
    }
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_host_without_the_engine_has_the_mode_none_only() {
    let daemon = daemon_with(Options::args(&[
        "--net-program",
        "/nowhere/forkd-net",
        "--network-default",
        "public",
    ]))
    .await;
    let sandbox = daemon.child(TAG).await;
    assert_eq!(sandbox.info().await.unwrap().network.mode, "none");
    assert_eq!(send(&sandbox, "knock", 1).await, "unplugged");
    let request = CreateSandboxes {
        snapshot_tag: TAG.to_owned(),
        network: Some(NetworkRequest::Mode("public".into())),
        ..CreateSandboxes::default()
    };
    let refused = daemon.client().spawn(&request).await.unwrap_err();
    assert_eq!(refused.code(), Some(ErrorCode::NetworkUnavailable));
    let status = daemon.client().status().await.unwrap().network.unwrap();
    assert_eq!(status.engine, "missing");
    assert!(daemon.log_tail().contains("forkd-net is not installed"));
    daemon.ends_clean().await;
}

#[tokio::test]
async fn limits_change_live_and_are_kept() {
    let mut daemon = daemon().await;
    let server = Server::start();
    let sandbox = child(&daemon, Some(server.policy())).await;
    let limits = |connections, egress_mbit| NetworkLimits {
        connections,
        egress_mbit,
        ..NetworkLimits::default()
    };
    let edit = |limits| UpdateNetwork {
        limits,
        ..UpdateNetwork::default()
    };
    let client = daemon.client();
    assert_eq!(send(&sandbox, "knock", server.port()).await, "open");
    let one = edit(limits(Some(1), Some(50)));
    let info = client.edit_network(&sandbox.id, &one).await.unwrap();
    assert_eq!(info.policy.limits, limits(Some(1), Some(50)));
    assert_eq!(info.open_flows, 1);
    // A second connection is over the limit.
    let other = Server::start();
    let rule = UpdateNetwork {
        add: vec![format!("allow host:{}", other.port())],
        ..UpdateNetwork::default()
    };
    client.edit_network(&sandbox.id, &rule).await.unwrap();
    assert_eq!(send(&sandbox, "knock", other.port()).await, "reset");
    daemon.restart().await;
    let client = daemon.client();
    let sandbox = Sandbox::new(client, &sandbox.id);
    assert_eq!(send(&sandbox, "knock", other.port()).await, "reset");
    let more = edit(limits(Some(2), Some(0)));
    let info = client.edit_network(&sandbox.id, &more).await.unwrap();
    assert_eq!(info.policy.limits, limits(Some(2), None));
    assert_eq!(send(&sandbox, "knock", other.port()).await, "open");
    let none = edit(limits(Some(0), None));
    let refused = client.edit_network(&sandbox.id, &none).await.unwrap_err();
    assert_eq!(refused.code(), Some(ErrorCode::PolicyInvalid));
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_bad_policy_is_refused_with_the_rule() {
    let daemon = daemon().await;
    let request = CreateSandboxes {
        snapshot_tag: TAG.to_owned(),
        network: Some(custom(&["allow public", "allow 10.0.0.1/8"])),
        ..CreateSandboxes::default()
    };
    let refused = daemon.client().spawn(&request).await.unwrap_err();
    assert_eq!(refused.code(), Some(ErrorCode::PolicyInvalid));
    assert!(refused.to_string().contains("rule 2"), "{refused}");
    let sandbox = daemon.child(TAG).await;
    let edit = UpdateNetwork {
        add: vec!["allow public".into()],
        ..UpdateNetwork::default()
    };
    let refused = daemon
        .client()
        .edit_network(&sandbox.id, &edit)
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Some(ErrorCode::PolicyInvalid));
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_child_that_does_not_start_leaves_no_network() {
    let daemon = daemon().await;
    for step in [Step::Restore, Step::Identity] {
        for fault in [Fault::Fail, Fault::Die] {
            daemon.faults().inject(step, fault);
            assert!(daemon.spawn(TAG, 1).await.is_err(), "{step:?} {fault:?}");
            daemon.faults().clear();
        }
    }
    until("the engine serves no sandbox", async || {
        (daemon.engine_sandboxes().await == 0).then_some(())
    })
    .await;
    daemon.ends_clean().await;
}

#[tokio::test]
async fn workspaces_keep_their_policy() {
    let daemon = daemon().await;
    let server = Server::start();
    let request = forkd_api::CreateWorkspace {
        name: "space".into(),
        snapshot_tag: TAG.into(),
        per_child_netns: false,
        memory_limit_mib: None,
        network: Some(server.policy()),
    };
    let client = daemon.client();
    let made = client.create_workspace(&request).await.unwrap();
    let id = made.live_sandbox_id.unwrap();
    let sandbox = Sandbox::new(client, &id);
    assert_eq!(send(&sandbox, "knock", server.port()).await, "open");
    let deny = UpdateNetwork {
        add: vec!["deny public:25".into()],
        ..UpdateNetwork::default()
    };
    client.edit_network(&id, &deny).await.unwrap();
    client.suspend_workspace("space", true).await.unwrap();
    client.resume_workspace("space").await.unwrap();
    let sandbox = Sandbox::new(client, &id);
    assert_eq!(sandbox.info().await.unwrap().network.rules.len(), 2);
    assert_eq!(send(&sandbox, "resume", server.port()).await, "reset");
    assert_eq!(send(&sandbox, "knock", server.port()).await, "open");
    client.delete_workspace("space").await.unwrap();
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_burst_of_children_is_attached_while_the_engine_dies() {
    let daemon = daemon().await;
    let server = Server::start();
    let request = CreateSandboxes {
        snapshot_tag: TAG.to_owned(),
        n: 20,
        network: Some(server.policy()),
        ..CreateSandboxes::default()
    };
    let client = daemon.client();
    let killing = async {
        for _ in 0..5 {
            tokio::time::sleep(Duration::from_millis(40)).await;
            daemon.kill_engine();
        }
    };
    let (made, ()) = tokio::join!(client.spawn(&request), killing);
    let children = Sandbox::running(client, &made.unwrap());
    for child in &children {
        until("the child has its network", async || {
            (send(child, "knock", server.port()).await == "open").then_some(())
        })
        .await;
    }
    daemon.ends_clean().await;
}
