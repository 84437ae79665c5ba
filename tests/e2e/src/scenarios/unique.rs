//! A child has its own identity: it shares no random numbers, IDs, clocks or connections with its siblings.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, ensure};
use forkd_agent_client::Identified;
use forkd_guest_proto::{ClockRequest, NetworkRequest};
use forkd_testkit::{BootOptions, ForkOptions, Frozen, Kit, Namespace, Pump, Vm};
use forkd_vmm_proto::NetBackend;
use futures::future::try_join_all;

use crate::scenario::{Registered, Run, everyday, times};
use crate::support::{deaf_network, freeze, warm_python};

pub const SCENARIOS: &[Registered] = &[everyday!(children_share_nothing)];

const AT_ONCE: usize = 4;
/// Upper bound on the drift of two clocks between a child's start and the comparison.
const DRIFT_NS: i64 = 15_000_000;

/// Draws from every random number generator, in the interpreter that was warmed up in the parent.
const DRAW: &str = r"
import hashlib, secrets, ssl, tempfile, uuid
{
    'python random': random.random(),
    'numpy global': float(np.random.random()),
    'numpy own': float(generator.random()),
    'openssl': ssl.RAND_bytes(16).hex(),
    'uuid': str(uuid.uuid4()),
    'secrets': secrets.token_hex(16),
    'os.urandom': os.urandom(16).hex(),
    '/dev/urandom': open('/dev/urandom', 'rb').read(16).hex(),
    'temporary name': next(tempfile._get_candidate_names()),
}
";

/// Prints the identity of a guest.
const IDENTITY: &str = r"
{
    'hostname': os.uname().nodename,
    'machine-id': open('/etc/machine-id').read().strip(),
    'generation file': open('/run/forkd/generation').read().strip(),
    'hook': open('/run/hook-ran').read().strip(),
    'mac': open('/sys/class/net/eth0/address').read().strip(),
}
";

/// Prints whether the generation ID is in its page.
const GENERATION: &str = r"
import mmap, sys
with open('/dev/mem', 'rb') as memory:
    page = mmap.mmap(memory.fileno(), 4096, prot=mmap.PROT_READ, offset=0x9f000)
    print(bytes.fromhex(sys.argv[1]) in page[:])
";

pub async fn children_share_nothing(run: Run) -> anyhow::Result<()> {
    let kit = &run.kit;
    let namespace = Namespace::new()?;
    let (parent, _network) = parent(kit, &namespace).await?;
    let of_parent = draw(&parent).await?;
    let boot_id = parent.sh("cat /proc/sys/kernel/random/boot_id").await?;
    let frozen = freeze(parent).await?;

    let mut children = Vec::new();
    let count = times(8, 50);
    for first in (0..count).step_by(AT_ONCE) {
        let numbers = first..count.min(first + AT_ONCE);
        children.extend(try_join_all(numbers.map(|n| child(kit, &frozen, n))).await?);
    }
    let mut seen: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
    let mut offsets = Vec::new();
    for (number, child) in children.iter().enumerate() {
        let name = format!("child {number}");
        let mut all = draw(&child.vm).await?;
        all.extend(identity(&child.vm).await?);
        let new_boot_id = child.vm.sh("cat /proc/sys/kernel/random/boot_id").await?;
        let report = &child.identified.report;
        if report.boot_id.is_some() {
            ensure!(new_boot_id != boot_id, "{name} has the parent's boot id");
            all.insert("boot id".into(), new_boot_id);
        }
        seen.insert(name, all);
        offsets.push(clock_offset(child).await?);
        connection_is_reset(&child.vm).await?;
        let there = child
            .vm
            .python(GENERATION, &[&hex::encode(child.generation)])
            .await?;
        ensure!(there == "True", "child {number} has another generation id");
        ensure!(report.reseeded && report.warnings.is_empty(), "{report:?}");
    }
    all_different(&of_parent, &seen)?;
    offsets.sort_by(f64::total_cmp);
    eprintln!("wall clocks of {count} children against the host's, ms: {offsets:.1?}");
    Ok(())
}

/// Keeps the parent's network alive.
struct Network {
    _pump: Pump,
    _server: std::net::TcpStream,
}

