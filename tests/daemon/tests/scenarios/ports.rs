//! Ports of sandboxes: fake VMMs whose loopback interface is that of the test, so the test is the server in the guest.

use std::io::ErrorKind;
use std::net::SocketAddr;

use forkd_api::{
    CreateSandboxes, CreateToken, ErrorCode, PortAccess, PortInfo, PortRequest, PortSettings, Role,
};
use forkd_daemon_tests::{Daemon, Options, Sandbox};
use futures::{SinkExt, StreamExt};
use http_body_util::{BodyExt, Empty};
use hyper::body::Bytes;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::tungstenite::Message;

use crate::checkpoint::{go_back, keep};
use crate::{TAG, daemon_with};

const DOMAIN: &str = "box.test";

/// A daemon that also listens on TCP, where clients are not trusted.
struct Served {
    daemon: Daemon,
    address: SocketAddr,
}

async fn served(tokens: &[&str], more: &[&str]) -> Served {
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = free.local_addr().unwrap();
    drop(free);
    let bind = address.to_string();
    let mut args = vec!["--bind", &bind, "--domain", DOMAIN];
    args.extend(more);
    let options = Options {
        tokens: tokens.iter().map(ToString::to_string).collect(),
        ..Options::args(&args)
    };
    let daemon = daemon_with(options).await;
    Served { daemon, address }
}

/// A server that answers each request with the head of the request as its body, and closes.
async fn mirror() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    let mut byte = [0];
                    if stream.read_exact(&mut byte).await.is_err() {
                        return;
                    }
                    head.extend(byte);
                }
                let length = head.len();
                let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n");
                let _ = stream.write_all(answer.as_bytes()).await;
                let _ = stream.write_all(&head).await;
            });
        }
    });
    port
}

/// A server that returns every byte, and ends its side when the client has ended its own.
async fn echo() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut reader, mut writer) = stream.split();
                let _ = tokio::io::copy(&mut reader, &mut writer).await;
                let _ = writer.shutdown().await;
            });
        }
    });
    port
}

