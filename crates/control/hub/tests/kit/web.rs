//! A web server on loopback that shows a folder as `/x/`, with ranges.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};

pub struct Server {
    pub host: String,
}

impl Server {
    /// Serves until the test process ends.
    pub fn start(folder: &Path) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let folder = folder.to_owned();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let folder = folder.clone();
                // A client that hangs up is part of some tests.
                std::thread::spawn(move || drop(serve(&stream, &folder)));
            }
        });
        Self { host }
    }
}

fn serve(stream: &TcpStream, folder: &Path) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next().transpose()?.unwrap_or_default();
    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut from = 0;
    for line in lines {
        let line = line?.to_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(range) = line.strip_prefix("range: bytes=") {
            from = range.trim_end_matches('-').parse().unwrap_or(0);
        }
    }
    let path: PathBuf = folder.join(path.strip_prefix("/x/").unwrap_or("none"));
    let mut out = stream;
    let Ok(bytes) = std::fs::read(path) else {
        return write!(
            out,
            "HTTP/1.1 404 x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        );
    };
    let (length, rest) = (bytes.len(), &bytes[from..]);
    let status = if from > 0 { 206 } else { 200 };
    write!(
        out,
        "HTTP/1.1 {status} x\r\ncontent-length: {}\r\ncontent-range: bytes {from}-{}/{length}\r\nconnection: close\r\n\r\n",
        rest.len(),
        length.saturating_sub(1)
    )?;
    out.write_all(rest)
}
