//! Debian's registry on loopback, and a gate before it that closes after a number of bytes.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forkd_hub::remote::{Cache, Registry};
use forkd_oci::auth::Helpers;
use forkd_oci::manifest::Platform;
use forkd_oci::registries::Registries;
use forkd_oci::registry::Pull;

/// A running registry. It ends with this value.
pub struct Server {
    pub host: String,
    pub folder: tempfile::TempDir,
    child: Child,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A program: in PATH, or where `scripts/unpack-tools.sh` unpacks it.
pub fn program(name: &str) -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default());
    let cache = cache.unwrap_or_else(|| home().join(".cache"));
    let unpacked = cache.join("forkd/tools/usr/bin").join(name);
    if unpacked.exists() {
        return unpacked;
    }
    name.into()
}

impl Server {
    pub fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = free.local_addr().unwrap().to_string();
        drop(free);
        let path = folder.path().join("config.yml");
        let config = format!(
            "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\nhttp: {{addr: '{host}', relativeurls: true}}\n",
            folder.path().join("storage").display()
        );
        std::fs::write(&path, config).unwrap();
        let child = Command::new(program("docker-registry"))
            .arg("serve")
            .arg(&path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("Debian's docker-registry is missing: run scripts/unpack-tools.sh");
        let started = Instant::now();
        while TcpStream::connect(&host).is_err() {
            assert!(started.elapsed() < Duration::from_secs(60), "not up");
            std::thread::sleep(Duration::from_millis(20));
        }
        Self {
            host,
            folder,
            child,
        }
    }

    /// The file of a blob in the storage of the registry.
    pub fn blob(&self, hex: &str) -> PathBuf {
        let folder = self
            .folder
            .path()
            .join("storage/docker/registry/v2/blobs/sha256");
        folder.join(&hex[..2]).join(hex).join("data")
    }
}

/// The repository of most tests.
pub fn repository(host: &str, cache: &Path) -> Registry {
    repository_of(&format!("{host}/team/machines"), cache)
}

/// A repository, with what a client keeps in a folder.
pub fn repository_of(name: &str, cache: &Path) -> Registry {
    let name = name.parse().unwrap();
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
