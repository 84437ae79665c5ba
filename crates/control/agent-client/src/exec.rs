//! Requests about processes.

use forkd_guest_proto::{
    AttachRequest, Control, Event, ExecRequest, ExecResult, InputRequest, ProcessId, ProcessInfo,
    Request, SignalRequest, Started, channel,
};

use crate::budget::Held;
use crate::deadline::Deadline;
use crate::stream::{Handle, Stream};
use crate::{Calls, Error};

/// The bytes of each output that [`Calls::exec_capture`] and [`Calls::eval`] keep.
pub(crate) const CAPTURE_LIMIT: usize = 8 << 20;

/// A part of a process's output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Of standard output, or of a terminal.
    Stdout(Vec<u8>),
    /// Of standard error.
    Stderr(Vec<u8>),
    /// Bytes were lost because they were not taken in time.
    Lost {
        /// Of standard error, not of standard output.
        stderr: bool,
        /// The number of bytes that were left out.
        bytes: u64,
    },
}

/// A process that this side follows. One that was started with [`Calls::exec`] is killed when this is
/// dropped before its end.
pub struct Exec {
    stream: Stream,
    started: Started,
    ended: [bool; 3],
}

/// The way to a process's standard input.
#[derive(Clone)]
pub struct Stdin {
    handle: Handle,
}

impl Stdin {
    /// Writes all of it, as fast as the process reads.
    pub async fn write(&self, bytes: &[u8]) -> Result<(), Error> {
        self.handle.send(bytes).await
    }

    /// Says that no more comes.
    pub fn close(&self) {
        self.handle.end_input();
    }
}

/// A part of the standard input of a process. Dropped before [`Self::finish`], bytes may be lost.
pub struct Input {
    stream: Stream,
}

impl Input {
    /// Writes, at most until the deadline if the process does not read.
    pub async fn write(&self, bytes: &[u8], by: Deadline) -> Result<(), Error> {
        by.bound(self.stream.send(bytes)).await
    }

    /// Waits until the process has taken all bytes.
    pub async fn finish(self, by: Deadline) -> Result<(), Error> {
        self.stream.end_input();
        by.bound(self.stream.response()).await
    }
}

impl Exec {
    async fn begin(stream: Stream, started: Deadline) -> Result<Self, Error> {
        match started.bound(stream.expect_event()).await? {
            Event::Started(started) => Ok(Self {
                stream,
                started,
                ended: [false; 3],
            }),
            other => Err(Error::Closed {
                reason: format!("{other:?} before the process ran"),
            }),
        }
    }

    /// The process ID and the agent's number of the process.
    #[must_use]
    pub fn started(&self) -> Started {
        self.started
    }

    /// The way to its standard input.
    #[must_use]
    pub fn stdin(&self) -> Stdin {
        Stdin {
            handle: self.stream.share(),
        }
    }

    /// Sends a signal to its process group.
    pub fn signal(&self, signal: i32) {
        self.stream.control(&Control::Signal {
            signal,
            group: true,
        });
    }

    /// Tells its terminal the size.
    pub fn resize(&self, rows: u16, cols: u16) {
        self.stream.control(&Control::Resize { rows, cols });
    }

    /// The next part of its output; `None` when there is no more.
    pub async fn next_output(&mut self) -> Result<Option<Output>, Error> {
        loop {
            let [out, err, events] = self.ended;
            if out && err && events {
                return Ok(None);
            }
            let (index, found) = tokio::select! {
                found = self.stream.receive(channel::OUT), if !out => (0, found?.map(Output::Stdout)),
                found = self.stream.receive(channel::ERR), if !err => (1, found?.map(Output::Stderr)),
                found = self.stream.next_event(), if !events => match found? {
                    Some(Event::Lost { bytes, channel: of }) => {
                        let stderr = of == channel::ERR;
                        (2, Some(Output::Lost { stderr, bytes }))
                    }
                    Some(_) => continue,
                    None => (2, None),
                },
            };
            match found {
                Some(found) => return Ok(Some(found)),
                None => {
                    if let Some(ended) = self.ended.get_mut(index) {
                        *ended = true;
                    }
                }
            }
        }
    }

    /// Waits for its end. Output that was not taken is thrown away.
    pub async fn wait(mut self) -> Result<ExecResult, Error> {
        while self.next_output().await?.is_some() {}
        self.stream.response().await
    }
}

/// A process that has ended, with what it printed.
#[derive(Debug)]
pub struct Captured {
    /// How it ended.
    pub result: ExecResult,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    /// More was printed than is kept here.
    pub truncated: bool,
    /// The share of the budget that the outputs hold. Keep it as long as copies of them.
    pub held: Held,
}

