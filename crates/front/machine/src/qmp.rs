//! Client of QEMU's control socket (QMP).
//!
//! The client sends one command at a time and waits for its response with a timeout. Events that arrive in
//! between are skipped.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use crate::error::MachineError;

const TIMEOUT: Duration = Duration::from_secs(10);
/// Upper bound on events before a response. More mean that the peer is not QEMU.
const MAX_EVENTS: usize = 1000;

/// A connection to QEMU's control socket.
#[derive(Debug)]
pub struct Qmp {
    stream: BufReader<UnixStream>,
}

/// A port of the host that is forwarded into the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forward {
    pub host_port: u16,
    pub guest_port: u16,
}

impl Qmp {
    /// Connects and completes the QMP handshake.
    pub fn connect(path: &Path) -> Result<Self, MachineError> {
        Self::open(path).map_err(|source| MachineError::Qmp {
            path: path.to_owned(),
            source,
        })
    }

    fn open(path: &Path) -> io::Result<Self> {
        // The address of a socket holds 107 bytes, which a deep state directory exceeds; the way over
        // the directory's descriptor is always short.
        let (dir, name) = match (path.parent(), path.file_name()) {
            (Some(dir), Some(name)) => (File::open(dir)?, name),
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        };
        let short = Path::new("/proc/self/fd")
            .join(dir.as_raw_fd().to_string())
            .join(name);
        let stream = UnixStream::connect(short)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        let mut qmp = Self {
            stream: BufReader::new(stream),
        };
        qmp.read()?;
        qmp.ask("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// The state of the VM: `running`, `io-error`, `paused` and so on.
    pub fn status(&mut self) -> io::Result<String> {
        let answer = self.ask("query-status", json!({}))?;
        answer["status"]
            .as_str()
            .map(str::to_owned)
            .ok_or_else(unexpected)
    }

    /// Resumes a paused VM.
    pub fn resume(&mut self) -> io::Result<()> {
        self.ask("cont", json!({})).map(drop)
    }

    /// Ends QEMU after it has written its disks. QEMU may exit before it responds.
    pub fn quit(&mut self) -> io::Result<()> {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        match self.ask("quit", json!({})) {
            Err(error) => match error.kind() {
                BrokenPipe | ConnectionReset | UnexpectedEof => Ok(()),
                _ => Err(error),
            },
            Ok(_) => Ok(()),
        }
    }

    /// The forwarded ports.
    pub fn forwards(&mut self) -> io::Result<Vec<Forward>> {
        let answer = self.ask(
            "human-monitor-command",
            json!({ "command-line": "info usernet" }),
        )?;
        answer.as_str().map(parse_forwards).ok_or_else(unexpected)
    }

    fn ask(&mut self, command: &str, arguments: Value) -> io::Result<Value> {
        let mut line = json!({ "execute": command, "arguments": arguments }).to_string();
        line.push('\n');
        self.stream.get_mut().write_all(line.as_bytes())?;
        for _ in 0..MAX_EVENTS {
            let mut answer = self.read()?;
            if let Some(result) = answer.get_mut("return") {
                return Ok(result.take());
            }
            if let Some(error) = answer.get("error") {
                let text = error["desc"].as_str().unwrap_or("unknown error");
                return Err(io::Error::other(format!("{command}: {text}")));
            }
        }
        Err(unexpected())
    }

    fn read(&mut self) -> io::Result<Value> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        serde_json::from_str(&line).map_err(io::Error::from)
    }
}

fn unexpected() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "unexpected answer from qemu")
}

/// Lines look like `TCP[HOST_FORWARD]  12  127.0.0.1 34997  10.0.2.15  8889  0  0`.
fn parse_forwards(text: &str) -> Vec<Forward> {
    text.lines()
        .filter_map(|line| {
            let words: Vec<&str> = line.split_ascii_whitespace().collect();
            match words.as_slice() {
                ["TCP[HOST_FORWARD]", _, _, host, _, guest, ..] => Some(Forward {
                    host_port: host.parse().ok()?,
                    guest_port: guest.parse().ok()?,
                }),
                _ => None,
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::thread;

    #[test]
    fn forwards_are_found_among_connections() {
        let text = "Hub -1 (n):\r\n  Protocol[State]    FD  Source Address  Port   Dest. Address  Port RecvQ SendQ\r\n  \
            TCP[HOST_FORWARD]  12       127.0.0.1 34997       10.0.2.15    22     0     0\r\n  \
            TCP[ESTABLISHED]   14       127.0.0.1 34997       10.0.2.15    22     0     0\r\n  \
            TCP[HOST_FORWARD]  11       127.0.0.1 45255       10.0.2.15  8889     0     0\r\n";
        assert_eq!(
            parse_forwards(text),
            [
                Forward {
                    host_port: 34997,
                    guest_port: 22
                },
                Forward {
                    host_port: 45255,
                    guest_port: 8889
                }
            ]
        );
    }

    /// A fake QEMU: sends the first line at once, and each other line after a command.
    fn play(lines: &'static [&'static str]) -> (tempfile::TempDir, std::path::PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir
            .path()
            .join("a-directory-whose-name-is-so-long-that-no-socket-address-holds-it");
        let deep = deep.join("and-another-one-below-it");
        std::fs::create_dir_all(&deep).unwrap();
        let path = deep.join("qmp.sock");
        let short = dir.path().join("s");
        let listener = UnixListener::bind(&short).unwrap();
        std::fs::rename(&short, &path).unwrap();
        thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(stream);
            for (index, said) in lines.iter().enumerate() {
                if index > 0 {
                    reader.read_line(&mut String::new()).unwrap();
                }
                writeln!(reader.get_mut(), "{said}").unwrap();
            }
        });
        (dir, path)
    }

    #[test]
    fn events_between_question_and_answer_are_passed_over() {
        let (_dir, path) = play(&[
            r#"{"QMP":{}}"#,
            r#"{"return":{}}"#,
            "{\"event\":\"RESUME\"}\n{\"return\":{\"status\":\"io-error\"}}",
            r#"{"error":{"class":"GenericError","desc":"not now"}}"#,
        ]);
        let mut qmp = Qmp::connect(&path).unwrap();
        assert_eq!(qmp.status().unwrap(), "io-error");
        assert!(qmp.resume().unwrap_err().to_string().contains("not now"));
    }

    #[test]
    fn a_qemu_that_is_gone_has_quit() {
        let (_dir, path) = play(&[r#"{"QMP":{}}"#, r#"{"return":{}}"#]);
        Qmp::connect(&path).unwrap().quit().unwrap();
    }
}
