//! Requests to a running guest: commands, code, files, console, events.

use bytes::Bytes;
use forkd_api::routes::{self, fill, push_escaped};
use forkd_api::{
    EvalRequest, EvalResponse, EventInfo, ExecFrame, ExecRequest, ExecResponse, FileEntry,
    PingResponse, ProcessInfo, ProcessStarted, SignalRequest, StartProcess, WriteResult,
};
use futures::{Stream, StreamExt, TryStream};
use reqwest::{Body, Method};

use crate::stream::Frames;
use crate::{Client, Error};

fn with_path(route: &str, id: &str, path: &str) -> String {
    let mut url = fill(route, &[id]);
    url.push_str("?path=");
    push_escaped(&mut url, path);
    url
}

impl Client {
    /// Checks that the agent answers.
    pub async fn ping(&self, id: &str) -> Result<PingResponse, Error> {
        self.json(self.request(Method::POST, &fill(routes::PING, &[id])))
            .await
    }

    /// Runs a command to its end and returns its output.
    pub async fn exec(&self, id: &str, request: &ExecRequest) -> Result<ExecResponse, Error> {
        self.json(self.post(&fill(routes::EXEC, &[id]), request))
            .await
    }

    /// Runs a command and streams its output.
    pub async fn exec_stream(
        &self,
        id: &str,
        request: &ExecRequest,
    ) -> Result<Frames<ExecFrame>, Error> {
        let response = self
            .send(self.post(&fill(routes::EXEC_STREAM, &[id]), request))
            .await?;
        Ok(Frames::new(response))
    }

    /// Evaluates code in the warm interpreter, with the default timeout.
    pub async fn eval(&self, id: &str, code: &str) -> Result<EvalResponse, Error> {
        let request = EvalRequest {
            code: code.to_owned(),
            timeout_secs: None,
            interpreter: None,
        };
        self.eval_with(id, &request).await
    }

    /// Evaluates code in the warm interpreter.
    pub async fn eval_with(&self, id: &str, request: &EvalRequest) -> Result<EvalResponse, Error> {
        self.json(self.post(&fill(routes::EVAL, &[id]), request))
            .await
    }

    /// The console output of a sandbox, or its last `tail` bytes.
    pub async fn logs(&self, id: &str, tail: Option<u64>) -> Result<Bytes, Error> {
        let mut path = fill(routes::LOGS, &[id]);
        if let Some(tail) = tail {
            path.push_str(&format!("?tail={tail}"));
        }
        let response = self.send(self.get(&path)).await?;
        response
            .bytes()
            .await
            .map_err(|error| Error::CutOff(Error::root(error)))
    }

    /// Streams the content of a file.
    pub async fn read_file(
        &self,
        id: &str,
        path: &str,
    ) -> Result<impl Stream<Item = Result<Bytes, Error>> + use<>, Error> {
        self.read_file_from(id, path, 0).await
    }

    /// Streams the content of a file, without its first bytes.
    pub async fn read_file_from(
        &self,
        id: &str,
        path: &str,
        offset: u64,
    ) -> Result<impl Stream<Item = Result<Bytes, Error>> + use<>, Error> {
        let mut request = self.get(&with_path(routes::FILES, id, path));
        if offset > 0 {
            request = request.header(http::header::RANGE, format!("bytes={offset}-"));
        }
        let response = self.send(request).await?;
        Ok(response
            .bytes_stream()
            .map(|chunk| chunk.map_err(|error| Error::CutOff(Error::root(error)))))
    }

    /// Writes a file from a stream. The file gets its name when all content has arrived.
    pub async fn write_file<S>(
        &self,
        id: &str,
        path: &str,
        mode: Option<u32>,
        content: S,
    ) -> Result<WriteResult, Error>
    where
        S: TryStream + Send + 'static,
        S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
        Bytes: From<S::Ok>,
    {
        let mut url = with_path(routes::FILES, id, path);
        if let Some(mode) = mode {
            url.push_str(&format!("&mode={mode:o}"));
        }
        let content = Body::wrap_stream(content);
        self.json(self.request(Method::PUT, &url).body(content))
            .await
    }

    /// Lists the entries of a directory.
    pub async fn list_files(&self, id: &str, path: &str) -> Result<Vec<FileEntry>, Error> {
        self.json(self.get(&with_path(routes::FILES_LIST, id, path)))
            .await
    }

    /// Describes one file or directory.
    pub async fn stat_file(&self, id: &str, path: &str) -> Result<FileEntry, Error> {
        self.json(self.get(&with_path(routes::FILES_STAT, id, path)))
            .await
    }

    /// Starts a program in the background.
    pub async fn start_process(
        &self,
        id: &str,
        request: &StartProcess,
    ) -> Result<ProcessStarted, Error> {
        self.json(self.post(&fill(routes::PROCESSES, &[id]), request))
            .await
    }

    /// Lists the programs that were started in the background.
    pub async fn processes(&self, id: &str) -> Result<Vec<ProcessInfo>, Error> {
        self.json(self.get(&fill(routes::PROCESSES, &[id]))).await
    }

    /// Streams the output of a background program, from these positions of stdout and stderr on.
    pub async fn process_output(
        &self,
        id: &str,
        pid: u32,
        since: (u64, u64),
    ) -> Result<Frames<ExecFrame>, Error> {
        let route = fill(routes::PROCESS_OUTPUT, &[id, &pid.to_string()]);
        let path = format!("{route}?since={}&since_stderr={}", since.0, since.1);
        Ok(Frames::new(self.send(self.get(&path)).await?))
    }

    /// Sends a signal to a background program.
    pub async fn signal_process(&self, id: &str, pid: u32, signal: u8) -> Result<(), Error> {
        let route = fill(routes::PROCESS_SIGNAL, &[id, &pid.to_string()]);
        self.nothing(self.post(&route, &SignalRequest { signal }))
            .await
    }

    /// Streams events from now on.
    pub async fn events(&self) -> Result<Frames<EventInfo>, Error> {
        Ok(Frames::new(self.send(self.get(routes::EVENTS)).await?))
    }
}
