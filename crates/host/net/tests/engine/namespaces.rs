//! Two network namespaces, joined by a link: one for the engine, and one for a world.
//!
//! The addresses of the world exist only inside the namespaces. They need root.

use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// The address of the engine's host on the link.
pub const HOST: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
static NEXT: AtomicU32 = AtomicU32::new(0);

/// The namespaces. Dropping them ends them.
pub struct Namespaces {
    name: String,
}

/// Runs `ip` with these words.
pub fn ip(words: &str) {
    let output = Command::new("ip")
        .args(words.split_whitespace())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ip {words}: {errors}");
}

impl Namespaces {
    /// A world with these addresses; `None` without root.
    pub fn make(addresses: &[Ipv4Addr]) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("not root: nothing was tested");
            return None;
        }
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("fkt{}x{number}", std::process::id());
        let spaces = Self { name };
        let (e, w) = (spaces.engine(), spaces.world());
        for name in [&e, &w] {
            ip(&format!("netns add {name}"));
            ip(&format!("-n {name} link set lo up"));
        }
        ip(&format!(
            "link add up0 netns {e} type veth peer name up0 netns {w}"
        ));
        ip(&format!("-n {e} address add {HOST}/24 dev up0"));
        ip(&format!("-n {w} address add 192.0.2.2/24 dev up0"));
        for name in [&e, &w] {
            ip(&format!("-n {name} link set up0 up"));
        }
        ip(&format!("-n {e} route add default via 192.0.2.2"));
        for address in addresses {
            ip(&format!("-n {w} address add {address}/32 dev lo"));
        }
        Some(spaces)
    }

    /// The name of the namespace of the engine.
    pub fn engine(&self) -> String {
        format!("{}e", self.name)
    }

    fn world(&self) -> String {
        format!("{}w", self.name)
    }

    /// Does something in the world.
    pub fn within_world<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let file = File::open(format!("/run/netns/{}", self.world())).unwrap();
        thread::scope(|scope| {
            let inside = scope.spawn(|| {
                let network = Some(LinkNameSpaceType::Network);
                move_into_link_name_space(file.as_fd(), network).unwrap();
                work()
            });
            inside.join().unwrap()
        })
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in [self.engine(), self.world()] {
            let _ = Command::new("ip").args(["netns", "del", &name]).status();
        }
    }
}
