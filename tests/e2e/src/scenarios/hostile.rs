//! A hostile guest harms only itself.
//!
//! The guest writes random values to registers, queues and the agent's connection, exhausts processes and
//! memory, and floods the console.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use forkd_agent_client::Calls;
use forkd_guest_proto::{ExecRequest, ExitStatus};
use forkd_testkit::{BootOptions, Disk, Kit, Root, Vm, procfs};
use forkd_vmm_proto::{AGENT_PORT, Command, ExitCode, Reply, spawn::HowEnded};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::scenario::{Registered, Run, everyday, times};
use crate::support::deaf_network;

pub const SCENARIOS: &[Registered] = &[
    everyday!(rubbish_in_registers_and_queues),
    everyday!(fork_bomb_and_no_memory),
    everyday!(rubbish_for_the_agent),
    everyday!(console_flood),
];

/// Writes rubbish to the registers and queues of virtio devices, by way of /dev/mem. The queues lie in pages
/// of its own, and descriptors point there or nowhere, so that the devices that are spared go on working;
/// with `all` nothing is spared and addresses are anything.
const RUBBISH: &str = r#"
import ctypes, mmap, os, random, struct, sys, time
seed, seconds, everything = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "all"
random.seed(seed)
PAGE, PAGES = 4096, 16

