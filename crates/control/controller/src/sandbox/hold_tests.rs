//! Cuts that leave their source still, with a stand-in for the VMM.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use forkd_channel::Channel;
use forkd_types::{Digest, Tag};
use forkd_vmm_link::Vmm;
use forkd_vmm_proto::{
    Capabilities, Command, CutReport, Event, FromVmm, ImageId, MAX_MESSAGE, Reply, Request,
    ResponseTo, decode, encode,
};
use tokio::sync::{mpsc, oneshot};

use super::driver::{Ask, Owned, drive};
use super::entry::Sandbox;
use super::{CutMode, Phase};
use crate::app::App;
use crate::branching::cut_and_hold;
use crate::config::Config;

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
    sandbox: Arc<Sandbox>,
    asked: mpsc::UnboundedReceiver<&'static str>,
    tag: Tag,
}

impl Bench {
    fn new(whole: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let app = app(dir.path());
        let digest = Digest([0; 32]);
        let blob = serde_json::json!({"digest": digest, "bytes": 1 << 20});
        let record = serde_json::from_value(serde_json::json!({
            "id": "sb-1", "state": "running", "tag": "base", "manifest": digest,
            "pid": 1, "owner": "me", "created_at_unix": 1, "memory_mib": 1, "vcpus": 1, "cpu": "host",
            "memory": {"layers": [blob]}, "disks": [], "source": forkd_store::Source::default(),
        }));
        let (sandbox, queue) = Sandbox::new(
            record.unwrap(),
            Phase::Running,
            "vsock".into(),
            "console".into(),
        );
        let sandbox = Arc::new(sandbox);
        let (ours, theirs) = Channel::pair().unwrap();
        let (sender, asked) = mpsc::unbounded_channel();
        std::thread::spawn(move || stand_in(&theirs, whole, &sender));
        let (vmm, events) = Vmm::new(ours.into(), 1, Capabilities::all()).unwrap();
        let owned = Owned {
            app: Arc::clone(&app),
            sandbox: Arc::clone(&sandbox),
            vmm,
            events,
            lease: app.store.hold([]),
        };
        tokio::spawn(drive(owned, queue));
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

#[tokio::test]
async fn a_source_stands_still_until_it_is_let_go() {
    let mut bench = Bench::new(true);
    let (_made, held) = cut_and_hold(&bench.app, &bench.sandbox, &bench.tag, CutMode::Full)
        .await
        .unwrap();
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
    let mut bench = Bench::new(true);
    let (_made, held) = cut_and_hold(&bench.app, &bench.sandbox, &bench.tag, CutMode::Full)
        .await
        .unwrap();
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
    let mut bench = Bench::new(false);
    let failed = cut_and_hold(&bench.app, &bench.sandbox, &bench.tag, CutMode::Full).await;
    assert!(failed.is_err());
    assert_eq!(bench.asked.recv().await, Some("cut"));
    assert_eq!(bench.asked.recv().await, Some("resume"));
    assert!(!bench.app.store.contains(&bench.tag));
    bench.pause().await;
}
