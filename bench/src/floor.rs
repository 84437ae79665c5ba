//! The floor: bare system calls, one process per VM, measured in the same run as the product.
//!
//! Each floor child is this program again, started with a hidden subcommand. Parent and child exchange single
//! bytes over a socket.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use forkd_probe::floor::FloorShell;
use forkd_types::MiB;
use rustix::event::{PollFd, PollFlags, poll};

/// Bytes of the protocol between parent and child.
const READY: u8 = b'r';
const GO: u8 = b'g';
const DONE: u8 = b'd';

/// The hidden subcommand of a floor child.
pub const CHILD: &str = "floor-child";

/// Durations of one burst.
#[derive(Debug)]
pub struct Burst {
    /// From the first start signal to the last byte.
    pub wall: Duration,
    /// From each child's start signal to its byte.
    pub each: Vec<Duration>,
}

/// Forks `n` pooled shells at once and waits for the first port write of each.
pub fn burst(image: &File, memory: MiB, n: usize) -> anyhow::Result<Burst> {
    let mut children = Vec::with_capacity(n);
    for _ in 0..n {
        children.push(FloorChild::start(image, memory)?);
    }
    for child in &mut children {
        child
            .expect(READY)
            .context("a floor child did not get ready")?;
    }
    // The children have just been created; let the kernel finish with that before the clock starts.
    std::thread::sleep(Duration::from_millis(200));
    let begun = Instant::now();
    let mut started = Vec::with_capacity(n);
    for child in &mut children {
        started.push(Instant::now());
        child.stream.write_all(&[GO])?;
    }
    let each = wait_for_all(&children, &started)?;
    Ok(Burst {
        wall: begun.elapsed(),
        each,
    })
}

fn wait_for_all(children: &[FloorChild], started: &[Instant]) -> anyhow::Result<Vec<Duration>> {
    let mut each = vec![None; children.len()];
    let mut left = children.len();
    while left > 0 {
        let open: Vec<usize> = (0..children.len())
            .filter(|at| each[*at].is_none())
            .collect();
        let mut polled: Vec<PollFd<'_>> = open
            .iter()
            .map(|at| PollFd::new(&children[*at].stream, PollFlags::IN))
            .collect();
        poll(&mut polled, None)?;
        let now = Instant::now();
        for (at, entry) in open.iter().zip(&polled) {
            if entry.revents().is_empty() {
                continue;
            }
            let mut byte = [0];
            let got = (&children[*at].stream).read(&mut byte)?;
            ensure!(got == 1 && byte[0] == DONE, "a floor child failed");
            each[*at] = Some(now - started[*at]);
            left -= 1;
        }
    }
    Ok(each.into_iter().flatten().collect())
}

#[derive(Debug)]
struct FloorChild {
    process: Child,
    stream: UnixStream,
}

impl FloorChild {
    fn start(image: &File, memory: MiB) -> anyhow::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let process = Command::new(std::env::current_exe()?)
            .args([CHILD, &memory.0.to_string()])
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::from(image.try_clone()?))
            .spawn()
            .context("a floor child did not start")?;
        Ok(Self {
            process,
            stream: ours,
        })
    }

    fn expect(&mut self, wanted: u8) -> anyhow::Result<()> {
        let mut byte = [0];
        self.stream.read_exact(&mut byte)?;
        if byte[0] != wanted {
            bail!("a floor child said {:?}", char::from(byte[0]));
        }
        Ok(())
    }
}

impl Drop for FloorChild {
    fn drop(&mut self) {
        // Both calls fail only if the child has ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A floor child: standard input is the socket to the parent, standard output is the image.
pub fn child(memory: MiB) -> anyhow::Result<()> {
    let image = File::from(std::io::stdout().as_fd().try_clone_to_owned()?);
    let mut stream = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let mut shell = FloorShell::create(usize::try_from(memory.bytes())?)?;
    stream.write_all(&[READY])?;
    let mut byte = [0];
    stream.read_exact(&mut byte)?;
    shell.fork(&image)?;
    stream.write_all(&[DONE])?;
    // The VM stays until the parent has seen all children.
    let _ = stream.read(&mut byte);
    Ok(())
}