impl Served {
    /// Sends one request over HTTP/1.1 and returns status and body.
    async fn get(&self, path: &str, headers: &[(&str, &str)]) -> (u16, String) {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let mut text = format!("GET {path} HTTP/1.1\r\nconnection: close\r\n");
        if !headers.iter().any(|(name, _)| *name == "host") {
            text.push_str("host: localhost\r\n");
        }
        for (name, value) in headers {
            text.push_str(&format!("{name}: {value}\r\n"));
        }
        text.push_str("\r\n");
        stream.write_all(text.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        (status, body.to_ascii_lowercase())
    }

    async fn set(&self, sandbox: &Sandbox, port: u16, access: PortAccess) -> PortInfo {
        let settings = PortSettings { access, host: None };
        let client = self.daemon.client();
        client.set_port(&sandbox.id, port, &settings).await.unwrap()
    }
}

fn host(sandbox: &Sandbox, port: u16) -> String {
    format!("{port}-{}.{DOMAIN}", sandbox.id)
}

#[tokio::test]
async fn a_port_is_reached_by_name_by_headers_and_by_path() {
    let served = served(&[], &[]).await;
    let sandbox = served.daemon.child(TAG).await;
    let port = mirror().await;
    let name = host(&sandbox, port);
    let (status, seen) = served
        .get("/a?b=1", &[("host", &name), ("authorization", "Basic abc")])
        .await;
    assert_eq!(status, 200, "{seen}");
    assert!(seen.starts_with("get /a?b=1 http/1.1\r\n"), "{seen}");
    assert!(seen.contains(&format!("host: {name}\r\n")), "{seen}");
    // The server in the guest may have tokens of its own.
    assert!(seen.contains("authorization: basic abc"), "{seen}");
    let number = port.to_string();
    let headers = [
        ("forkd-sandbox-id", sandbox.id.as_str()),
        ("forkd-sandbox-port", &number),
    ];
    let (status, seen) = served.get("/c", &headers).await;
    assert!(status == 200 && seen.starts_with("get /c "), "{seen}");
    assert!(!seen.contains("forkd-sandbox"), "{seen}");
    let path = format!("/v1/sandboxes/{}/proxy/{port}/d", sandbox.id);
    let (status, seen) = served.get(&path, &[]).await;
    assert!(status == 200 && seen.starts_with("get /d "), "{seen}");
    // Ports and sandboxes that do not exist.
    let closed = host(&sandbox, 1);
    let (status, text) = served.get("/", &[("host", &closed)]).await;
    assert!(status == 502 && text.contains("port_closed"), "{text}");
    let other = format!("{port}-sb000000000000000000000000.{DOMAIN}");
    let (status, text) = served.get("/", &[("host", &other)]).await;
    assert!(
        status == 404 && text.contains("sandbox_not_found"),
        "{text}"
    );
    // A web page of another site is not a client of the owner.
    let page = [("host", name.as_str()), ("origin", "https://evil.example")];
    assert_eq!(served.get("/", &page).await.0, 403);
    served.daemon.ends_clean().await;
}

#[tokio::test]
async fn the_access_of_a_port_decides_who_uses_it() {
    let served = served(&["root"], &[]).await;
    let client = served.daemon.client();
    let token = async |name: &str, owner: &str| {
        let request = CreateToken {
            name: name.to_owned(),
            owner: Some(owner.to_owned()),
            role: Role::Use,
        };
        client.create_token(&request).await.unwrap().token
    };
    let (own, other) = (token("a", "a").await, token("b", "b").await);
    let target = format!("http://{}", served.address).parse().unwrap();
    let of_a = forkd_rest_client::Client::new(&target, Some(own.clone())).unwrap();
    let share = forkd_api::UpdateSnapshot { public: Some(true) };
    client.update_snapshot(TAG, &share).await.unwrap();
    let request = CreateSandboxes {
        snapshot_tag: TAG.to_owned(),
        ..CreateSandboxes::default()
    };
    let made = of_a.spawn(&request).await.unwrap();
    let sandbox = Sandbox::new(client, &made[0].id);
    let port = mirror().await;
    let name = host(&sandbox, port);
    let bearer = |token: &str| format!("Bearer {token}");
    let ask = async |header: &str, value: &str| {
        let headers = [("host", name.as_str()), (header, value)];
        served.get("/", &headers).await
    };
    let (own, other) = (bearer(&own), bearer(&other));
    let table = async |expected: [u16; 4], access_token: &str| {
        let found = [
            ask("x-none", "1").await.0,
            ask("authorization", &other).await.0,
            ask("authorization", &own).await.0,
            ask("forkd-access-token", access_token).await.0,
        ];
        assert_eq!(found, expected);
    };
    // The owner alone, by default.
    let info = of_a.port(&sandbox.id, port).await.unwrap();
    assert_eq!((info.access, info.token), (PortAccess::Owner, None));
    table([401, 404, 200, 401], "x").await;
    let info = served.set(&sandbox, port, PortAccess::Token).await;
    let access_token = info.token.unwrap();
    table([401, 404, 200, 200], &access_token).await;
    table([401, 404, 200, 401], "wrong").await;
    served.set(&sandbox, port, PortAccess::Public).await;
    table([200, 200, 200, 200], "wrong").await;
    // The guest never sees a token of the daemon.
    for value in [&own, &other] {
        let seen = ask("authorization", value).await.1;
        assert!(!seen.contains("authorization"), "{seen}");
    }
    // Another port of the same sandbox stays closed.
    let second = host(&sandbox, mirror().await);
    assert_eq!(served.get("/", &[("host", &second)]).await.0, 401);
    of_a.forget_port(&sandbox.id, port).await.unwrap();
    table([401, 404, 200, 401], &access_token).await;
}

#[tokio::test]
async fn http2_clients_reach_servers_of_http1() {
    let served = served(&[], &[]).await;
    let sandbox = served.daemon.child(TAG).await;
    let port = mirror().await;
    let stream = TcpStream::connect(served.address).await.unwrap();
    let io = TokioIo::new(stream);
    let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), io);
    let (mut sender, connection) = handshake.await.unwrap();
    tokio::spawn(connection);
    let uri = format!("http://{}/x", host(&sandbox, port));
    // Several requests of one connection.
    for _ in 0..3 {
        let request = hyper::Request::get(&uri)
            .header("cookie", "a=1")
            .header("cookie", "b=2")
            .body(Empty::<Bytes>::new())
            .unwrap();
        let answer = sender.send_request(request).await.unwrap();
        assert_eq!(answer.status(), 200);
        let seen = answer.into_body().collect().await.unwrap().to_bytes();
        let seen = String::from_utf8(seen.to_vec()).unwrap().to_lowercase();
        assert!(
            seen.contains(&format!("host: {}", host(&sandbox, port))),
            "{seen}"
        );
        assert!(seen.contains("cookie: a=1; b=2\r\n"), "{seen}");
    }
    served.daemon.ends_clean().await;
}

