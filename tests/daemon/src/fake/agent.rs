//! The agent of a fake guest, on the VM's vsock socket.
//!
//! One thread reads a connection, one more serves each request. Files are at most one window long, so a sender never
//! has to wait for credit.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use forkd_guest_proto::{
    AGENT_PORT, AgentError, ClockRequest, ClockState, Control, Decoder, DialRequest, Entry,
    ErrorCode, Event, ExecRequest, ExecResult, ExitStatus, FileInfo, FileKind, Frame, FreezeReport,
    Hello, HoldVolumeRequest, IdentityReport, IdentityRequest, Kind, ListResult, Metrics,
    MountVolumeRequest, Outcome, OutputPosition, Pong, QuiesceReport, ReadResult, Request,
    ResetReport, ResourceUsage, Started, ThawReport, WriteResult, channel, feature, frame,
    parse_request, window,
};
use forkd_vmm_proto::StopCause;
use serde::Serialize;

use super::archive;
use super::dial;
use super::faults::{Fault, Step};
use super::guest::Guest;
use super::shell::{self, Program};
use super::vm::{GARBAGE, Vm, lock};

/// Accepts connections for as long as the process lives.
pub(super) fn listen(vm: &Arc<Vm>, listener: &UnixListener) {
    for stream in listener.incoming().flatten() {
        let vm = Arc::clone(vm);
        std::thread::spawn(move || {
            // The daemon closes connections when it likes.
            let _ = serve(&vm, stream);
        });
    }
}

fn serve(vm: &Arc<Vm>, mut stream: UnixStream) -> io::Result<()> {
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        line.push(byte[0]);
    }
    if line != format!("CONNECT {AGENT_PORT}\n").as_bytes() {
        return Ok(());
    }
    match vm.arrive(Step::Connect) {
        Fault::Fail => return Ok(()),
        Fault::Garbage => return stream.write_all(&GARBAGE),
        Fault::Pass | Fault::Hold | Fault::Die => {}
    }
    stream.write_all(b"OK 1\n")?;
    vm.keep_connection(&stream);
    let connection = Arc::new(Connection {
        vm: Arc::clone(vm),
        writer: Mutex::new(stream.try_clone()?),
        requests: Mutex::default(),
    });
    let mut decoder = Decoder::new();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let count = stream.read(&mut buffer)?;
        if count == 0 {
            return Ok(());
        }
        let mut bytes = &buffer[..count];
        while let Some(frame) = decoder.next(&mut bytes).map_err(io::Error::other)? {
            connection.take(frame)?;
        }
    }
}

/// A connection of the daemon.
pub(super) struct Connection {
    vm: Arc<Vm>,
    writer: Mutex<UnixStream>,
    requests: Mutex<HashMap<u32, Arc<Input>>>,
}

/// The input of a request.
#[derive(Default)]
pub(super) struct Input {
    state: Mutex<InputState>,
    changed: Condvar,
}

#[derive(Default)]
struct InputState {
    bytes: Vec<u8>,
    ended: bool,
    cancelled: bool,
}

impl Input {
    fn update(&self, change: impl FnOnce(&mut InputState)) {
        change(&mut lock(&self.state));
        self.changed.notify_all();
    }