own = mmap.mmap(-1, PAGE * PAGES, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
own[:] = b"\1" * len(own)
start = ctypes.addressof(ctypes.c_char.from_buffer(own))
ctypes.CDLL(None).mlock(ctypes.c_void_p(start), len(own))
with open("/proc/self/pagemap", "rb") as pagemap:
    pagemap.seek(start // PAGE * 8)
    frames = [entry & ((1 << 55) - 1) for (entry,) in struct.iter_unpack("<Q", pagemap.read(8 * PAGES))]
assert all(frames), "no physical addresses"

class Window:
    def __init__(self, memory, address):
        self.memory = mmap.mmap(memory, PAGE, offset=address)
        self.kind = self[8]
    def __getitem__(self, at):
        return ctypes.c_uint32.from_buffer(self.memory, at).value
    def __setitem__(self, at, value):
        ctypes.c_uint32.from_buffer(self.memory, at).value = value & 0xFFFFFFFF

addresses = sorted({int(line.split("-")[0], 16) for line in open("/proc/iomem") if "LNRO0005" in line})
assert addresses, "no virtio windows: " + open("/proc/iomem").read()
memory = os.open("/dev/mem", os.O_RDWR | os.O_SYNC)
windows = [window for window in (Window(memory, address) for address in addresses) if window.kind]
root = next((window for window in windows if window.kind == 2), None)
targets = [w for w in windows if everything or (w.kind != 19 and w is not root)]
print(len(windows), len(targets), flush=True)

def address():
    nowhere = [0, 1, 0xD0000000, 0xFEE00000, 1 << 40, (1 << 64) - 1, (1 << 63), 0xFFFFFFFF]
    if everything:
        nowhere.append(random.randrange(1 << 28))
    return random.choice(nowhere + [random.choice(frames) * PAGE] * 8)

def rubbish_queue():
    for n in range(256):
        length = random.choice([0, 1, 2, 8, 16, 44, 512, 4096, 0x7FFFFFFF, 0xFFFFFFFF])
        entry = struct.pack("<QIHH", address(), length, random.choice([0, 1, 2, 3, 4, 5, 7, 0xFFFF]),
                            random.choice([n, (n + 1) % 256, random.randrange(65536)]))
        own[n * 16:n * 16 + 16] = entry
    ring = [random.choice([random.randrange(256), random.randrange(65536)]) for _ in range(256)]
    index = random.choice([0, 1, 3, 255, 256, 32768, 65535, random.randrange(65536)])
    own[PAGE:PAGE + 516] = struct.pack("<HH256H", random.choice([0, 1]), index, *ring)

def configured(window):
    window[0x70] = 0
    window[0x70] = 1
    window[0x70] = 3
    for part in (0, 1):
        window[0x14] = part
        window[0x24] = part
        window[0x20] = window[0x10] if random.random() < 0.9 else random.getrandbits(32)
    window[0x70] = 11
    queues = 0
    for queue in range(4):
        window[0x30] = queue
        most = window[0x34]
        if not most:
            continue
        queues += 1
        window[0x38] = most if random.random() < 0.7 else random.choice([0, 1, 2, 3, most * 2, 0xFFFF])
        good = random.random() < 0.8
        for at, page in ((0x80, 0), (0x90, 1), (0xA0, 2)):
            place = frames[page] * PAGE if good else address()
            window[at] = place
            window[at + 4] = place >> 32
        window[0x44] = 1
    window[0x70] = 15
    for _ in range(8):
        rubbish_queue()
        window[0x50] = random.choice([0, 1, 2, queues, 0xFFFF, random.getrandbits(32)])
        if random.random() < 0.3:  # a queue that changes while it runs
            window[0x30] = random.randrange(4)
            window[random.choice([0x38, 0x44, 0x80, 0x84, 0x90, 0xA0, 0xA4])] = random.getrandbits(32)

def anywhere(window):
    for _ in range(64):
        at = random.choice([random.randrange(0, 0x110, 4), random.randrange(0, PAGE, 4)])
        if random.random() < 0.1:  # odd sizes and places
            kind = random.choice([ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint64])
            place = min(at + random.randrange(4), PAGE - 8)
            kind.from_buffer(window.memory, place).value = random.getrandbits(64)
        else:
            window[at] = random.choice([0, 1, 0xFFFFFFFF, random.getrandbits(32), random.getrandbits(8)])
        window[random.randrange(0, 0x110, 4)]

end = time.monotonic() + seconds
rounds = 0
while time.monotonic() < end:
    for window in targets:
        (configured if random.random() < 0.7 else anywhere)(window)
        rounds += 1
for window in targets:
    window[0x70] = 0
print(rounds, flush=True)
"#;

pub async fn rubbish_in_registers_and_queues(run: Run) -> anyhow::Result<()> {
    let folder = run.kit.folder("disks")?;
    let (_deaf, net) = deaf_network()?;
    let options = BootOptions {
        vcpus: 2,
        cmdline: "iomem=relaxed".into(),
        disks: vec![Disk::empty(&folder, "spare", 64 << 20)?],
        net: Some(net),
        ..Default::default()
    };
    let vm = run.kit.boot(options).await?;
    let seed: u32 = rand::random();
    let seconds = times(5, 60).to_string();
    let args = [seed.to_string(), seconds.clone(), "spare".to_owned()];
    let said = vm
        .python(RUBBISH, &args.each_ref().map(String::as_str))
        .await
        .with_context(|| format!("seed {seed}"))?;
    eprintln!("rubbish with seed {seed}: {}", said.replace('\n', ", "));
    ensure!(vm.sh("echo here").await? == "here", "the agent is gone");
    does_not_spin(&vm).await?;

    let everything = ExecRequest {
        argv: ["python3", "-c", RUBBISH, &seed.to_string(), &seconds, "all"]
            .map(str::to_owned)
            .to_vec(),
        ..Default::default()
    };
    vm.agent().await?.start(everything).await?;
    outlives(&vm)
        .await
        .with_context(|| format!("seed {seed}"))?;
    others_go_on(&run.kit).await
}

/// After the attack the VMM answers and rests, or the VM has ended by itself.
async fn outlives(vm: &Vm) -> anyhow::Result<()> {
    let mut rested = 0;
    for _ in 0..times(30, 120) {
        tokio::time::sleep(Duration::from_secs(1)).await;
        if !procfs::is_alive(vm.pid()) {
            let how = vm.wait_end().await?;
            let own = [
                ExitCode::Ok,
                ExitCode::Reset,
                ExitCode::GuestPanic,
                ExitCode::VcpuFailed,
            ];
            ensure!(
                own.iter().any(|code| how == HowEnded::Code(*code as u8)),
                "the VMM ended with {how:?}"
            );
            return Ok(());
        }
        answers(vm).await?;
        match does_not_spin(vm).await {
            Ok(()) => rested += 1,
            Err(_) => rested = 0,
        }
        // The attack takes time; after it the VMM must rest.
        if rested == times(12, 70) {
            return Ok(());
        }
    }
    does_not_spin(vm).await
}

async fn answers(vm: &Vm) -> anyhow::Result<()> {
    let asking = vm.vmm.call(Command::Status, &[]);
    match tokio::time::timeout(Duration::from_secs(10), asking).await {
        Ok(Ok(Reply::Status(_))) => Ok(()),
        // The VM may end at any moment.
        Ok(Err(_)) if !procfs::is_alive(vm.pid()) => Ok(()),
        Ok(other) => bail!("{other:?} is no status"),
        Err(_) => bail!("the VMM does not answer"),
    }
}

/// The device threads rest while the guest gives them no work.
async fn does_not_spin(vm: &Vm) -> anyhow::Result<()> {
    let window = Duration::from_secs(1);
    let Ok(before) = procfs::own_time(vm.pid()) else {
        return Ok(());
    };
    tokio::time::sleep(window).await;
    let Ok(after) = procfs::own_time(vm.pid()) else {
        return Ok(());
    };
    let used = after.saturating_sub(before);
    ensure!(used < window / 2, "the VMM used {used:?} of {window:?}");
    Ok(())
}

async fn others_go_on(kit: &Kit) -> anyhow::Result<()> {
    let options = BootOptions {
        root: Root::None,
        ..Default::default()
    };
    kit.boot(options).await?.agent().await?.ping().await?;
    Ok(())
}

pub async fn fork_bomb_and_no_memory(run: Run) -> anyhow::Result<()> {
    let vm = run.kit.boot(BootOptions::default()).await?;
    let agent = vm.agent().await?;
    out_of_memory(&agent).await?;
    ensure!(vm.sh("echo here").await? == "here", "after no memory");
    fork_bomb(&agent).await?;
    ensure!(vm.sh("echo here").await? == "here", "after a fork bomb");
    Ok(())
}

async fn out_of_memory(agent: &Calls) -> anyhow::Result<()> {
    let request = ExecRequest {
        argv: [
            "python3",
            "-c",
            "x = []\nwhile True: x.append(b'x' * 10_000_000)",
        ]
        .map(str::to_owned)
        .to_vec(),
        ..Default::default()
    };
    let done = agent.exec_capture(request).await?;
    let by_kernel = done.result.status == ExitStatus::Signal(9);
    let by_python = String::from_utf8_lossy(&done.stderr).contains("MemoryError");
    ensure!(by_kernel || by_python, "{done:?}");
    agent.ping().await?;
    Ok(())
}

async fn fork_bomb(agent: &Calls) -> anyhow::Result<()> {
    let bomb = agent
        .start(ExecRequest {
            argv: ["bash", "-c", "b() { b | b & }; b; exec sleep 600"]
                .map(str::to_owned)
                .to_vec(),
            ..Default::default()
        })
        .await?;
    for _ in 0..5 {
        let answer = tokio::time::timeout(Duration::from_secs(60), agent.ping()).await;
        answer.context("the agent does not answer under a fork bomb")??;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    agent.forget(bomb.process).await?;
    let calm = async {
        loop {
            if agent.metrics().await?.processes < 100 {
                return anyhow::Ok(());
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(120), calm)
        .await
        .context("the bomb goes on after its end")?
}

pub async fn rubbish_for_the_agent(run: Run) -> anyhow::Result<()> {
    let vm = run.kit.boot(BootOptions::default()).await?;
    let good = vm.agent().await?;
    let mut silent = Vec::new();
    for number in 0..times(40, 1_000) {
        let mut stream = raw(&vm).await?;
        let length = rand::random_range(0..20_000);
        let mut bytes: Vec<u8> = (0..length).map(|_| rand::random()).collect();
        if number % 2 == 0 {
            // A valid length and kind, followed by random bytes.
            let mut header = 40u32.to_le_bytes().to_vec();
            header.extend_from_slice(&[0, 0, 0, 0, (number % 9) as u8, 0, 0, 0]);
            bytes.splice(0..0, header);
        }
        // The agent may close the connection at any byte.
        let _ = stream.write_all(&bytes).await;
        if number % 4 == 0 {
            silent.push(stream);
        } else {
            drain(stream).await?;
        }
    }
    good.ping().await?;
    ensure!(vm.sh("echo here").await? == "here", "the agent is gone");
    does_not_spin(&vm).await
}

async fn raw(vm: &Vm) -> anyhow::Result<UnixStream> {
    let mut stream = UnixStream::connect(vm.agent_socket()).await?;
    stream
        .write_all(format!("CONNECT {AGENT_PORT}\n").as_bytes())
        .await?;
    while stream.read_u8().await? != b'\n' {}
    Ok(stream)
}

/// Closes our side and reads the rest.
async fn drain(mut stream: UnixStream) -> anyhow::Result<()> {
    // The agent may have closed the connection because of invalid data.
    let _ = stream.shutdown().await;
    let mut rest = Vec::new();
    let reading = stream.read_to_end(&mut rest);
    match tokio::time::timeout(Duration::from_secs(60), reading).await {
        Ok(_) => Ok(()),
        Err(_) => bail!("the agent holds on to a connection that ended"),
    }
}

/// The console file accepts its limit, and no more.
pub async fn console_flood(run: Run) -> anyhow::Result<()> {
    // Every byte is an exit of the guest, which is slow in an emulated machine.
    let limit = 20 << 10;
    let options = BootOptions {
        console_limit: limit,
        ..Default::default()
    };
    let vm = run.kit.boot(options).await?;
    let before = procfs::memory(vm.pid())?.own_pss;
    vm.sh("head -c 60000 /dev/zero | tr '\\0' x > /dev/ttyS0")
        .await?;
    let length = std::fs::metadata(vm.folder().join("console.log"))?.len();
    ensure!(
        length > limit / 2 && length <= limit,
        "the console has {length} bytes"
    );
    let grown = procfs::memory(vm.pid())?.own_pss.saturating_sub(before);
    ensure!(grown < 2 << 10, "the VMM grew by {grown} KiB");
    does_not_spin(&vm).await
}
