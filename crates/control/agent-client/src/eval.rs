//! Requests about warm interpreters.
//!
//! The value of a call stays JSON text: a tree of it would take many times the memory of the text.

use forkd_guest_proto::{
    EvalRequest, EvalResult, InterpInfo, InterpName, InterpStart, Request, channel,
};

use crate::budget::Held;
use crate::exec::{CAPTURE_LIMIT, Capture, Output};
use crate::stream::Stream;
use crate::{Calls, Error};

/// Code that does not fit into a request follows it.
const INLINE_CODE: usize = 128 * 1024;
/// The largest result, as JSON.
const MAX_RESULT: usize = 8 << 20;

/// A call under way. Dropped before its end, it is interrupted.
pub struct Eval {
    stream: Stream,
    ended: [bool; 2],
}

impl Eval {
    /// The next part of what it prints; `None` when there is no more.
    pub async fn next_output(&mut self) -> Result<Option<Output>, Error> {
        loop {
            let [out, err] = self.ended;
            if out && err {
                return Ok(None);
            }
            let (index, found) = tokio::select! {
                found = self.stream.receive(channel::OUT), if !out => (0, found?.map(Output::Stdout)),
                found = self.stream.receive(channel::ERR), if !err => (1, found?.map(Output::Stderr)),
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
    pub async fn wait(mut self) -> Result<EvalResult, Error> {
        let mut held = self.stream.budget().hold();
        self.wait_holding(&mut held).await
    }

    async fn wait_holding(&mut self, held: &mut Held) -> Result<EvalResult, Error> {
        while self.next_output().await?.is_some() {}
        let mut bulk = Vec::new();
        while let Some(bytes) = self.stream.receive(channel::BULK).await? {
            if bulk.len() + bytes.len() > MAX_RESULT {
                return Err(Error::OverLimit { limit: MAX_RESULT });
            }
            // The text of the answer and its parts, which are copies.
            held.grow(2 * bytes.len())?;
            bulk.extend_from_slice(&bytes);
        }
        let short: EvalResult = self.stream.response().await?;
        if short.bulk.is_none() {
            return Ok(short);
        }
        serde_json::from_slice(&bulk).map_err(|source| Error::BadAnswer { source })
    }
}

/// A call that has ended, with what it printed.
#[derive(Debug)]
pub struct EvalCapture {
    /// Its value or its exception.
    pub result: EvalResult,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    /// More was printed than is kept here.
    pub truncated: bool,
    /// The share of the budget that all this holds. Keep it as long as copies.
    pub held: Held,
}

impl Calls {
    /// Runs code and follows what it prints. The deadline is that of handing the code over.
    pub async fn eval_stream(&self, mut request: EvalRequest) -> Result<Eval, Error> {
        let following = (request.code.len() > INLINE_CODE).then(|| {
            request.code_follows = true;
            std::mem::take(&mut request.code)
        });
        let stream = self.open(&Request::Eval(request))?;
        if let Some(code) = following {
            self.deadline().bound(stream.send(code.as_bytes())).await?;
            stream.end_input();
        }
        Ok(Eval {
            stream,
            ended: [false; 2],
        })
    }

    /// Runs code to its end and keeps up to 8 MiB of each output.
    pub async fn eval(&self, request: EvalRequest) -> Result<EvalCapture, Error> {
        self.deadline().bound(self.capture_eval(request)).await
    }

    async fn capture_eval(&self, request: EvalRequest) -> Result<EvalCapture, Error> {
        let mut eval = self.eval_stream(request).await?;
        let mut capture = Capture::new(self.budget().hold(), CAPTURE_LIMIT);
        while let Some(output) = eval.next_output().await? {
            capture.keep(output)?;
        }
        let result = eval.wait_holding(&mut capture.held).await?;
        Ok(EvalCapture {
            truncated: capture.truncated || result.output_truncated,
            result,
            stdout: capture.stdout,
            stderr: capture.stderr,
            held: capture.held,
        })
    }

    /// Starts an interpreter and waits until it is warm.
    pub async fn interp_start(&self, request: InterpStart) -> Result<InterpInfo, Error> {
        self.call(&Request::InterpStart(Box::new(request))).await
    }

    /// Lists the interpreters of the guest.
    pub async fn interp_list(&self) -> Result<Vec<InterpInfo>, Error> {
        self.call(&Request::InterpList).await
    }

    /// Interrupts the call under way.
    pub async fn interp_interrupt(&self, name: &str) -> Result<(), Error> {
        self.call(&Request::InterpInterrupt(InterpName {
            name: name.to_owned(),
        }))
        .await
    }

    /// Replaces an interpreter and warms the new one up.
    pub async fn interp_restart(&self, name: &str) -> Result<InterpInfo, Error> {
        self.call(&Request::InterpRestart(InterpName {
            name: name.to_owned(),
        }))
        .await
    }

    /// Ends an interpreter.
    pub async fn interp_stop(&self, name: &str) -> Result<(), Error> {
        self.call(&Request::InterpStop(InterpName {
            name: name.to_owned(),
        }))
        .await
    }
}