/// A WebSocket server that returns each message.
async fn web_socket_echo() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut socket = tokio_tungstenite::accept_async(stream).await.unwrap();
                while let Some(Ok(message)) = socket.next().await {
                    if !message.is_close() && socket.send(message).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    port
}

#[tokio::test]
async fn a_web_socket_ends_with_a_roll_back_and_a_new_one_works() {
    let served = served(&[], &[]).await;
    let sandbox = served.daemon.child(TAG).await;
    keep(&served.daemon, &sandbox, "before").await.unwrap();
    let port = web_socket_echo().await;
    let open = async || {
        let stream = TcpStream::connect(served.address).await.unwrap();
        let uri = format!("ws://{}/", host(&sandbox, port));
        let (mut socket, _) = tokio_tungstenite::client_async(uri, stream).await.unwrap();
        for text in ["one", "two"] {
            socket.send(Message::text(text)).await.unwrap();
            let back = socket.next().await.unwrap().unwrap();
            assert_eq!(back, Message::text(text));
        }
        socket
    };
    let mut old = open().await;
    go_back(&served.daemon, &sandbox, "before").await.unwrap();
    // Neither a message nor a close frame comes any more.
    let end = old.next().await;
    assert!(!matches!(end, Some(Ok(_))), "{end:?}");
    open().await;
    served.daemon.ends_clean().await;
}

/// Publishes a port on a free host port and returns the address.
async fn publish(served: &Served, sandbox: &Sandbox, port: u16) -> SocketAddr {
    let settings = PortSettings {
        host: Some("127.0.0.1:0".to_owned()),
        ..PortSettings::default()
    };
    let client = served.daemon.client();
    let info = client.set_port(&sandbox.id, port, &settings).await.unwrap();
    info.host.unwrap().parse().unwrap()
}

/// Sends bytes, ends the sending side, and returns everything that comes back.
async fn exchange(address: SocketAddr, bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(bytes).await?;
    stream.shutdown().await?;
    let mut back = Vec::new();
    stream.read_to_end(&mut back).await?;
    Ok(back)
}

#[tokio::test]
async fn a_host_port_leads_to_one_sandbox_and_survives_the_daemon() {
    let mut served = served(&[], &[]).await;
    let sandbox = served.daemon.child(TAG).await;
    let port = echo().await;
    let address = publish(&served, &sandbox, port).await;
    assert_eq!(
        exchange(address, b"half-closed").await.unwrap(),
        b"half-closed"
    );
    // The same wish again keeps the host port.
    assert_eq!(publish(&served, &sandbox, port).await, address);
    let client = served.daemon.client().clone();
    let child = sandbox.fork(1).await.unwrap().remove(0);
    let of_child = client.port(&child.id, port).await.unwrap();
    assert_eq!(of_child.host, None);
    // A host port has one sandbox.
    let taken = PortSettings {
        host: Some(address.to_string()),
        ..PortSettings::default()
    };
    let refused = client.set_port(&child.id, port, &taken).await.unwrap_err();
    assert_eq!(refused.code(), Some(ErrorCode::PortInUse));
    served.daemon.restart().await;
    let again = exchange(address, b"after a restart").await.unwrap();
    assert_eq!(again, b"after a restart");
    served
        .daemon
        .client()
        .forget_port(&sandbox.id, port)
        .await
        .unwrap();
    let refused = TcpStream::connect(address).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    served.daemon.ends_clean().await;
}

