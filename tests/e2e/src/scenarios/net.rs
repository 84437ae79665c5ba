//! TCP between a guest and a server in a namespace of the host, through a tap and through a socket.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::thread::JoinHandle;

use anyhow::{Context, ensure};
use forkd_guest_proto::NetworkRequest;
use forkd_testkit::{BootOptions, Kit, Namespace, Pump};
use forkd_vmm_proto::NetBackend;
use sha2::{Digest, Sha256};

use crate::scenario::{Registered, Run, everyday, times};

pub const SCENARIOS: &[Registered] = &[
    everyday!(tcp_through_a_tap),
    everyday!(tcp_through_a_socket),
];

const HOST: &str = "10.77.0.1";
const HOST_NET: &str = "10.77.0.1/24";
const GUEST_NET: &str = "10.77.0.2/24";
const PORT: u16 = 7000;
/// Bytes in each direction.
fn amount() -> usize {
    times(10_000_000, 100_000_000)
}
const BLOCK: usize = 1 << 20;

/// Sends, shuts down its side, receives, and prints the digests of both.
const CLIENT: &str = r#"
import hashlib, os, socket, sys
host, port, amount = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
link = socket.create_connection((host, port), timeout=120)
sent, received, left = hashlib.sha256(), hashlib.sha256(), amount
block = os.urandom(1 << 20)
while left:
    part = block[:left]
    link.sendall(part)
    sent.update(part)
    left -= len(part)
link.shutdown(socket.SHUT_WR)
count = 0
while part := link.recv(1 << 16):
    received.update(part)
    count += len(part)
print(sent.hexdigest(), received.hexdigest(), count)
"#;

pub async fn tcp_through_a_tap(run: Run) -> anyhow::Result<()> {
    let namespace = Namespace::new()?;
    let tap = namespace.tap(HOST_NET)?;
    transfer(&run.kit, &namespace, NetBackend::Tap, tap).await
}

pub async fn tcp_through_a_socket(run: Run) -> anyhow::Result<()> {
    let namespace = Namespace::new()?;
    let (_pump, socket) = Pump::start(namespace.tap(HOST_NET)?)?;
    transfer(&run.kit, &namespace, NetBackend::Socket, socket).await
}

async fn transfer(
    kit: &Kit,
    namespace: &Namespace,
    kind: NetBackend,
    fd: OwnedFd,
) -> anyhow::Result<()> {
    let server = serve(namespace)?;
    let options = BootOptions {
        net: Some((kind, fd)),
        ..Default::default()
    };
    let vm = kit.boot(options).await?;
    let network = NetworkRequest {
        address: Some(GUEST_NET.to_owned()),
        ..Default::default()
    };
    vm.agent().await?.network(network).await?;
    let said = vm
        .python(CLIENT, &[HOST, &PORT.to_string(), &amount().to_string()])
        .await?;
    let seen = tokio::task::spawn_blocking(move || server.join())
        .await?
        .map_err(|_| anyhow::anyhow!("the server panicked"))??;
    let wanted = format!("{} {} {}", seen.received, seen.sent, amount());
    ensure!(said == wanted, "the guest says {said}, the host {wanted}");
    ensure!(
        seen.count == amount(),
        "{} bytes reached the host",
        seen.count
    );
    Ok(())
}

/// The server's result.
struct Seen {
    received: String,
    count: usize,
    sent: String,
}

/// Accepts one connection: reads to the end, then sends.
fn serve(namespace: &Namespace) -> anyhow::Result<JoinHandle<anyhow::Result<Seen>>> {
    let listener = namespace.inside(|| TcpListener::bind((HOST, PORT)))??;
    namespace.spawn(move || {
        let (link, _) = listener.accept().context("no connection arrived")?;
        exchange(link)
    })
}

fn exchange(mut link: TcpStream) -> anyhow::Result<Seen> {
    let mut buffer = vec![0; BLOCK];
    let mut received = Sha256::new();
    let mut count = 0;
    loop {
        let length = link.read(&mut buffer)?;
        if length == 0 {
            break;
        }
        received.update(buffer.get(..length).unwrap_or_default());
        count += length;
    }
    let block: Vec<u8> = (0..BLOCK).map(|_| rand::random()).collect();
    let mut sent = Sha256::new();
    let mut left = amount();
    while left > 0 {
        let part = block.get(..left.min(BLOCK)).unwrap_or_default();
        link.write_all(part)?;
        sent.update(part);
        left -= part.len();
    }
    Ok(Seen {
        received: hex::encode(received.finalize()),
        count,
        sent: hex::encode(sent.finalize()),
    })
}
