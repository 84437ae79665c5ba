//! Debian's registry on loopback, and a gate before it that closes after a number of bytes.

#[path = "../../../oci/tests/debian_registry/mod.rs"]
mod debian_registry;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use forkd_hub::remote::{Cache, Registry};
use forkd_oci::auth::Helpers;
use forkd_oci::manifest::Platform;
use forkd_oci::registries::Registries;
use forkd_oci::registry::Pull;

use debian_registry::Server;

/// A registry with an empty storage.
pub fn serve() -> Server {
    Server::start(tempfile::tempdir().unwrap(), "")
}

/// A repository behind a host and port, with what a client keeps in a folder.
pub fn repository(host: &str, cache: &Path) -> Registry {
    let name = format!("{host}/team/machines:py").parse().unwrap();
    let registries = Registries::default();
    let access = Pull {
        name: &name,
        platform: &Platform::host(),
        registries: &registries,
        credential: None,
        auth_files: Vec::new(),
        helpers: Helpers::Ignore,
    };
    let cache = Cache::at(cache, Arc::new(AtomicBool::new(false))).unwrap();
    Registry::open(&access, cache).unwrap()
}

/// Passes connections on, until a number of bytes has passed in one direction. Then it breaks and refuses them.
pub struct Gate {
    pub host: String,
    left: Arc<AtomicI64>,
    up: Arc<AtomicU64>,
    down: Arc<AtomicU64>,
}

impl Gate {
    pub fn before(server: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let gate = Self {
            host: listener.local_addr().unwrap().to_string(),
            left: Arc::new(AtomicI64::new(i64::MAX)),
            up: Arc::default(),
            down: Arc::default(),
        };
        let server = server.to_owned();
        let (left, up, down) = (gate.left.clone(), gate.up.clone(), gate.down.clone());
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let Ok(client) = client else { return };
                let Ok(upstream) = TcpStream::connect(&server) else {
                    continue;
                };
                pass(&client, &upstream, &left, &up);
                pass(&upstream, &client, &left, &down);
            }
        });
        gate
    }

    /// Breaks everything once this many more bytes have passed, both ways together.
    pub fn close_after(&self, bytes: u64) {
        self.left.store(bytes as i64, Ordering::SeqCst);
    }

    pub fn open(&self) {
        self.left.store(i64::MAX, Ordering::SeqCst);
    }

    /// Bytes that have passed to the server, and from it.
    pub fn passed(&self) -> (u64, u64) {
        (
            self.up.load(Ordering::SeqCst),
            self.down.load(Ordering::SeqCst),
        )
    }
}

fn pass(from: &TcpStream, to: &TcpStream, left: &Arc<AtomicI64>, count: &Arc<AtomicU64>) {
    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
    let (left, count) = (left.clone(), count.clone());
    std::thread::spawn(move || {
        let mut buffer = vec![0; 16 << 10];
        while let Ok(read) = from.read(&mut buffer) {
            let before = left.fetch_sub(read as i64, Ordering::SeqCst);
            let allowed = usize::try_from(before).unwrap_or(0).min(read);
            if read == 0 || to.write_all(&buffer[..allowed]).is_err() || allowed < read {
                break;
            }
            count.fetch_add(read as u64, Ordering::SeqCst);
        }
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    });
}