/// Both outputs of a program, as far as they are kept.
pub(crate) struct Capture {
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub truncated: bool,
    pub held: Held,
    limit: usize,
}

impl Capture {
    pub fn new(held: Held, limit: usize) -> Self {
        Self {
            stdout: Vec::new(),
            stderr: Vec::new(),
            truncated: false,
            held,
            limit,
        }
    }

    pub fn keep(&mut self, output: Output) -> Result<(), Error> {
        let (kept, bytes) = match output {
            Output::Stdout(bytes) => (&mut self.stdout, bytes),
            Output::Stderr(bytes) => (&mut self.stderr, bytes),
            Output::Lost { .. } => {
                self.truncated = true;
                return Ok(());
            }
        };
        let room = self.limit.saturating_sub(kept.len());
        self.truncated |= bytes.len() > room;
        let part = bytes.get(..room).unwrap_or(&bytes);
        self.held.grow(part.len())?;
        kept.extend_from_slice(part);
        Ok(())
    }
}

impl Calls {
    /// Starts a program and follows it. The deadline is that of its start.
    pub async fn exec(&self, mut request: ExecRequest) -> Result<Exec, Error> {
        request.background = false;
        let stream = self.open(&Request::Exec(Box::new(request)))?;
        Exec::begin(stream, self.deadline()).await
    }

    /// Runs a program to its end and keeps up to 8 MiB of each output.
    pub async fn exec_capture(&self, request: ExecRequest) -> Result<Captured, Error> {
        self.exec_capture_with(request, &[], CAPTURE_LIMIT).await
    }

    /// Runs a program to its end, with input, and keeps up to `limit` bytes of each output.
    pub async fn exec_capture_with(
        &self,
        request: ExecRequest,
        input: &[u8],
        limit: usize,
    ) -> Result<Captured, Error> {
        let work = self.capture(request, input, limit);
        self.deadline().bound(work).await
    }

    async fn capture(
        &self,
        mut request: ExecRequest,
        input: &[u8],
        limit: usize,
    ) -> Result<Captured, Error> {
        request.stdin = request.stdin || !input.is_empty();
        let mut exec = self.exec(request).await?;
        let stdin = exec.stdin();
        let feeding = async {
            stdin.write(input).await?;
            stdin.close();
            Ok::<(), Error>(())
        };
        let mut capture = Capture::new(self.budget().hold(), limit);
        let collecting = async {
            while let Some(output) = exec.next_output().await? {
                capture.keep(output)?;
            }
            exec.wait().await
        };
        let ((), result) = tokio::try_join!(feeding, collecting)?;
        Ok(Captured {
            result,
            stdout: capture.stdout,
            stderr: capture.stderr,
            truncated: capture.truncated,
            held: capture.held,
        })
    }

    /// Starts a program and lets it run.
    pub async fn start(&self, mut request: ExecRequest) -> Result<Started, Error> {
        request.background = true;
        self.call(&Request::Exec(Box::new(request))).await
    }

    /// Follows a process. Dropping the handle does not end the process. The deadline is that of the first answer.
    pub async fn attach(&self, request: AttachRequest) -> Result<Exec, Error> {
        let stream = self.open(&Request::Attach(request))?;
        Exec::begin(stream, self.deadline()).await
    }

    /// Opens the standard input of a process for a part of its input. With `eof` the input ends with this part.
    pub fn input(&self, process: ProcessId, eof: bool) -> Result<Input, Error> {
        let request = Request::Input(InputRequest { process, eof });
        Ok(Input {
            stream: self.open(&request)?,
        })
    }

    /// The processes that the agent started and still knows.
    pub async fn processes(&self) -> Result<Vec<ProcessInfo>, Error> {
        self.call(&Request::Processes).await
    }

    /// Sends a signal.
    pub async fn signal(&self, process: ProcessId, signal: i32, group: bool) -> Result<(), Error> {
        self.call(&Request::Signal(SignalRequest {
            process,
            signal,
            group,
        }))
        .await
    }

    /// Waits for the end of a process.
    pub async fn wait(&self, process: ProcessId) -> Result<ExecResult, Error> {
        self.call(&Request::Wait { process }).await
    }

    /// Kills a process if it still runs, and forgets it.
    pub async fn forget(&self, process: ProcessId) -> Result<(), Error> {
        self.call(&Request::Forget { process }).await
    }

    /// Tells a process's terminal the size.
    pub async fn resize(&self, process: ProcessId, rows: u16, cols: u16) -> Result<(), Error> {
        self.call(&Request::Resize {
            process,
            rows,
            cols,
        })
        .await
    }
}
