//! A confined thread reaches its folder, the network, and nothing else. One test: it limits the whole process.

use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;

use forkd_image::confine::confine;

#[test]
fn only_the_folder_and_the_network_are_left() {
    let inside = tempfile::tempdir().unwrap();
    let outside = tempfile::tempdir().unwrap();
    let secret = outside.path().join("secret");
    std::fs::write(&secret, "key").unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let folder = inside.path().to_owned();
    let attempts = std::thread::spawn(move || {
        confine(&[&folder], &[]).unwrap();
        std::fs::write(folder.join("mine"), "x").unwrap();
        std::fs::rename(folder.join("mine"), folder.join("still-mine")).unwrap();
        TcpStream::connect(address).unwrap();
        // Programs of the host can be run: the disk of an image is checked by one.
        assert!(Command::new("true").status().unwrap().success());
        let denied =
            |result: std::io::Result<()>| result.unwrap_err().kind() == ErrorKind::PermissionDenied;
        let read = |path: &Path| std::fs::read(path).map(drop);
        assert!(denied(read(&secret)));
        assert!(denied(read(Path::new("/etc/passwd"))));
        assert!(denied(read(Path::new("/proc/1/environ"))));
        assert!(denied(std::fs::write(&secret, "y")));
        assert!(denied(std::fs::write("/usr/x", "y")));
        // The kernel answers as for another file system.
        assert!(std::fs::hard_link(&secret, folder.join("link")).is_err());
        let me = rustix::process::getpid();
        let killed = rustix::process::kill_process(me, rustix::process::Signal::CONT);
        assert_eq!(killed, Err(rustix::io::Errno::PERM));
        assert_eq!(
            rustix::process::chroot("/usr"),
            Err(rustix::io::Errno::PERM)
        );
    });
    attempts.join().unwrap();
    assert_eq!(
        std::fs::read(outside.path().join("secret")).unwrap(),
        b"key"
    );
}
