//! The `forkd fork` that a local TCP client has started, from the tables of the kernel.
//!
//! Processes come and go while the tables are read, so every step may find nothing.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

/// The state of a listening socket.
const LISTEN: &str = "0A";
/// The most ancestors of a client that are looked at.
const MAX_ANCESTORS: usize = 64;

/// The newest `forkd fork` that the process behind a connection, or one of its ancestors, has started.
pub fn fork_of(client: SocketAddr, local: SocketAddr) -> Option<u32> {
    let inode = inode_of(client, local)?;
    let forks = forks();
    let mut pid = process_of(&inode)?;
    for _ in 0..MAX_ANCESTORS {
        let of_pid = forks.iter().filter(|fork| fork.parent == pid);
        if let Some(newest) = of_pid.max_by_key(|fork| (fork.started, fork.pid)) {
            return Some(newest.pid);
        }
        pid = stat(pid)?.parent;
    }
    None
}

/// Whether a program listens on an IPv4 address.
pub fn is_listened(address: SocketAddr) -> bool {
    let wanted = hexadecimal(address);
    let table = fs::read_to_string("/proc/net/tcp").unwrap_or_default();
    table.lines().any(|line| {
        let mut words = line.split_ascii_whitespace().skip(1);
        words.next() == Some(&wanted) && words.nth(1) == Some(LISTEN)
    })
}

struct Process {
    pid: u32,
    parent: u32,
    /// Ticks from the start of the host to the start of the process.
    started: u64,
}

fn pids() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn stat(pid: u32) -> Option<Process> {
    parse_stat(pid, &fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// The name of a program may hold spaces and parentheses, so fields are counted from the last parenthesis.
fn parse_stat(pid: u32, text: &str) -> Option<Process> {
    let (_, fields) = text.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace();
    let parent = fields.nth(1)?.parse().ok()?;
    let started = fields.nth(17)?.parse().ok()?;
    Some(Process {
        pid,
        parent,
        started,
    })
}

/// The running `forkd fork` commands of the same program.
fn forks() -> Vec<Process> {
    let own = fs::read_link("/proc/self/exe").ok();
    let is_fork = |pid: &u32| {
        let exe = fs::read_link(format!("/proc/{pid}/exe")).ok();
        let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let mut arguments = arguments.split(|byte| *byte == 0);
        exe.is_some() && exe == own && arguments.nth(1) == Some(b"fork")
    };
    pids().filter(is_fork).filter_map(stat).collect()
}

/// The inode of the client's socket.
fn inode_of(client: SocketAddr, local: SocketAddr) -> Option<String> {
    let table = match client {
        SocketAddr::V4(_) => "/proc/net/tcp",
        SocketAddr::V6(_) => "/proc/net/tcp6",
    };
    find_inode(&fs::read_to_string(table).ok()?, client, local)
}

fn find_inode(table: &str, client: SocketAddr, local: SocketAddr) -> Option<String> {
    let (own, other) = (hexadecimal(client), hexadecimal(local));
    table.lines().find_map(|line| {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let is_it = words.get(1) == Some(&own.as_str()) && words.get(2) == Some(&other.as_str());
        words.get(9).filter(|_| is_it).map(ToString::to_string)
    })
}

/// An address as the tables have it: words of 32 bits in the byte order of the CPU.
fn hexadecimal(address: SocketAddr) -> String {
    let bytes = match address.ip() {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    let words = bytes.chunks_exact(4).map(|word| {
        let word = word.try_into().map_or(0, u32::from_le_bytes);
        format!("{word:08X}")
    });
    format!("{}:{:04X}", words.collect::<String>(), address.port())
}

/// The process that has a socket open; the oldest if several have.
fn process_of(inode: &str) -> Option<u32> {
    let wanted = format!("socket:[{inode}]");
    let has = |pid: &u32| {
        let open = fs::read_dir(format!("/proc/{pid}/fd"));
        open.into_iter()
            .flatten()
            .flatten()
            .any(|entry| fs::read_link(entry.path()).is_ok_and(|to| to == Path::new(&wanted)))
    };
    pids().filter(has).min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn the_process_behind_a_connection_is_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let local = listener.local_addr().unwrap();
        let stream = TcpStream::connect(local).unwrap();
        let inode = inode_of(stream.local_addr().unwrap(), local).unwrap();
        assert_eq!(process_of(&inode), Some(std::process::id()));
        assert_eq!(find_inode("", local, local), None);
        assert!(is_listened(local));
        drop(listener);
        assert!(!is_listened(local));
    }

    #[test]
    fn a_name_with_parentheses_does_not_confuse_the_fields() {
        let fields = (3..=30)
            .map(|n| n.to_string())
            .collect::<Vec<_>>()
            .join(" ");
        let found = parse_stat(7, &format!("7 (a) b) {fields}")).unwrap();
        assert_eq!((found.parent, found.started), (4, 22));
        let own = stat(std::process::id()).unwrap();
        assert!(own.parent > 0 && own.started > 0);
    }
}
