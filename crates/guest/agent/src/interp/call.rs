//! One call of an interpreter.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use forkd_guest_proto::{
    AgentError, ErrorCode, EvalRequest, EvalResult, InterpState, MAX_PAYLOAD, channel,
    frame::DATA_CHUNK,
};
use tokio::sync::oneshot;

use super::running::{Output, Running};
use super::wire::{Answer, Ask};
use super::{Interp, Turn};
use crate::agent::Agent;
use crate::conn::{Closed, Stream};
use crate::error;
use crate::process::{Follower, Read};

/// The largest code.
const MAX_CODE: usize = 16 * 1024 * 1024;
/// How long an interrupted call may take to end before its interpreter is replaced.
const INTERRUPT_TIME: Duration = Duration::from_secs(2);

/// Runs code in an interpreter.
pub async fn eval(
    agent: &Agent,
    stream: &Stream,
    request: EvalRequest,
) -> Result<EvalResult, AgentError> {
    let code = code(stream, &request).await?;
    let interp = agent
        .interps
        .find(request.interp.as_deref().unwrap_or("python"))?;
    let turn = interp.take_turn().await;
    let running = interp.ensure_running(&turn).await?;
    let start = Instant::now();
    let outputs = [
        Forward::new(stream, channel::OUT, &running.stdout),
        Forward::new(stream, channel::ERR, &running.stderr),
    ];
    let answer = running
        .ask_call(|id| Ask::Run {
            id,
            mode: request.mode,
            code: &code,
        })
        .await?;
    interp.state.set(InterpState::Busy);
    let mut call = Call {
        interp: Rc::clone(&interp),
        running: Rc::clone(&running),
        turn: Some(turn),
        answer: Some(answer),
    };
    let timeout = request.timeout_ms.map(Duration::from_millis);
    let limit = request.output_limit.unwrap_or(u64::MAX);
    let (ended, truncated) = follow(&mut call, outputs, timeout, limit).await?;
    let (answer, timed_out) = ended?;
    let result = EvalResult {
        repr: answer.repr,
        json: answer.json,
        display: answer.display,
        error: answer.error,
        timed_out,
        output_truncated: truncated,
        wall_ms: u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX),
        count: answer.count,
        bulk: None,
    };
    deliver(stream, result).await
}

async fn code(stream: &Stream, request: &EvalRequest) -> Result<String, AgentError> {
    if !request.code_follows {
        return Ok(request.code.clone());
    }
    let mut code = Vec::new();
    while let Some(bytes) = stream.receive().await {
        if code.len() + bytes.len() > MAX_CODE {
            return Err(AgentError::new(
                ErrorCode::Limit,
                format!("code has more than {MAX_CODE} bytes"),
            ));
        }
        code.extend_from_slice(&bytes);
    }
    String::from_utf8(code).map_err(|_| error::bad("code is not UTF-8"))
}

/// A result that is too large for a frame goes as bulk, and the response only says so.
async fn deliver(stream: &Stream, result: EvalResult) -> Result<EvalResult, AgentError> {
    let whole = serde_json::to_vec(&result).map_err(|error| {
        AgentError::new(
            ErrorCode::Internal,
            format!("cannot write the result: {error}"),
        )
    })?;
    if whole.len() + 64 <= MAX_PAYLOAD {
        return Ok(result);
    }
    stream
        .send_data(channel::BULK, &whole)
        .await
        .map_err(error::closed)?;
    stream
        .send_end(channel::BULK)
        .await
        .map_err(error::closed)?;
    Ok(EvalResult {
        timed_out: result.timed_out,
        output_truncated: result.output_truncated,
        wall_ms: result.wall_ms,
        count: result.count,
        bulk: Some(whole.len() as u64),
        ..Default::default()
    })
}

/// A call under way. Given up before its end, it is interrupted, and its turn lasts until that worked.
struct Call {
    interp: Rc<Interp>,
    running: Rc<Running>,
    turn: Option<Turn>,
    answer: Option<oneshot::Receiver<Answer>>,
}

impl Call {
    fn settle(&mut self) {
        self.answer = None;
        self.interp.calls.set(self.interp.calls.get() + 1);
        if self.running.death().is_none() {
            self.interp.state.set(InterpState::Ready);
        }
    }

    /// Waits for the answer; after the timeout, for what an interrupt makes of the call.
    async fn finish(&mut self, timeout: Option<Duration>) -> Result<(Answer, bool), AgentError> {
        let Some(answer) = &mut self.answer else {
            return Err(self.running.dead_error());
        };
        let in_time = match timeout {
            Some(timeout) => tokio::time::timeout(timeout, &mut *answer).await.ok(),
            None => Some((&mut *answer).await),
        };
        if let Some(answer) = in_time {
            return self.ended(answer, false).await;
        }
        self.running.interrupt().await;
        match tokio::time::timeout(INTERRUPT_TIME, answer).await {
            Ok(answer) => self.ended(answer, true).await,
            Err(_) => {
                self.running.kill();
                self.running.wait_for_death().await;
                self.settle();
                let message = "the call did not heed its interrupt; the interpreter is replaced";
                Err(AgentError::new(ErrorCode::Timeout, message))
            }
        }
    }

