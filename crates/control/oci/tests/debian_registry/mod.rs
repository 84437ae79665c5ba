//! Debian's registry on loopback, for the tests of this crate and of the hub.

use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A running registry. It ends with this value.
pub struct Server {
    /// Host and port.
    pub host: String,
    folder: tempfile::TempDir,
    child: Child,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    /// Starts a registry that keeps its files in a folder. `more` is appended to its configuration.
    pub fn start(folder: tempfile::TempDir, more: &str) -> Self {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = free.local_addr().unwrap().to_string();
        drop(free);
        let storage = folder.path().join("storage");
        let config = format!(
            "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\nhttp: {{addr: '{host}', relativeurls: true}}\n{more}",
            storage.display(),
        );
        let path = folder.path().join("config.yml");
        std::fs::write(&path, config).unwrap();
        let child = Command::new(program())
            .arg("serve")
            .arg(&path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("Debian's docker-registry is missing: run scripts/unpack-tools.sh");
        let server = Self {
            host,
            folder,
            child,
        };
        let started = Instant::now();
        while TcpStream::connect(&server.host).is_err() {
            assert!(
                started.elapsed() < Duration::from_secs(60),
                "the registry does not listen"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        server
    }

    /// The file of a blob in the storage of the registry.
    pub fn blob(&self, hex: &str) -> PathBuf {
        let folder = "storage/docker/registry/v2/blobs/sha256";
        let folder = self.folder.path().join(folder);
        folder.join(&hex[..2]).join(hex).join("data")
    }
}

/// The program: where `scripts/unpack-tools.sh` unpacks it, or in PATH.
fn program() -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default());
    let cache = cache.unwrap_or_else(|| home().join(".cache"));
    let unpacked = cache.join("forkd/tools/usr/bin/docker-registry");
    if unpacked.exists() {
        return unpacked;
    }
    "docker-registry".into()
}