    /// All bytes, once the host has sent the end of them.
    fn wait(&self) -> Result<Vec<u8>, AgentError> {
        let mut state = lock(&self.state);
        while !state.ended && !state.cancelled {
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        if state.cancelled {
            return Err(AgentError::new(ErrorCode::Cancelled, "cancelled"));
        }
        Ok(std::mem::take(&mut state.bytes))
    }

    /// The next bytes; none at the end of the input or when the request was cancelled.
    pub(super) fn next(&self) -> Option<Vec<u8>> {
        let mut state = lock(&self.state);
        while state.bytes.is_empty() && !state.ended && !state.cancelled {
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        Some(std::mem::take(&mut state.bytes)).filter(|bytes| !bytes.is_empty())
    }

    /// The daemon has lost interest in the answer.
    pub(super) fn is_cancelled(&self) -> bool {
        lock(&self.state).cancelled
    }

    /// Waits for a time; false if the request was cancelled before.
    fn sleep(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        let mut state = lock(&self.state);
        while !state.cancelled {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        false
    }
}

impl Connection {
    pub(super) fn send(
        &self,
        stream: u32,
        kind: Kind,
        channel: u8,
        payload: &[u8],
    ) -> io::Result<()> {
        lock(&self.writer).write_all(&frame::encode(stream, kind, channel, payload))
    }

    fn take(self: &Arc<Self>, frame: Frame) -> io::Result<()> {
        let input = lock(&self.requests).get(&frame.stream).cloned();
        match (frame.kind, input) {
            (Kind::Hello, _) => self.greet(),
            (Kind::Request, _) => {
                let input = Arc::new(Input::default());
                lock(&self.requests).insert(frame.stream, Arc::clone(&input));
                let this = Arc::clone(self);
                std::thread::spawn(move || {
                    let _ = this.serve(frame.stream, &frame.payload, &input);
                    lock(&this.requests).remove(&frame.stream);
                });
                Ok(())
            }
            (Kind::Data, Some(input)) => {
                let credit = frame.payload.len() as u32;
                input.update(|state| state.bytes.extend(frame.payload));
                self.send(
                    frame.stream,
                    Kind::Window,
                    channel::IN,
                    &credit.to_le_bytes(),
                )
            }
            (Kind::End, Some(input)) => {
                input.update(|state| state.ended = true);
                Ok(())
            }
            (Kind::Control, Some(input)) => {
                let control = serde_json::from_slice(&frame.payload);
                if matches!(control, Ok(Control::Cancel | Control::Signal { .. })) {
                    input.update(|state| state.cancelled = true);
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn greet(&self) -> io::Result<()> {
        // A guest that stands still does not answer.
        self.vm.with_guest(|_| ());
        let hello = Hello {
            features: feature::ALL.iter().map(ToString::to_string).collect(),
            program: "fake-agent".to_owned(),
            ..Hello::default()
        };
        self.send(0, Kind::Hello, 0, &serde_json::to_vec(&hello)?)
    }

    fn serve(&self, stream: u32, payload: &[u8], input: &Input) -> io::Result<()> {
        let answer = match parse_request(payload) {
            Ok(request) => self.answer(stream, request, input)?,
            Err(error) => Err(error),
        };
        self.send(
            stream,
            Kind::Response,
            0,
            &serde_json::to_vec(&Outcome::from(answer))?,
        )
    }

    pub(super) fn event(&self, stream: u32, event: &Event) -> io::Result<()> {
        self.send(stream, Kind::Event, 0, &serde_json::to_vec(event)?)
    }

    /// The outer error is a broken connection.
    fn answer(&self, stream: u32, request: Request, input: &Input) -> io::Result<Answer> {
        Ok(match request {
            Request::Ping => self.with(|guest| {
                ok(Pong {
                    version: "fake".to_owned(),
                    generation: guest.generation.clone(),
                    hostname: guest.hostname.clone(),
                    pid: 1,
                    role: "guest".to_owned(),
                    ..Pong::default()
                })
            }),
            Request::Exec(request) => return self.exec(stream, &request, input),
            Request::Read(request) => return self.read(stream, &request.path),
            Request::Write(request) => input.wait().and_then(|bytes| {
                let written = bytes.len() as u64;
                if bytes.len() > window::DEFAULT as usize {
                    return Err(AgentError::new(ErrorCode::Limit, "a fake file is small"));
                }
                self.with(|guest| {
                    guest.files.insert(request.path, bytes);
                    ok(WriteResult { bytes: written })
                })
            }),
            Request::Stat(request) => self.with(|guest| info(guest, &request.path).and_then(ok)),
            Request::List(request) => return self.list(stream, &request.path),
            Request::Mkdir(_) | Request::SetAttr(_) | Request::Network(_) => self.with(|_| ok(())),
            Request::Remove(request) if request.recursive => self.with(|guest| {
                archive::remove(guest, &request.path);
                ok(())
            }),
            Request::Remove(request) => {
                self.with(|guest| match guest.files.remove(&request.path) {
                    None if !request.missing_ok => Err(not_found(&request.path)),
                    _ => ok(()),
                })
            }
            Request::Pack(request) => {
                let packed = self.vm.with_guest(|guest| archive::pack(guest, &request));
                match packed {
                    Ok((bytes, done)) => {
                        for chunk in bytes.chunks(frame::DATA_CHUNK) {
                            self.send(stream, Kind::Data, channel::BULK, chunk)?;
                        }
                        ok(done)
                    }
                    Err(error) => Err(error),
                }
            }
            Request::Unpack(request) => input
                .wait()
                .and_then(|bytes| self.with(|guest| archive::unpack(guest, &request, &bytes))),
            Request::Mount(request) => self.with(|guest| archive::mount(guest, &request)),
            Request::Unmount(request) => self.with(|guest| {
                archive::remove(guest, &request.target);
                ok(())
            }),
            Request::KillAll => self.with(|_| ok(())),
            Request::Rename(request) => self.with(|guest| {
                let content = guest
                    .files
                    .remove(&request.from)
                    .ok_or_else(|| not_found(&request.from))?;
                guest.files.insert(request.to, content);
                ok(())
            }),
            // A test reads in the file how often this happened.
            Request::ResetConnections => self.with(|guest| {
                let file = guest.files.entry("/run/resets".to_owned()).or_default();
                file.push(b'r');
                ok(ResetReport::default())
            }),
            Request::Clock(request) => self.with(|guest| ok(clock(guest, request))),
            Request::Identity(request) => self.identity(*request),
            Request::Metrics => self.with(|_| ok(Metrics::default())),
            Request::MountVolume(request) => self.mount(&request),
            Request::HoldVolume(request) => self.hold(&request),
            Request::Quiesce(_) => self.with(|_| ok(QuiesceReport::default())),
            Request::Freeze(_) => self.freeze(),
            Request::Thaw => self.with(|guest| {
                ok(ThawReport {
                    was_frozen: guest.thaw(),
                })
            }),
            Request::Processes | Request::InterpList => self.with(|_| ok(Vec::<()>::new())),
            Request::Dial(DialRequest::Tcp(address)) => {
                return dial::dial(self, stream, &address, input);
            }
            Request::Shutdown(_) => self.vm.end(StopCause::PowerOff),
            _ => Err(AgentError::new(
                ErrorCode::Unsupported,
                "a fake guest cannot do this",
            )),
        })
    }

    fn with(&self, work: impl FnOnce(&mut Guest) -> Answer) -> Answer {
        self.vm.with_guest(work)
    }

    fn freeze(&self) -> Answer {
        if self.vm.arrive(Step::Freeze) == Fault::Fail {
            return Err(AgentError::new(ErrorCode::Timeout, "a fault was injected"));
        }
        self.with(|guest| {
            ok(FreezeReport {
                was_frozen: guest.freeze(),
                took_us: 1,
            })
        })
    }

    fn mount(&self, request: &MountVolumeRequest) -> Answer {
        self.refused_at(Step::Mount)?;
        let volumes = &self.vm.volumes;
        self.with(
            |guest| match volumes.mount(&request.serial, &request.path, guest) {
                Ok(true) => ok(()),
                _ => Err(not_found(&request.path)),
            },
        )
    }

    /// A test reads in a file whether writes are held.
    fn hold(&self, request: &HoldVolumeRequest) -> Answer {
        self.refused_at(Step::HoldWrites)?;
        self.with(|guest| {
            let name = format!("/run/held{}", request.path);
            if request.held {
                guest.files.insert(name, b"held".to_vec());
            } else {
                guest.files.remove(&name);
            }
            ok(())
        })
    }

    /// An error if a fault makes the request fail.
    fn refused_at(&self, step: Step) -> Result<(), AgentError> {
        match self.vm.arrive(step) {
            Fault::Fail => Err(AgentError::new(ErrorCode::Internal, "a fault was injected")),
            Fault::Pass | Fault::Hold | Fault::Die | Fault::Garbage => Ok(()),
        }
    }

    fn identity(&self, request: IdentityRequest) -> Answer {
        match self.vm.arrive(Step::Identity) {
            Fault::Fail => {
                return Err(AgentError::new(ErrorCode::Internal, "a fault was injected"));
            }
            Fault::Garbage => {
                // The daemon closes the connection on this.
                let _ = lock(&self.writer).write_all(&GARBAGE);
            }
            Fault::Pass | Fault::Hold | Fault::Die => {}
        }
        let reseeded = self.vm.arrive(Step::Reseed) != Fault::Fail;
        self.with(|guest| {
            guest.generation.clone_from(&request.generation);
            if let Some(hostname) = request.hostname {
                guest.hostname = hostname;
            }
            if let Some(machine_id) = request.machine_id {
                guest.machine_id = machine_id;
            }
            let step = clock(
                guest,
                ClockRequest {
                    set_unix_ns: request.unix_ns,
                    shift_ns: None,
                },
            );
            ok(IdentityReport {
                generation: guest.generation.clone(),
                hostname: guest.hostname.clone(),
                machine_id: guest.machine_id.clone(),
                clock_step_ns: step.step_ns,
                unix_ns: Some(step.unix_ns),
                reseeded,
                thawed: guest.thaw_at_identity(),
                ..IdentityReport::default()
            })
        })
    }

    fn exec(&self, stream: u32, request: &ExecRequest, input: &Input) -> io::Result<Answer> {
        match self.vm.arrive(Step::Exec) {
            Fault::Fail => {
                return Ok(Err(AgentError::new(
                    ErrorCode::ExecFailed,
                    "a fault was injected",
                )));
            }
            Fault::Garbage => lock(&self.writer).write_all(&GARBAGE)?,
            Fault::Pass | Fault::Hold | Fault::Die => {}
        }
        let process = self.vm.with_guest(|guest| {
            guest.next_process += 1;
            (!guest.is_frozen()).then_some(guest.next_process)
        });
        let Some(process) = process else {
            let message = "user processes are frozen";
            return Ok(Err(AgentError::new(ErrorCode::Busy, message)));
        };
        let started = Started {
            process,
            pid: 1000 + process as u32,
            at: OutputPosition::default(),
        };
        if request.background {
            return Ok(ok(started));
        }
        self.event(stream, &Event::Started(started))?;
        let mut timed_out = false;
        let mut program = shell::program(request);
        match program {
            Program::Sleep(time) => {
                let limit = request
                    .timeout_ms
                    .map_or(Duration::MAX, Duration::from_millis);
                timed_out = limit < time;
                if !input.sleep(time.min(limit)) {
                    return Ok(Err(AgentError::new(ErrorCode::Cancelled, "cancelled")));
                }
            }
            Program::PowerOff => self.vm.end(StopCause::PowerOff),
            Program::Knock(knock, to, port) => {
                let answer = self.vm.net.knock(knock, port, to);
                program = Program::Print(format!("{answer}\n"), 0);
            }
            Program::Print(..) | Program::Cat(_) | Program::Hostname | Program::Write(..) => {}
        }
        let (output, code) = self.vm.with_guest(|guest| shell::run(guest, program));
        for chunk in output.chunks(frame::DATA_CHUNK) {
            self.send(stream, Kind::Data, channel::OUT, chunk)?;
        }
        Ok(ok(ExecResult {
            process,
            status: if timed_out {
                ExitStatus::Signal(9)
            } else {
                ExitStatus::Code(code)
            },
            timed_out,
            output_limit_hit: false,
            wall_ms: 0,
            usage: ResourceUsage::default(),
        }))
    }

    fn read(&self, stream: u32, path: &str) -> io::Result<Answer> {
        let found = self
            .vm
            .with_guest(|guest| Ok((info(guest, path)?, guest.files.get(path).cloned())));
        let (info, content) = match found {
            Ok((info, content)) => (info, content.unwrap_or_default()),
            Err(error) => return Ok(Err(error)),
        };
        self.event(stream, &Event::File(info))?;
        for chunk in content.chunks(frame::DATA_CHUNK) {
            self.send(stream, Kind::Data, channel::BULK, chunk)?;
        }
        Ok(ok(ReadResult {
            bytes: content.len() as u64,
        }))
    }

    fn list(&self, stream: u32, path: &str) -> io::Result<Answer> {
        let entries: Vec<Entry> = self.vm.with_guest(|guest| {
            let names = guest.entries(path);
            names
                .into_iter()
                .map(|(name, directory)| {
                    let full = format!("{}/{name}", path.trim_end_matches('/'));
                    let size = guest.files.get(&full).map_or(0, Vec::len);
                    Entry {
                        path: name,
                        info: file_info(directory, size),
                    }
                })
                .collect()
        });
        let count = entries.len() as u64;
        self.event(stream, &Event::Entries { entries })?;
        Ok(ok(ListResult {
            count,
            truncated: false,
        }))
    }
}

/// The value of a response, as JSON.
pub(super) type Answer = Result<serde_json::Value, AgentError>;

pub(super) fn ok(value: impl Serialize) -> Answer {
    serde_json::to_value(value)
        .map_err(|error| AgentError::new(ErrorCode::Internal, error.to_string()))
}

pub(super) fn not_found(path: &str) -> AgentError {
    AgentError::new(ErrorCode::NotFound, format!("{path} does not exist"))
}

fn info(guest: &Guest, path: &str) -> Result<FileInfo, AgentError> {
    match guest.files.get(path) {
        Some(content) => Ok(file_info(false, content.len())),
        None if !guest.entries(path).is_empty() => Ok(file_info(true, 0)),
        None => Err(not_found(path)),
    }
}

fn file_info(directory: bool, size: usize) -> FileInfo {
    FileInfo {
        kind: if directory {
            FileKind::Directory
        } else {
            FileKind::File
        },
        size: size as u64,
        mode: 0o644,
        uid: 0,
        gid: 0,
        user: None,
        group: None,
        modified_unix_ms: 0,
        target: None,
        attributes: Default::default(),
    }
}

fn clock(guest: &mut Guest, request: ClockRequest) -> ClockState {
    let host = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| i64::try_from(time.as_nanos()).unwrap_or(i64::MAX));
    let before = guest.clock_offset_ns;
    if let Some(unix_ns) = request.set_unix_ns {
        guest.clock_offset_ns = unix_ns.saturating_sub(host);
    }
    guest.clock_offset_ns = guest
        .clock_offset_ns
        .saturating_add(request.shift_ns.unwrap_or(0));
    ClockState {
        unix_ns: host.saturating_add(guest.clock_offset_ns),
        monotonic_ns: host,
        boottime_ns: host,
        step_ns: request
            .set_unix_ns
            .map(|_| guest.clock_offset_ns.saturating_sub(before)),
    }
}