    async fn ended(
        &mut self,
        answer: Result<Answer, oneshot::error::RecvError>,
        timed_out: bool,
    ) -> Result<(Answer, bool), AgentError> {
        let answer = match answer {
            Ok(answer) => Ok((answer, timed_out)),
            Err(_) => {
                self.running.wait_for_death().await;
                Err(self.running.dead_error())
            }
        };
        self.settle();
        answer
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let (Some(turn), Some(answer)) = (self.turn.take(), self.answer.take()) else {
            return;
        };
        let (interp, running) = (Rc::clone(&self.interp), Rc::clone(&self.running));
        tokio::task::spawn_local(async move {
            running.interrupt().await;
            if tokio::time::timeout(INTERRUPT_TIME, answer).await.is_err() {
                running.kill();
                running.wait_for_death().await;
            } else if running.death().is_none() {
                interp.state.set(InterpState::Ready);
            }
            drop(turn);
        });
    }
}

type Ended = Result<(Answer, bool), AgentError>;

/// Carries the output out while the call runs, and then what is left of it.
async fn follow(
    call: &mut Call,
    mut outputs: [Forward<'_>; 2],
    timeout: Option<Duration>,
    limit: u64,
) -> Result<(Ended, bool), AgentError> {
    let left = Cell::new(limit);
    let [out, err] = &mut outputs;
    let carrying = async {
        let result: Result<((), ()), Closed> = tokio::try_join!(out.carry(&left), err.carry(&left));
        result
    };
    let ended = {
        tokio::pin!(carrying);
        let finishing = call.finish(timeout);
        tokio::pin!(finishing);
        tokio::select! {
            ended = &mut finishing => ended,
            carried = &mut carrying => {
                carried.map_err(error::closed)?;
                finishing.await
            }
        }
    };
    let mut truncated = false;
    for output in &mut outputs {
        output.carry_rest(&left).await.map_err(error::closed)?;
        truncated |= output.cut;
    }
    Ok((ended, truncated))
}

/// One output on its way to the host.
struct Forward<'a> {
    stream: &'a Stream,
    channel: u8,
    output: &'a Output,
    follower: Follower,
    taken: u64,
    /// Taken from the log and not sent yet.
    pending: Vec<u8>,
    cut: bool,
}

impl<'a> Forward<'a> {
    fn new(stream: &'a Stream, channel: u8, output: &'a Output) -> Self {
        // What was printed between calls belongs to none of them.
        let follower = output.log.follow(false, true);
        Self {
            stream,
            channel,
            output,
            follower,
            taken: output.log.total(),
            pending: Vec::new(),
            cut: false,
        }
    }

    /// Carries until the output ends, which it does with the process.
    async fn carry(&mut self, left: &Cell<u64>) -> Result<(), Closed> {
        loop {
            self.follower.ready().await;
            if !self.step(left, u64::MAX).await? {
                return Ok(());
            }
        }
    }

    /// Carries what was printed up to now, and says that there is no more.
    async fn carry_rest(&mut self, left: &Cell<u64>) -> Result<(), Closed> {
        let target = self.output.printed();
        self.send_pending().await?;
        while self.taken < target {
            self.follower.ready().await;
            if !self.step(left, target).await? {
                break;
            }
        }
        self.stream.send_end(self.channel).await
    }

    /// Carries one part of what is printed up to `target`; false at the end of the output. May be dropped
    /// while it waits: nothing is lost.
    async fn step(&mut self, left: &Cell<u64>, target: u64) -> Result<bool, Closed> {
        let wanted = usize::try_from(target - self.taken)
            .unwrap_or(usize::MAX)
            .min(DATA_CHUNK);
        let allowed = usize::try_from(left.get()).unwrap_or(usize::MAX);
        if allowed == 0 {
            // Output over the limit is still taken, so that the call goes on.
            return Ok(match self.follower.read(wanted) {
                Some(Read::Bytes { lost, bytes }) => {
                    self.taken += lost + bytes.len() as u64;
                    self.cut = true;
                    true
                }
                other => other.is_none(),
            });
        }
        let credit = self
            .stream
            .reserve(self.channel, wanted.min(allowed))
            .await?;
        match self.follower.read(credit) {
            Some(Read::Bytes { lost, bytes }) => {
                self.taken += lost + bytes.len() as u64;
                left.set(left.get().saturating_sub(bytes.len() as u64));
                self.stream.unreserve(self.channel, credit, bytes.len());
                self.pending = bytes;
                self.send_pending().await?;
                Ok(true)
            }
            other => {
                self.stream.unreserve(self.channel, credit, 0);
                Ok(other.is_none())
            }
        }
    }

    async fn send_pending(&mut self) -> Result<(), Closed> {
        if !self.pending.is_empty() {
            self.stream
                .send_reserved(self.channel, &self.pending)
                .await?;
            self.pending.clear();
        }
        Ok(())
    }
}