/// A warm parent that has used all its generators and has a connection open.
async fn parent(kit: &Kit, namespace: &Namespace) -> anyhow::Result<(Vm, Network)> {
    let (pump, socket) = Pump::start(namespace.tap("10.78.0.1/24")?)?;
    let listener = namespace.inside(|| TcpListener::bind(("10.78.0.1", 7001)))??;
    let options = BootOptions {
        cmdline: "iomem=relaxed".into(),
        net: Some((NetBackend::Socket, socket)),
        ..Default::default()
    };
    let vm = warm_python(kit, options).await?;
    let network = NetworkRequest {
        address: Some("10.78.0.2/24".to_owned()),
        ..Default::default()
    };
    vm.agent().await?.network(network).await?;
    let hook = "#!/bin/sh\ncat /run/forkd/generation > /run/hook-ran\n";
    vm.put("/etc/forkd/on-fork.d/10-mark", hook.as_bytes(), 0o755)
        .await?;
    let accepting = tokio::task::spawn_blocking(move || listener.accept());
    vm.eval(
        "import socket\n\
         generator = np.random.default_rng()\n\
         link = socket.create_connection(('10.78.0.1', 7001), timeout=30)",
    )
    .await?;
    let (server, _) = accepting.await??;
    let network = Network {
        _pump: pump,
        _server: server,
    };
    Ok((vm, network))
}

struct Child {
    vm: Vm,
    identified: Identified,
    generation: [u8; 16],
    _deaf: OwnedFd,
}

async fn child(kit: &Kit, frozen: &Frozen, number: usize) -> anyhow::Result<Child> {
    let (deaf, net) = deaf_network()?;
    let options = ForkOptions {
        net: Some(net),
        ..Default::default()
    };
    let generation = options.generation;
    let vm = kit.fork_with(frozen, options).await?;
    vm.answers().await?;
    let network = NetworkRequest {
        mac: Some(format!("02:00:00:00:01:{number:02x}")),
        address: Some("10.78.0.2/24".to_owned()),
        ..Default::default()
    };
    let identified = vm
        .identify(&format!("child-{number}"), Some(network))
        .await?;
    Ok(Child {
        vm,
        identified,
        generation,
        _deaf: deaf,
    })
}

async fn draw(vm: &Vm) -> anyhow::Result<BTreeMap<String, String>> {
    strings(vm.eval(DRAW).await?)
}

async fn identity(vm: &Vm) -> anyhow::Result<BTreeMap<String, String>> {
    let mut identity = strings(vm.eval(IDENTITY).await?)?;
    let hook = identity.remove("hook").context("no hook")?;
    ensure!(
        identity.get("generation file") == Some(&hook),
        "the hook saw {hook}, not the new generation"
    );
    Ok(identity)
}

fn strings(value: serde_json::Value) -> anyhow::Result<BTreeMap<String, String>> {
    let object = value.as_object().context("no dictionary")?;
    Ok(object
        .iter()
        .map(|(name, value)| (name.clone(), value.to_string()))
        .collect())
}

/// No two children have an equal value.
fn all_different(
    parent: &BTreeMap<String, String>,
    children: &BTreeMap<String, BTreeMap<String, String>>,
) -> anyhow::Result<()> {
    let mut owners: BTreeMap<(&str, &str), &str> = BTreeMap::new();
    for (what, value) in parent {
        owners.insert((what, value), "the parent");
    }
    for (name, values) in children {
        for (what, value) in values {
            if let Some(other) = owners.insert((what, value), name) {
                anyhow::bail!("{what}: {name} and {other} both have {value}");
            }
        }
    }
    Ok(())
}

/// Offset of a child's wall clock in milliseconds. Must not exceed the bound that was reported when the clock
/// was set.
async fn clock_offset(child: &Child) -> anyhow::Result<f64> {
    let agent = child.vm.agent().await?;
    let mut sharpest: Option<(i64, i64)> = None;
    for _ in 0..5 {
        let before = unix_ns()?;
        let clock = agent.clock(ClockRequest::default()).await?;
        let half = (unix_ns()? - before) / 2;
        if sharpest.is_none_or(|(least, _)| half < least) {
            sharpest = Some((half, clock.unix_ns - (before + half)));
        }
    }
    let (half, offset) = sharpest.context("no reading")?;
    let said = child.identified.clock_within.context("no clock was set")?;
    let most = i64::try_from(said.as_nanos())? + half + DRIFT_NS;
    ensure!(
        offset.abs() <= most,
        "the clock is off by {offset} ns, not at most {most}"
    );
    Ok(offset as f64 / 1e6)
}

fn unix_ns() -> anyhow::Result<i64> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
    Ok(i64::try_from(now.as_nanos())?)
}

/// A connection of the parent is reset in the child at once.
async fn connection_is_reset(vm: &Vm) -> anyhow::Result<()> {
    let using = vm.eval(
        "def use():\n\
         \x20   try:\n\
         \x20       link.settimeout(20)\n\
         \x20       link.send(b'x')\n\
         \x20       return 'received ' + repr(link.recv(1))\n\
         \x20   except TimeoutError:\n\
         \x20       return 'silence'\n\
         \x20   except OSError as error:\n\
         \x20       return 'reset'\n\
         use()",
    );
    let what = tokio::time::timeout(Duration::from_secs(60), using)
        .await
        .context("the connection hangs")??;
    ensure!(what == "reset", "the parent's connection: {what}");
    Ok(())
}