#[tokio::test]
async fn connections_of_a_host_port_are_reset_by_a_roll_back() {
    let served = served(&[], &[]).await;
    let sandbox = served.daemon.child(TAG).await;
    keep(&served.daemon, &sandbox, "before").await.unwrap();
    let port = echo().await;
    let address = publish(&served, &sandbox, port).await;
    let mut open = TcpStream::connect(address).await.unwrap();
    open.write_all(b"x").await.unwrap();
    assert_eq!(open.read_u8().await.unwrap(), b'x');
    go_back(&served.daemon, &sandbox, "before").await.unwrap();
    let mut rest = Vec::new();
    let end = open.read_to_end(&mut rest).await.unwrap_err();
    assert_eq!(end.kind(), ErrorKind::ConnectionReset);
    assert_eq!(exchange(address, b"new").await.unwrap(), b"new");
    // A port on which nothing listens any more.
    let settings = PortSettings {
        host: Some(address.to_string()),
        ..PortSettings::default()
    };
    let client = served.daemon.client();
    client.forget_port(&sandbox.id, port).await.unwrap();
    client.set_port(&sandbox.id, 1, &settings).await.unwrap();
    assert!(exchange(address, b"?").await.is_err());
    served.daemon.ends_clean().await;
}

#[tokio::test]
async fn children_publish_ports_from_their_start() {
    let served = served(&[], &[]).await;
    let client = served.daemon.client();
    let port = echo().await;
    let request = |n: u32, host: &str| CreateSandboxes {
        snapshot_tag: TAG.to_owned(),
        n,
        ports: vec![PortRequest {
            port,
            access: PortAccess::Public,
            host: Some(host.to_owned()),
        }],
        ..CreateSandboxes::default()
    };
    let made = client.spawn(&request(2, "127.0.0.1:0")).await.unwrap();
    let mut addresses = Vec::new();
    for child in &made {
        let info = client.port(&child.id, port).await.unwrap();
        assert_eq!(info.access, PortAccess::Public);
        let address: SocketAddr = info.host.unwrap().parse().unwrap();
        assert_eq!(exchange(address, b"child").await.unwrap(), b"child");
        addresses.push(address);
    }
    assert_ne!(addresses[0], addresses[1]);
    for (n, host, code) in [
        (2, "127.0.0.1:8123", ErrorCode::InvalidRequest),
        (1, "127.0.0.1:80", ErrorCode::InvalidRequest),
        (1, "localhost:8123", ErrorCode::InvalidRequest),
        (1, "0.0.0.0:0", ErrorCode::Forbidden),
        (1, &addresses[0].to_string(), ErrorCode::PortInUse),
    ] {
        let refused = client.spawn(&request(n, host)).await.unwrap_err();
        assert_eq!(refused.code(), Some(code), "{n} {host}");
    }
    served.daemon.ends_clean().await;
    assert!(TcpStream::connect(addresses[0]).await.is_err());
}

#[tokio::test]
async fn a_byte_stream_goes_through_the_daemon() {
    let served = served(&[], &[]).await;
    let sandbox = served.daemon.child(TAG).await;
    let client = served.daemon.client();
    let port = echo().await;
    let mut stream = client.connect_port(&sandbox.id, port).await.unwrap();
    let sent: Vec<u8> = (0..200_000_u32).map(|n| n as u8).collect();
    let (mut reader, mut writer) = tokio::io::split(&mut stream);
    let sending = async {
        writer.write_all(&sent).await.unwrap();
        writer.shutdown().await.unwrap();
    };
    let mut back = Vec::new();
    let receiving = async { reader.read_to_end(&mut back).await.unwrap() };
    tokio::join!(sending, receiving);
    assert!(back == sent, "{} bytes came back", back.len());
    let refused = client.connect_port(&sandbox.id, 1).await.unwrap_err();
    assert_eq!(refused.code(), Some(ErrorCode::PortClosed));
    served.daemon.ends_clean().await;
}

