//! A network for one guest: a namespace on the host with a tap device in it.
//!
//! [`Pump`] connects a tap device to a socket, for the socket back end of the network device. Needs root.

use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use anyhow::{Context, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socketpair};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Name of the interface in the namespace.
const TAP: &str = "tap0";
/// Longer than any frame with its header.
const FRAME: usize = 66_000;

/// A network namespace. Dropping it deletes the namespace.
#[derive(Debug)]
pub struct Namespace {
    name: String,
    handle: File,
}

impl Namespace {
    /// Creates a namespace with its loopback device up.
    pub fn new() -> anyhow::Result<Self> {
        let name = format!("forkd-{:08x}", rand::random::<u32>());
        ip(&["netns", "add", &name])?;
        let handle = File::open(format!("/run/netns/{name}"))?;
        let namespace = Self { name, handle };
        namespace.ip(&["link", "set", "lo", "up"])?;
        Ok(namespace)
    }

    /// Makes a tap device with an address, up: a [`forkd_vmm_proto::NetBackend::Tap`].
    pub fn tap(&self, address: &str) -> anyhow::Result<OwnedFd> {
        let tap = self.inside(|| forkd_sys::open_tap(TAP))??;
        self.ip(&["addr", "add", address, "dev", TAP])?;
        self.ip(&["link", "set", TAP, "up"])?;
        Ok(tap)
    }

    /// Runs a function to its end on a thread in the namespace.
    pub fn inside<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> anyhow::Result<T> {
        self.spawn(work)?
            .join()
            .map_err(|_| anyhow::anyhow!("a thread in the namespace panicked"))
    }

    /// Starts a thread in the namespace.
    pub fn spawn<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> anyhow::Result<JoinHandle<T>> {
        let handle = self.handle.try_clone()?;
        let (entered, wait) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let moved = move_into_link_name_space(handle.as_fd(), Some(LinkNameSpaceType::Network));
            let inside = moved.is_ok();
            let _ = entered.send(moved);
            assert!(inside, "not in the namespace");
            work()
        });
        wait.recv()
            .context("the thread is gone")?
            .context("cannot enter a network namespace")?;
        Ok(thread)
    }

    fn ip(&self, args: &[&str]) -> anyhow::Result<()> {
        let mut all = vec!["-n", &self.name];
        all.extend(args);
        ip(&all)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // A failure leaves an empty namespace with a random name.
        let _ = ip(&["netns", "del", &self.name]);
    }
}

fn ip(args: &[&str]) -> anyhow::Result<()> {
    let output = Command::new("ip")
        .args(args)
        .output()
        .context("cannot run ip")?;
    ensure!(
        output.status.success(),
        "ip {}: {}",
        args.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}

/// Copies frames between a tap device and a socket until it is dropped.
#[derive(Debug)]
pub struct Pump {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Pump {
    /// Starts copying. Returns the end of the socket for [`forkd_vmm_proto::NetBackend::Socket`].
    pub fn start(tap: OwnedFd) -> anyhow::Result<(Self, OwnedFd)> {
        let (near, far) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                if carry(&tap, &near).is_err() {
                    return;
                }
            }
        });
        let pump = Self {
            stop,
            thread: Some(thread),
        };
        Ok((pump, far))
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread shows up in the test: no frame arrives.
            let _ = thread.join();
        }
    }
}

/// Waits a short time for a frame on either side, and copies it.
fn carry(tap: &OwnedFd, socket: &OwnedFd) -> std::io::Result<()> {
    let mut ready = [
        PollFd::new(tap, PollFlags::IN),
        PollFd::new(socket, PollFlags::IN),
    ];
    let moment = Timespec {
        tv_sec: 0,
        tv_nsec: 100_000_000,
    };
    poll(&mut ready, Some(&moment))?;
    let [from_tap, from_socket] = ready.map(|fd| fd.revents());
    let mut frame = [0; FRAME];
    if from_tap.contains(PollFlags::IN)
        && let Some(length) = read_frame(tap, &mut frame)?
    {
        send(
            socket,
            frame.get(..length).unwrap_or_default(),
            SendFlags::NOSIGNAL,
        )?;
    }
    if from_socket.contains(PollFlags::IN)
        && let Some(length) = read_frame(socket, &mut frame)?
    {
        match rustix::io::write(tap, frame.get(..length).unwrap_or_default()) {
            // A frame that the interface refuses is lost, as on any network.
            Ok(_) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INVAL) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn read_frame(fd: &OwnedFd, frame: &mut [u8]) -> std::io::Result<Option<usize>> {
    match rustix::io::read(fd, frame) {
        Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
        Ok(length) => Ok(Some(length)),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
