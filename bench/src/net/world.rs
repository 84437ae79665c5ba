//! The namespaces of the benchmark: two guests, a host for NAT, and the world with the server.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Command;

use anyhow::{Context, bail, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// The guest of the engine.
pub const GUEST: &str = "g";
/// The guest of the path with NAT, and its host.
pub const NAT_GUEST: &str = "n";
pub const NAT_HOST: &str = "h";
/// The server, and the engine.
pub const WORLD: &str = "w";
/// The address of the server. Addresses for documents exist in the namespaces only.
pub const SERVER: &str = "198.51.100.7";
const ALL: [&str; 4] = [GUEST, NAT_GUEST, NAT_HOST, WORLD];

/// Namespaces that go with this value.
pub struct World {
    prefix: String,
}

impl World {
    pub fn make() -> anyhow::Result<Self> {
        ensure!(
            rustix::process::geteuid().is_root(),
            "this benchmark makes network namespaces: run it as root"
        );
        let world = Self {
            prefix: format!("fkb{}", std::process::id()),
        };
        for name in ALL {
            world.ip(&format!("netns add {}", world.name(name)))?;
            world.ip(&format!("-n {} link set lo up", world.name(name)))?;
        }
        let (h, w) = (world.name(NAT_HOST), world.name(WORLD));
        world.ip(&format!("-n {w} address add {SERVER}/32 dev lo"))?;
        world.ip(&format!(
            "link add up0 netns {h} type veth peer name up0 netns {w}"
        ))?;
        world.ip(&format!("-n {h} address add 192.0.2.1/24 dev up0"))?;
        world.ip(&format!("-n {w} address add 192.0.2.2/24 dev up0"))?;
        world.ip(&format!("-n {h} link set up0 up"))?;
        world.ip(&format!("-n {w} link set up0 up"))?;
        world.ip(&format!("-n {h} route add default via 192.0.2.2"))?;
        Ok(world)
    }

    pub fn name(&self, namespace: &str) -> String {
        format!("{}{namespace}", self.prefix)
    }

    fn ip(&self, words: &str) -> anyhow::Result<()> {
        run("ip", words)
    }

    /// Does something in a namespace, in a thread of its own.
    pub fn within<T: Send>(
        &self,
        namespace: &str,
        work: impl FnOnce() -> anyhow::Result<T> + Send,
    ) -> anyhow::Result<T> {
        let path = format!("/run/netns/{}", self.name(namespace));
        let file = File::open(&path).with_context(|| format!("cannot open {path}"))?;
        std::thread::scope(|scope| {
            let inside = scope.spawn(|| {
                move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?;
                work()
            });
            inside.join().unwrap_or_else(|_| bail!("a thread panicked"))
        })
    }

    /// A tap device in a namespace. It gives and takes frames of up to 64 KiB.
    pub fn tap(&self, namespace: &str) -> anyhow::Result<OwnedFd> {
        self.within(namespace, || {
            let tap = forkd_sys::open_tap("tap0").context("cannot make a tap device")?;
            forkd_sys::take_large_frames(&tap).context("cannot set the offloads of a tap")?;
            Ok(tap)
        })
    }

    /// Gives a guest its address and its route.
    pub fn address(&self, guest: &str) -> anyhow::Result<()> {
        let name = self.name(guest);
        self.ip(&format!("-n {name} address add 10.42.0.2/24 dev tap0"))?;
        self.ip(&format!("-n {name} link set tap0 up"))?;
        self.ip(&format!("-n {name} route add default via 10.42.0.1"))
    }

    /// Lets the host of the other path forward, with NAT if `nft` is installed. Returns whether it has NAT.
    pub fn route(&self) -> anyhow::Result<bool> {
        let (h, w) = (self.name(NAT_HOST), self.name(WORLD));
        self.ip(&format!("-n {h} address add 10.42.0.1/24 dev tap0"))?;
        self.ip(&format!("-n {h} link set tap0 up"))?;
        self.within(NAT_HOST, || {
            std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").context("cannot forward packets")
        })?;
        let rules = "add table ip nat; add chain ip nat post { type nat hook postrouting priority 100; }; \
                     add rule ip nat post oifname up0 masquerade";
        let masked = Command::new("ip")
            .args(["netns", "exec", &h, "nft", rules])
            .status()
            .is_ok_and(|status| status.success());
        if !masked {
            self.ip(&format!("-n {w} route add 10.42.0.0/24 via 192.0.2.1"))?;
        }
        Ok(masked)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for name in ALL {
            // A namespace that was not made is no failure here.
            let _ = run("ip", &format!("netns del {}", self.name(name)));
        }
    }
}

fn run(program: &str, words: &str) -> anyhow::Result<()> {
    let output = Command::new(program)
        .args(words.split_whitespace())
        .output()
        .with_context(|| format!("cannot start {program}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{program} {words}: {}",
        errors.trim()
    );
    Ok(())
}
