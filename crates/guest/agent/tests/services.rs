//! Services: readiness, failure before it, restarts, and a guest that becomes calm.

mod common;

use std::time::Duration;

use common::{TestAgent, sh};
use forkd_agent_client::{Calls, Error};
use forkd_guest_proto::{
    ErrorCode, ExitStatus, Readiness, Restart, ServiceInfo, ServiceStart, ServiceState,
    SettleRequest,
};

/// How often a state is looked at, every ten milliseconds.
const LOOKS: usize = 6000;

fn service(name: &str, line: &str, ready: Vec<Readiness>) -> ServiceStart {
    ServiceStart {
        name: name.into(),
        argv: vec!["sh".into(), "-c".into(), line.into()],
        ready,
        ..ServiceStart::default()
    }
}

fn refusal(result: Result<ServiceInfo, Error>) -> forkd_guest_proto::AgentError {
    match result {
        Err(Error::Agent(refused)) => refused,
        other => panic!("{other:?}"),
    }
}

/// Waits until the only service is as expected.
async fn until(client: &Calls, expected: impl Fn(&ServiceInfo) -> bool) -> ServiceInfo {
    for _ in 0..LOOKS {
        let all = client.services().await.unwrap();
        if let Some(found) = all.into_iter().find(&expected) {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{:?}", client.services().await);
}

#[tokio::test]
async fn a_service_is_ready_when_every_condition_holds() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let (go, up) = (agent.path("go"), agent.path("up"));
    let line = format!(
        "until [ -e {go} ]; do sleep 0.01; done; echo first; touch {up}; echo all is up; exec sleep 1000"
    );
    let ready = vec![
        Readiness::File(up.clone()),
        Readiness::Log("is up".into()),
        Readiness::Exec(vec!["test".into(), "-e".into(), up.clone()]),
    ];
    let starting = client.service_start(service("web", &line, ready));
    tokio::pin!(starting);
    // It is listed while it starts, and not ready before its conditions hold.
    tokio::select! {
        early = &mut starting => panic!("{early:?}"),
        found = until(&client, |one| one.process > 0) => assert_eq!(found.state, ServiceState::Starting),
    }
    client
        .exec_capture(sh(&format!("touch {go}")))
        .await
        .unwrap();
    let info = starting.await.unwrap();
    assert_eq!((info.state, info.restarts), (ServiceState::Ready, 0));
    let again = refusal(
        client
            .service_start(service("web", "true", Vec::new()))
            .await,
    );
    assert_eq!(again.code, ErrorCode::Exists);
}

#[tokio::test]
async fn a_port_that_listens_is_a_condition() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    // The kernel chooses a port that is free; nothing accepts on it until the service does.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    let code = format!(
        "import socket,time; s=socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); \
         s.bind(('127.0.0.1',{port})); s.listen(); time.sleep(1000)"
    );
    let start = ServiceStart {
        name: "listener".into(),
        argv: vec!["python3".into(), "-c".into(), code],
        ready: vec![Readiness::Port(port)],
        ..ServiceStart::default()
    };
    let info = client.service_start(start).await.unwrap();
    assert_eq!(info.state, ServiceState::Ready);
    std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
}

#[tokio::test]
async fn a_service_that_ends_early_or_is_late_fails_with_its_output() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let never = || vec![Readiness::File("/no/such/file".into())];
    let early = service("early", "echo cannot bind >&2; exit 3", never());
    let refused = refusal(client.service_start(early).await);
    assert!(
        refused.message.contains("ended before it was ready"),
        "{refused}"
    );
    assert!(
        refused.message.contains("Code(3)") && refused.message.contains("cannot bind"),
        "{refused}"
    );
    let late = ServiceStart {
        timeout_ms: Some(200),
        ..service("late", "echo waiting; exec sleep 1000", never())
    };
    let refused = refusal(client.service_start(late).await);
    assert!(
        refused.message.contains("/no/such/file does not exist"),
        "{refused}"
    );
    assert!(refused.message.contains("waiting"), "{refused}");
    // Neither is left: not in the list, and not as a process.
    assert!(client.services().await.unwrap().is_empty());
    until_no_processes(&client).await;
}

async fn until_no_processes(client: &Calls) {
    for _ in 0..LOOKS {
        if client.processes().await.unwrap().is_empty() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{:?}", client.processes().await);
}

#[tokio::test]
async fn a_service_is_started_again_as_its_policy_says() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let count = agent.path("count");
    // Fails twice, then ends well.
    let line = format!(
        "echo x >>{count}; [ $(wc -l <{count}) -gt 2 ] && exit 0; until [ -e {count}.go ]; do sleep 0.01; done; exit 1"
    );
    client
        .service_start(service("flaky", &line, Vec::new()))
        .await
        .unwrap();
    client
        .exec_capture(sh(&format!("touch {count}.go")))
        .await
        .unwrap();
    let ended = until(&client, |one| one.state == ServiceState::Ended).await;
    assert_eq!(
        (ended.restarts, ended.last_end),
        (2, Some(ExitStatus::Code(0)))
    );
}

#[tokio::test]
async fn a_service_that_may_not_come_back_stays_ended() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let once = ServiceStart {
        restart: Restart::Never,
        ..service("once", "exit 7", Vec::new())
    };
    // Without a condition it may end before or after the response.
    match client.service_start(once).await {
        Ok(_) => {
            let ended = until(&client, |one| one.state == ServiceState::Ended).await;
            assert_eq!(
                (ended.restarts, ended.last_end),
                (0, Some(ExitStatus::Code(7)))
            );
        }
        Err(error) => assert!(error.to_string().contains("ended before"), "{error}"),
    }
}

#[tokio::test]
async fn settling_ends_in_time_and_odd_windows_are_refused() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let calm = SettleRequest {
        busy_percent: 100,
        for_ms: 50,
        timeout_ms: 60_000,
    };
    assert!(client.settle(calm).await.unwrap().calm);
    let odd = SettleRequest { for_ms: 1, ..calm };
    assert!(
        matches!(client.settle(odd).await, Err(Error::Agent(refused)) if refused.code == ErrorCode::BadRequest)
    );
}