#[tokio::test]
async fn listening_ports_are_listed_with_their_settings() {
    let served = served(&[], &[]).await;
    let sandbox = served.daemon.child(TAG).await;
    let table = "  sl  local_address rem_address   st\n   0: 0100007F:0BB8 00000000:0000 0A 0 0\n";
    sandbox.write("/proc/net/tcp", table).await.unwrap();
    served.set(&sandbox, 5432, PortAccess::Token).await;
    let ports = served.daemon.client().ports(&sandbox.id).await.unwrap();
    let seen: Vec<_> = ports
        .iter()
        .map(|port| (port.port, port.address.as_deref(), port.token.is_some()))
        .collect();
    assert_eq!(seen, [(3000, Some("127.0.0.1"), false), (5432, None, true)]);
    let url = format!("http://3000-{}.{DOMAIN}/", sandbox.id);
    assert_eq!(ports[0].url, Some(url));
    served.daemon.ends_clean().await;
}

/// The answer to a line that is sent to a child inside its network namespace.
async fn ask_in(netns: &str, port: u16, line: &str) -> String {
    let program = format!(
        "import socket, sys\n\
         s = socket.create_connection(('10.42.0.2', {port}), 20)\n\
         s.sendall(sys.argv[1].encode() + b'\\n')\n\
         s.shutdown(socket.SHUT_WR)\n\
         print(s.makefile().read())"
    );
    let done = tokio::process::Command::new("ip")
        .args(["netns", "exec", netns, "python3", "-c", &program, line])
        .output();
    let done = done.await.unwrap();
    assert!(done.status.success(), "{done:?}");
    String::from_utf8(done.stdout).unwrap()
}

#[tokio::test]
async fn a_child_has_a_network_namespace_where_the_daemon_may_make_one() {
    let mut served = served(&[], &[]).await;
    let request = CreateSandboxes {
        snapshot_tag: TAG.to_owned(),
        n: 2,
        per_child_netns: true,
        ..CreateSandboxes::default()
    };
    let made = served.daemon.client().spawn(&request).await.unwrap();
    let names: Vec<_> = made.iter().map(|child| child.netns.clone()).collect();
    if !rustix::process::geteuid().is_root() {
        assert_eq!(names, [None, None]);
        return;
    }
    let [Some(first), Some(second)] = &names[..] else {
        panic!("root has no namespaces: {names:?}");
    };
    assert!(first.starts_with("forkd-child-") && first != second);
    let sandbox = Sandbox::new(served.daemon.client(), &made[0].id);
    sandbox.write("/mark", "first").await.unwrap();
    let cat = r#"{"action": "exec", "args": ["cat", "/mark"]}"#;
    assert!(
        ask_in(first, 8888, cat)
            .await
            .contains("\"stdout\":\"first\"")
    );
    assert!(ask_in(second, 8888, cat).await.contains("parent"));
    assert!(
        ask_in(first, 8888, r#"{"action": "ping"}"#)
            .await
            .contains("\"pong\":true")
    );
    // A port of the guest, before and after a restart of the daemon.
    let port = echo().await;
    let table = format!("x: 0100007F:{port:04X} 00000000:0000 0A\n");
    sandbox.write("/proc/net/tcp", &table).await.unwrap();
    for restart in [false, true] {
        if restart {
            served.daemon.restart().await;
        }
        let answer = forkd_daemon_tests::until("the port is served", async || {
            let program =
                format!("import socket; socket.create_connection(('10.42.0.2', {port}), 20)");
            let tried = tokio::process::Command::new("ip")
                .args(["netns", "exec", first, "python3", "-c", &program])
                .output();
            tried.await.unwrap().status.success().then_some(())
        });
        answer.await;
        assert_eq!(ask_in(first, port, "echo").await.trim(), "echo");
    }
    served.daemon.ends_clean().await;
    for name in [first, second] {
        assert!(!std::path::Path::new("/run/netns").join(name).exists());
    }
}
