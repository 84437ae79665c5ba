//! A stand-in for Firecracker: its HTTP API, its sockets and its files, without a VM.
//!
//! The adapter starts a program by its path. That program is a script that runs this test binary again, with the one
//! test that serves. `STAND_IN` holds the fault to show, and makes that test serve.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

/// The variable that holds the fault.
const VARIABLE: &str = "STAND_IN";

/// Writes the script for one fault. The empty fault is a Firecracker that works.
pub fn script(dir: &Path, fault: &str) -> PathBuf {
    let path = dir.join("firecracker");
    let this = std::env::current_exe().unwrap();
    let text = format!(
        "#!/bin/sh\nexport {VARIABLE}='{fault}'\nexec {} --exact the_stand_in_serves --nocapture\n",
        this.display()
    );
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// Serves until it is killed, if this process is the stand-in.
pub fn serve_if_asked() {
    let Ok(fault) = std::env::var(VARIABLE) else {
        return;
    };
    match fault.as_str() {
        "dies at start" => std::process::exit(3),
        _ => serve(&fault),
    }
}

/// A VM that exists in memory only.
#[derive(Default)]
struct Vm {
    drives: Vec<(String, File)>,
    memory_mib: u64,
    uds: String,
    runs: bool,
    paused: bool,
}

fn serve(fault: &str) {
    let listener = UnixListener::bind("api.sock").unwrap();
    let mut vm = Vm::default();
    loop {
        let (mut stream, _) = listener.accept().unwrap();
        let Some((request, body)) = read_request(&mut stream) else {
            continue;
        };
        if is_faulty(fault, &request) {
            show(fault, &mut stream);
            continue;
        }
        let answer = match vm.answer(&request, &body) {
            Ok(()) => "HTTP/1.1 204 \r\nServer: stand-in\r\n\r\n".to_owned(),
            Err(message) => {
                let body = json!({ "fault_message": message }).to_string();
                let length = body.len();
                format!("HTTP/1.1 400 \r\nContent-Length: {length}\r\n\r\n{body}")
            }
        };
        let _ = stream.write_all(answer.as_bytes());
    }
}

/// Faults appear at the request that their name ends with.
fn is_faulty(fault: &str, request: &str) -> bool {
    fault
        .rsplit_once(" at ")
        .is_some_and(|(_, at)| request.ends_with(at))
}

fn show(fault: &str, stream: &mut UnixStream) {
    let (kind, _) = fault.rsplit_once(" at ").unwrap();
    match kind {
        "refuses" => {
            let body = r#"{"fault_message":"the stand-in refuses"}"#;
            let text = format!(
                "HTTP/1.1 400 \r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            );
            let _ = stream.write_all(text.as_bytes());
        }
        "garbage" => drop(stream.write_all(b"\x00\xff\x01 garbage \r\n\r\n")),
        "endless" => {
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n");
            while stream.write_all(b"X-More: of the same\r\n").is_ok() {}
        }
        "slow" => {
            for byte in b"HTTP/1.1 204 \r\nServer: slow\r\n\r\n" {
                let _ = stream.write_all(&[*byte]);
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        "dies" => std::process::exit(7),
        kind => panic!("there is no fault {kind}"),
    }
}

/// The request line without its version, and the body.
fn read_request(stream: &mut UnixStream) -> Option<(String, Value)> {
    let mut bytes = Vec::new();
    let mut piece = [0; 4096];
    loop {
        let mut headers = [httparse::EMPTY_HEADER; 16];
        let mut request = httparse::Request::new(&mut headers);
        if let Ok(httparse::Status::Complete(head)) = request.parse(&bytes) {
            let length: usize = request
                .headers
                .iter()
                .find(|header| header.name.eq_ignore_ascii_case("content-length"))
                .map_or(0, |header| {
                    String::from_utf8_lossy(header.value).parse().unwrap()
                });
            if bytes.len() >= head + length {
                let line = format!("{} {}", request.method.unwrap(), request.path.unwrap());
                let body = serde_json::from_slice(&bytes[head..head + length]).unwrap();
                return Some((line, body));
            }
        }
        match stream.read(&mut piece) {
            Ok(0) | Err(_) => return None,
            Ok(count) => bytes.extend_from_slice(&piece[..count]),
        }
    }
}

impl Vm {
    fn answer(&mut self, request: &str, body: &Value) -> Result<(), String> {
        let text = |name: &str| body[name].as_str().unwrap_or_default().to_owned();
        match request {
            "PUT /machine-config" => self.memory_mib = body["mem_size_mib"].as_u64().unwrap(),
            "PUT /boot-source" => {
                exists(&text("kernel_image_path"))?;
                exists(&text("initrd_path"))?;
                if !text("boot_args").contains("reboot=k") {
                    return Err("the guest cannot reboot".to_owned());
                }
            }
            "PUT /vsock" => self.listen(&text("uds_path"))?,
            "PUT /entropy" => {}
            "PUT /actions" => self.start()?,
            "PATCH /vm" => self.paused = text("state") == "Paused",
            "PUT /snapshot/create" => {
                self.save(&text("snapshot_path"), &text("mem_file_path"))?;
            }
            "PUT /snapshot/load" => self.load(body)?,
            request if request.starts_with("PUT /drives/") => self.open(&text("path_on_host"))?,
            request => return Err(format!("{request} is unknown")),
        }
        Ok(())
    }

    fn open(&mut self, path: &str) -> Result<(), String> {
        let file = File::options().read(true).write(true).open(path);
        self.drives
            .push((path.to_owned(), file.map_err(|error| error.to_string())?));
        Ok(())
    }

    /// Listens for connections to the guest: each is answered like Firecracker does, and gets its bytes back.
    fn listen(&mut self, path: &str) -> Result<(), String> {
        self.uds = path.to_owned();
        let listener = UnixListener::bind(path).map_err(|error| error.to_string())?;
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                std::thread::spawn(move || echo(stream.unwrap()));
            }
        });
        Ok(())
    }

    fn start(&mut self) -> Result<(), String> {
        self.runs = true;
        println!("the guest boots");
        self.write_to_disk(b"booted")?;
        self.tell_ready()
    }

    fn tell_ready(&self) -> Result<(), String> {
        let ready = UnixStream::connect(format!("{}_1", self.uds));
        ready.map(drop).map_err(|error| error.to_string())
    }

    /// Appends to a text at the second block of the first disk.
    fn write_to_disk(&self, text: &[u8]) -> Result<(), String> {
        let disk = &self.drives[0].1;
        let mut block = [0; 64];
        disk.read_exact_at(&mut block, 4096).unwrap();
        let used = block.iter().take_while(|byte| **byte != 0).count() as u64;
        disk.write_all_at(text, 4096 + used)
            .map_err(|error| error.to_string())
    }

    fn save(&self, state: &str, memory: &str) -> Result<(), String> {
        if !(self.runs && self.paused) {
            return Err("the VM is not paused".to_owned());
        }
        let drives: Vec<&String> = self.drives.iter().map(|(path, _)| path).collect();
        let saved = json!({ "drives": drives, "uds": self.uds, "memory_mib": self.memory_mib });
        std::fs::write(state, saved.to_string()).unwrap();
        let file = File::create(memory).unwrap();
        file.set_len(self.memory_mib << 20).unwrap();
        file.write_all_at(&[0; 4096], 0).unwrap();
        file.write_all_at(b"page three", 3 * 4096).unwrap();
        Ok(())
    }

    fn load(&mut self, body: &Value) -> Result<(), String> {
        let state = std::fs::read(body["snapshot_path"].as_str().unwrap()).unwrap();
        let state: Value = serde_json::from_slice(&state).map_err(|error| error.to_string())?;
        self.memory_mib = state["memory_mib"].as_u64().ok_or("no state")?;
        let memory = File::open(body["mem_backend"]["backend_path"].as_str().unwrap());
        let memory = memory.map_err(|error| format!("no memory: {error}"))?;
        if memory.metadata().unwrap().len() != self.memory_mib << 20 {
            return Err("the memory has another size".to_owned());
        }
        let mut text = [0; 10];
        memory.read_exact_at(&mut text, 3 * 4096).unwrap();
        assert_eq!(&text, b"page three");
        for drive in state["drives"].as_array().unwrap() {
            self.open(drive.as_str().unwrap())?;
        }
        self.listen(state["uds"].as_str().unwrap())?;
        self.runs = true;
        self.paused = body["resume_vm"] != true;
        self.write_to_disk(b" restored")
    }
}

fn exists(path: &str) -> Result<(), String> {
    std::fs::metadata(path)
        .map(drop)
        .map_err(|error| format!("{path}: {error}"))
}

fn echo(mut stream: UnixStream) {
    let mut line = Vec::new();
    let mut byte = [0];
    while byte[0] != b'\n' {
        if !matches!(stream.read(&mut byte), Ok(1)) {
            return;
        }
        line.push(byte[0]);
    }
    assert!(line.starts_with(b"CONNECT "));
    let _ = stream.write_all(b"OK 5000\n");
    let mut copy = stream.try_clone().unwrap();
    let _ = std::io::copy(&mut stream, &mut copy);
}
