//! New random numbers for the interpreters of a child.
//!
//! Children of one snapshot have the memory of one interpreter, and with it the state of every generator in it. Each
//! interpreter gets a seed of its own: a digest of the child's entropy, the interpreter's name and its process ID.
//!
//! A Python interpreter that waits for a call and has neither another thread nor a timer runs nothing before its next
//! message. It gets its seed with that message ([`Interp::hand_over_seed`]), so a child that is never asked to evaluate
//! does not wake it. Every other interpreter is reseeded at once.
//!
//! Reseeding at once has two steps, so that a frozen interpreter can be thawed between them: [`Interps::begin_reseed`] writes
//! the request to the interpreter's socket, [`Reseeding::finish`] waits for the answers. A runner reads its socket
//! before it runs anything, so an interpreter that waits for a call is reseeded before its first instruction of user
//! code. An interpreter in the middle of a call is reseeded beside that call.

use std::rc::Rc;
use std::time::Duration;

use forkd_guest_proto::{AgentError, ErrorCode};
use sha2::{Digest, Sha512};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::running::Running;
use super::wire::Ask;
use super::{CONTROL_TIME, Interp, Interps};

/// Separates these seeds from every other use of the same entropy.
const DOMAIN: &[u8] = b"forkd interpreter seed 1";
/// How long a request may take to fit into the socket of a frozen interpreter.
const QUEUE_TIME: Duration = Duration::from_secs(1);
/// How long an interpreter in the middle of a call may take. Code that does not let its runner work keeps the child
/// from being ready.
const IN_CALL_TIME: Duration = Duration::from_secs(10);

/// An interpreter and its pending answer.
type Asked = (Rc<Interp>, JoinHandle<Result<(), String>>);

/// Interpreters that were asked to reseed.
pub struct Reseeding {
    asked: Vec<Asked>,
    /// Names of those that get their seed with their next message.
    later: Vec<String>,
}

impl Interps {
    /// Asks every running interpreter to reseed, now or before its next call. When this returns, the requests of now are
    /// in the sockets.
    pub async fn begin_reseed(&self, entropy: &[u8]) -> Reseeding {
        let all: Vec<_> = self.table.borrow().values().cloned().collect();
        let mut asked = Vec::new();
        let mut later = Vec::new();
        for interp in all {
            let Some(running) = interp.running() else {
                continue;
            };
            let seed = hex::encode(seed(entropy, &interp.name, running.pid));
            if running.alone.get() && !interp.is_in_call() {
                running.seed.replace(Some(seed));
                later.push(interp.name.clone());
                continue;
            }
            // A seed of an earlier identity is of no use any more.
            running.seed.take();
            let (queued, is_queued) = oneshot::channel();
            let task = tokio::task::spawn_local(ask(running, seed, queued));
            // A socket that is full holds a call that the interpreter has not read yet. It reads on once it is thawed.
            let _ = tokio::time::timeout(QUEUE_TIME, is_queued).await;
            asked.push((interp, task));
        }
        Reseeding { asked, later }
    }
}

impl Reseeding {
    /// Waits for the answers and returns the names of all interpreters. One that failed is an error: its random
    /// numbers are those of the child's siblings.
    pub async fn finish(self) -> Result<Vec<String>, AgentError> {
        let mut done = self.later;
        for (interp, task) in self.asked {
            let limit = if interp.is_in_call() {
                IN_CALL_TIME
            } else {
                CONTROL_TIME
            };
            let why = match tokio::time::timeout(limit, task).await {
                Ok(Ok(Ok(()))) => {
                    done.push(interp.name.clone());
                    continue;
                }
                Ok(Ok(Err(why))) => why,
                Ok(Err(_)) => "its task ended".to_owned(),
                Err(_) => format!("no answer within {} s", limit.as_secs()),
            };
            return Err(AgentError::new(
                ErrorCode::Internal,
                format!("interpreter {} was not reseeded: {why}", interp.name),
            ));
        }
        done.sort_unstable();
        Ok(done)
    }
}

impl Interp {
    /// Reseeds an interpreter that was left alone when the child got its identity. If that fails, the process ends: its
    /// random numbers are those of the child's siblings.
    pub(super) async fn hand_over_seed(&self, running: &Rc<Running>) -> Result<(), AgentError> {
        let Some(seed) = running.seed.take() else {
            return Ok(());
        };
        let running = Rc::clone(running);
        // A task of its own: a call that is given up must not leave half a message in the socket.
        let task = tokio::task::spawn_local(async move {
            let (queued, _) = oneshot::channel();
            let asked = tokio::time::timeout(CONTROL_TIME, ask(Rc::clone(&running), seed, queued));
            let done = asked
                .await
                .unwrap_or_else(|_| Err(format!("no answer within {} s", CONTROL_TIME.as_secs())));
            if done.is_err() {
                running.kill();
                running.wait_for_death().await;
            }
            done
        });
        let why = match task.await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(why)) => why,
            Err(_) => "its task ended".to_owned(),
        };
        Err(AgentError::new(
            ErrorCode::Internal,
            format!(
                "interpreter {} was not reseeded and was ended: {why}",
                self.name
            ),
        ))
    }
}

async fn ask(
    running: Rc<Running>,
    seed: String,
    queued: oneshot::Sender<()>,
) -> Result<(), String> {
    let asked = running.ask(|id| Ask::Reseed { id, entropy: &seed }).await;
    let _ = queued.send(());
    let answer = match asked {
        Ok(answer) => answer.await.ok(),
        Err(_) => None,
    };
    match answer.map(|answer| answer.error) {
        Some(Some(error)) => Err(format!("{}: {}", error.name, error.message)),
        // An interpreter that died has no random numbers any more; the next one draws its own.
        Some(None) | None => Ok(()),
    }
}

fn seed(entropy: &[u8], name: &str, pid: u32) -> [u8; 64] {
    let mut digest = Sha512::new();
    digest.update(DOMAIN);
    digest.update((name.len() as u64).to_le_bytes());
    digest.update(name);
    digest.update(pid.to_le_bytes());
    digest.update(entropy);
    digest.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_interpreter_of_every_child_has_a_seed_of_its_own() {
        let cases = [
            (b"one", "python", 7),
            (b"two", "python", 7),
            (b"one", "python2", 7),
            (b"one", "python", 8),
        ];
        let seeds: std::collections::HashSet<_> = cases
            .iter()
            .map(|(entropy, name, pid)| seed(*entropy, name, *pid))
            .collect();
        assert_eq!(seeds.len(), cases.len());
        assert_eq!(seed(b"one", "python", 7), seed(b"one", "python", 7));
    }
}
