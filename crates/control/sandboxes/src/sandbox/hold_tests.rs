//! Cuts that leave their source still, with a stand-in for the VMM.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use forkd_channel::Channel;
use forkd_types::{Digest, Engine, Tag};
use forkd_vmm_proto::spawn::Vm;
use forkd_vmm_proto::{
    Capabilities, Command, CutReport, Event, FromVmm, ImageId, MAX_MESSAGE, Reply, Request,
    ResponseTo, Status, VmmPhase, decode, encode,
};
use tokio::sync::{mpsc, oneshot};

use super::birth::{Adoption, Birth};
use super::{Ask, CutDone, CutMode, Destination, Phase, SandboxHandle, owner};
use crate::app::App;
use crate::config::Config;
use crate::error::Error;
use crate::launch::{self, StartedVm};
use crate::ops::branch::{claim, cut};
use crate::state::SandboxRecord;

fn app(root: &Path) -> Arc<App> {
    App::open(Config::below(root)).unwrap().0
}

fn receive(socket: &Channel) -> Option<(Request, Vec<File>)> {
    let mut bytes = vec![0; MAX_MESSAGE];
    let received = socket.recv(&mut bytes).ok()?;
    let files = received.fds.into_iter().map(File::from).collect();
    Some((decode(&bytes[..received.len]).unwrap(), files))
}

/// Obeys, tells what it was asked, and writes cuts that can be stored or cannot.
fn stand_in(socket: &Channel, whole: bool, asked: &mpsc::UnboundedSender<&'static str>) {
    let say = |said: FromVmm| socket.send(&encode(&said).unwrap(), &[]);
    while let Some((Request { seq, command }, files)) = receive(socket) {
        let (name, reply) = match command {
            Command::Cut(spec) => {
                assert!(!spec.resume);
                files[usize::from(spec.state.0)].set_len(4096).unwrap();
                if whole {
                    files[usize::from(spec.memory.0)].set_len(1 << 20).unwrap();
                }
                let taken = Event::CutTaken { seq, pause_us: 0 };
                say(FromVmm::Event(taken)).unwrap();
                let report = CutReport {
                    image: ImageId(1),
                    ..CutReport::default()
                };
                ("cut", Reply::Cut(report))
            }
            Command::Hello { .. } => {
                let hello = Reply::Done;
                let _ = say(FromVmm::Response(ResponseTo {
                    seq,
                    result: Ok(hello),
                }));
                continue;
            }
            Command::Status => {
                let status = Reply::Status(Status {
                    phase: VmmPhase::Running,
                    shape: None,
                    agent_ready: true,
                });
                let _ = say(FromVmm::Response(ResponseTo {
                    seq,
                    result: Ok(status),
                }));
                continue;
            }
            Command::Resume => ("resume", Reply::Done),
            Command::Pause => ("pause", Reply::Done),
            Command::Stop => ("stop", Reply::Done),
            other => panic!("{other:?}"),
        };
        asked.send(name).unwrap();
        let result = Ok(reply);
        // The daemon may have hung up.
        let _ = say(FromVmm::Response(ResponseTo { seq, result }));
    }
}

struct Bench {
    _dir: tempfile::TempDir,
    app: Arc<App>,
    sandbox: Arc<SandboxHandle>,
    asked: mpsc::UnboundedReceiver<&'static str>,
    tag: Tag,
}

impl Bench {
    async fn new(whole: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let app = app(dir.path());
        let digest = Digest([0; 32]);
        let blob = serde_json::json!({"digest": digest, "bytes": 1 << 20});
        let record = serde_json::from_value(serde_json::json!({
            "id": "sb-1", "state": "running", "tag": "base", "manifest": digest,
            "pid": 1, "owner": "me", "created_at_unix": 1, "memory_mib": 1, "vcpus": 1, "cpu": "host",
            "memory": {"layers": [blob]}, "disks": [], "source": forkd_store::Source::default(),
        }));
        let (ours, theirs) = Channel::pair().unwrap();
        let (sender, asked) = mpsc::unbounded_channel();
        std::thread::spawn(move || stand_in(&theirs, whole, &sender));
        let vm = Vm {
            id: "sb-1".parse().unwrap(),
            pid: 1,
            shape: launch::shape(Engine::FORKD, 1, 1, forkd_store::Cpu::Host),
            capabilities: Capabilities::all(),
            pooled: false,
        };
        let taken = StartedVm {
            vm,
            control: ours.into(),
        };
        let adoption = Adoption { taken, epoch: 1 };
        let slot = app.limits.adopted("me");
        let record: SandboxRecord = record.unwrap();
        let sandbox = owner::start(&app, record, slot, Birth::Adopt(adoption));
        sandbox.launched().await;
        Self {
            _dir: dir,
            app,
            sandbox,
            asked,
            tag: "state".parse().unwrap(),
        }
    }

    /// Only a source that runs can be paused.
    async fn pause(&mut self) {
        let (sender, done) = oneshot::channel();
        self.sandbox.ask(Ask::Pause(sender)).unwrap();
        done.await.unwrap().unwrap();
        assert_eq!(self.asked.recv().await, Some("pause"));
    }
}

type Held = oneshot::Sender<()>;

/// Cuts a source that is about to end.
async fn cut_and_hold(bench: &Bench) -> Result<(CutDone, Held), Error> {
    let (held, until) = oneshot::channel();
    let claim = claim(&bench.app, &bench.tag, "me", None).await?;
    let destination = Destination::Suspend { claim, until };
    Ok((
        cut(&bench.sandbox, destination, CutMode::Full, false).await?,
        held,
    ))
}

#[tokio::test]
async fn a_source_stands_still_until_it_is_let_go() {
    let mut bench = Bench::new(true).await;
    let (_made, held) = cut_and_hold(&bench).await.unwrap();
    assert_eq!(bench.asked.recv().await, Some("cut"));
    assert_eq!(bench.sandbox.phase(), Phase::Cutting);
    assert!(bench.app.store.contains(&bench.tag));
    assert!(!bench.app.writing.is_writing(&bench.tag));
    drop(held);
    assert_eq!(bench.asked.recv().await, Some("resume"));
    bench.pause().await;
}

#[tokio::test]
async fn a_source_that_is_ended_does_not_run_again() {
    let mut bench = Bench::new(true).await;
    let (_made, held) = cut_and_hold(&bench).await.unwrap();
    bench.sandbox.stop.cancel();
    bench.sandbox.gone.cancelled().await;
    drop(held);
    let mut asked = Vec::new();
    while let Some(name) = bench.asked.recv().await {
        asked.push(name);
    }
    assert_eq!(asked, ["cut", "stop"]);
}

#[tokio::test]
async fn a_source_whose_cut_cannot_be_stored_goes_on() {
    let mut bench = Bench::new(false).await;
    let failed = cut_and_hold(&bench).await;
    assert!(failed.is_err());
    assert_eq!(bench.asked.recv().await, Some("cut"));
    assert_eq!(bench.asked.recv().await, Some("resume"));
    assert!(!bench.app.store.contains(&bench.tag));
    bench.pause().await;
}
