//! A daemon that gives every request the same answer.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};
use std::sync::{Arc, Mutex};

/// A server on this host that gives every request the same answer, and records the requests.
pub struct Fake {
    pub url: String,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Fake {
    pub fn new(status: &str, body: &str) -> Self {
        Self::declaring(status, body, body.len())
    }

    /// An answer with this content length.
    pub fn declaring(status: &str, body: &str, length: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let answer = format!(
            "HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
        );
        let requests = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&requests);
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                let Ok(mut connection) = connection else {
                    return;
                };
                let mut request = Vec::new();
                let mut chunk = [0; 4096];
                while !is_whole(&request) {
                    match connection.read(&mut chunk) {
                        Ok(length @ 1..) => request.extend_from_slice(&chunk[..length]),
                        _ => break,
                    }
                }
                let text = String::from_utf8_lossy(&request).into_owned();
                kept.lock().unwrap().push(text);
                let _ = connection.write_all(answer.as_bytes());
                // Closing a socket with unread data resets the connection, and the client would lose the answer.
                let _ = connection.shutdown(Shutdown::Write);
                while matches!(connection.read(&mut chunk), Ok(1..)) {}
            }
        });
        Self { url, requests }
    }

    /// Method and path of each request so far.
    pub fn seen(&self) -> Vec<String> {
        let requests = self.requests.lock().unwrap();
        let line = |text: &String| text.split(" HTTP/").next().unwrap().to_owned();
        requests.iter().map(line).collect()
    }

    /// The body of the last request.
    pub fn last_body(&self) -> serde_json::Value {
        let requests = self.requests.lock().unwrap();
        let (_, body) = requests.last().unwrap().split_once("\r\n\r\n").unwrap();
        serde_json::from_str(body).unwrap()
    }

    /// A daemon without sandboxes.
    pub fn refusing() -> Self {
        Self::new(
            "404 Not Found",
            r#"{"error": "no sandbox sb-1", "code": "sandbox_not_found", "hint": "`forkd ls` lists them", "request_id": "r-7"}"#,
        )
    }
}

/// Whether head and body of a request have arrived.
fn is_whole(request: &[u8]) -> bool {
    let text = String::from_utf8_lossy(request).to_lowercase();
    let Some((head, body)) = text.split_once("\r\n\r\n") else {
        return false;
    };
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
    body.len() >= length.unwrap_or(0)
}
