//! Images that are built from Dockerfiles: cache, failures, cancellation, stages, owners, export.
//!
//! The guests are fake and have a small shell; `forkd-image`, which makes the disk of the image, is real.

use std::io::Read;

use bytes::Bytes;
use forkd_api::{BuildEvent, BuildImage, ErrorBody, ErrorCode, ImageInfo};
use forkd_daemon_tests::{Daemon, Options, Sandbox, programs, until};
use forkd_rest_client::{Client, Error, Frames};
use futures::TryStreamExt;

/// Size of the disks: small, so that the tests are fast.
const DISK_MIB: u32 = 64;

/// A daemon with an image `base` and a kernel.
async fn daemon() -> Daemon {
    daemon_with(Options::default()).await
}

async fn daemon_with(options: Options) -> Daemon {
    let mut daemon = Daemon::prepare(&programs!(), options);
    let data = daemon.data();
    let base = data.join("images/base");
    std::fs::create_dir_all(&base).unwrap();
    std::fs::create_dir_all(data.join("kernels")).unwrap();
    let size = 1 << 20;
    for path in [
        base.join("root.ext4"),
        data.join("kernels/vmlinux"),
        data.join("kernels/initramfs.cpio"),
    ] {
        let file = std::fs::File::create(path).unwrap();
        file.set_len(size).unwrap();
    }
    let digest = format!("b3:{}", "0".repeat(64));
    let record = serde_json::json!({
        "schema": 3, "name": "base", "description": "", "recipe": digest,
        "source": { "kind": "oci", "image": "base", "digest": "sha256:0" },
        "disk": { "size": size, "digest": digest }, "uuid": "", "memory_mib": 64, "vcpus": 1,
        "env": { "COLOUR": "blue" }, "packages": [], "run": { "user": "1234", "cmd": ["old"] },
    });
    std::fs::write(base.join("image.json"), record.to_string()).unwrap();
    daemon.launch().await;
    daemon
}

/// A build as a client asks for it.
#[derive(Clone, Default)]
struct Build {
    request: BuildImage,
    files: Vec<(String, String)>,
}

impl Build {
    fn of(dockerfile: &str) -> Self {
        Self {
            request: BuildImage {
                name: "built".into(),
                dockerfile: dockerfile.into(),
                disk_mib: Some(DISK_MIB),
                memory_mib: Some(64),
                ..BuildImage::default()
            },
            files: Vec::new(),
        }
    }

    fn file(mut self, name: &str, content: &str) -> Self {
        self.files.retain(|(found, _)| found != name);
        self.files.push((name.into(), content.into()));
        self
    }

    fn change(mut self, change: impl FnOnce(&mut BuildImage)) -> Self {
        change(&mut self.request);
        self
    }

    async fn start(&self, client: &Client) -> Result<Frames<BuildEvent>, Error> {
        let mut archive = tar::Builder::new(Vec::new());
        let mut add = |name: &str, content: &[u8]| {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            archive.append_data(&mut header, name, content).unwrap();
        };
        add("build.json", &serde_json::to_vec(&self.request).unwrap());
        for (name, content) in &self.files {
            add(&format!("context/{name}"), content.as_bytes());
        }
        let bytes = archive.into_inner().unwrap();
        let pieces: Vec<_> = bytes.chunks(1000).map(|piece| Ok(piece.to_vec())).collect();
        client.build_image(futures::stream::iter(pieces)).await
    }

    async fn run(&self, client: &Client) -> Done {
        let mut events = self.start(client).await.expect("the build begins");
        let mut done = Done::default();
        while let Some(event) = events.next().await.expect("events") {
            match event {
                BuildEvent::Output { text, .. } => done.output.push_str(&text),
                BuildEvent::Step { text, .. } => done.steps.push(text),
                BuildEvent::Note { .. } => {}
                BuildEvent::Finished { image, ran, cached } => {
                    done.image = Some(image);
                    done.counts = (ran, cached);
                }
                BuildEvent::Failed {
                    error,
                    line,
                    sandbox,
                    exit_code,
                } => {
                    done.error = Some(error);
                    done.line = line;
                    done.sandbox = sandbox;
                    done.exit_code = exit_code;
                }
            }
        }
        done
    }
}

/// Everything that a build told.
#[derive(Debug, Default)]
struct Done {
    output: String,
    steps: Vec<String>,
    image: Option<ImageInfo>,
    counts: (u32, u32),
    error: Option<ErrorBody>,
    line: Option<u32>,
    sandbox: Option<String>,
    exit_code: Option<i32>,
}

impl Done {
    fn code(&self) -> ErrorCode {
        let error = self.error.as_ref();
        error.unwrap_or_else(|| panic!("no error: {self:?}")).code
    }
}

async fn sandboxes(daemon: &Daemon) -> usize {
    daemon.client().sandboxes().await.unwrap().len()
}

/// Files that builds and fetches left in their staging folder.
fn staged(daemon: &Daemon) -> usize {
    let folder = daemon.data().join("downloads/fetching");
    std::fs::read_dir(folder).map_or(0, Iterator::count)
}

/// A sandbox that a build drops ends a moment later.
async fn nothing_is_left(daemon: &Daemon) {
    until("nothing of the build is left", async || {
        (sandboxes(daemon).await == 0 && staged(daemon) == 0).then_some(())
    })
    .await;
}

const STEPS: &str = "FROM base\nCOPY a /a\nRUN echo one > /one\nCOPY b /b\nRUN cat /b\nENV X=1\n";

#[tokio::test]
async fn a_changed_file_reruns_only_what_follows() {
    let daemon = daemon().await;
    let client = daemon.client();
    let build = Build::of(STEPS).file("a", "A").file("b", "B1\n");
    let first = build.run(client).await;
    assert_eq!(
        (first.counts, first.output.as_str()),
        ((4, 0), "B1\n"),
        "{first:?}"
    );
    let image = client.image("built").await.unwrap();
    assert_eq!(image.env["X"], "1");
    assert_eq!(image.env["COLOUR"], "blue");
    assert_eq!(image.user.as_deref(), Some("1234"));
    assert_eq!(image.cmd, ["old"]);

    let again = build.run(client).await;
    assert_eq!((again.counts, again.output.as_str()), ((0, 4), ""));
    let changed = build.clone().file("b", "B2\n").run(client).await;
    assert_eq!((changed.counts, changed.output.as_str()), ((2, 2), "B2\n"));
    // A file that no step copies changes nothing, and both results are in the cache.
    let extra = build.clone().file("c", "C").run(client).await;
    assert_eq!(extra.counts, (0, 4));
    let forced = build.clone().change(|request| request.no_cache = true);
    assert_eq!(forced.run(client).await.counts, (4, 0));
    let other = build.clone().file("a", "changed").run(client).await;
    assert_eq!(other.counts, (4, 0));
    // Steps are not snapshots of the user.
    assert!(client.snapshots().await.unwrap().is_empty());
    assert_eq!((sandboxes(&daemon).await, staged(&daemon)), (0, 0));
}

#[tokio::test]
async fn a_failed_step_stays_as_a_sandbox() {
    let daemon = daemon().await;
    let client = daemon.client();
    let build = Build::of("FROM base\nRUN echo here > /x\n\nRUN false\nRUN true\n");
    let failed = build.run(client).await;
    assert_eq!(failed.code(), ErrorCode::StepFailed);
    assert_eq!((failed.line, failed.exit_code), (Some(4), Some(1)));
    let id = failed.sandbox.clone().expect("a sandbox is kept");
    let error = failed.error.as_ref().unwrap();
    assert!(
        error.error.contains("line 4") && error.error.contains(&id),
        "{error:?}"
    );
    assert!(
        error
            .hint
            .as_ref()
            .unwrap()
            .contains(&format!("forkd shell {id}"))
    );
    let sandbox = Sandbox::new(client, &id);
    assert_eq!(sandbox.read("/x").await.unwrap(), "here\n");
    let info = sandbox.info().await.unwrap();
    assert!(info.expires_at_unix.is_some());
    client.kill(&id).await.unwrap();
    assert!(client.image("built").await.is_err());

    let removed = build.clone().change(|request| request.rm = true);
    let failed = removed.run(client).await;
    assert_eq!(
        (failed.code(), &failed.sandbox),
        (ErrorCode::StepFailed, &None)
    );
    assert_eq!(sandboxes(&daemon).await, 0);
    let missing = Build::of("FROM base\nRUN gcc x.c\n").run(client).await;
    assert_eq!(missing.exit_code, Some(127));
}

#[tokio::test]
async fn a_client_that_goes_away_cancels_its_build() {
    let daemon = daemon().await;
    let client = daemon.client();
    let build = Build::of("FROM base\nRUN echo a > /a\nRUN sleep 600\n");
    let mut events = build.start(client).await.unwrap();
    loop {
        match events.next().await.unwrap() {
            Some(BuildEvent::Step { line: 3, .. }) => break,
            Some(_) => {}
            None => panic!("the build ended"),
        }
    }
    assert_eq!(sandboxes(&daemon).await, 1);
    drop(events);
    nothing_is_left(&daemon).await;
    // What had ended before is in the cache.
    let next = Build::of("FROM base\nRUN echo a > /a\n").run(client).await;
    assert_eq!(next.counts, (0, 1));
}

#[tokio::test]
async fn only_the_stages_that_are_needed_run() {
    let daemon = daemon().await;
    let client = daemon.client();
    let text = "ARG WHO=world\nFROM base AS tools\nARG WHO\nRUN echo hello $WHO > /tools/greeting\n\
                FROM base AS unused\nRUN false\n\
                FROM base AS final\nWORKDIR /srv\nCOPY --from=tools /tools/ ./in/\nRUN cat /srv/in/greeting\n\
                FROM final\nRUN false\n";
    let build = Build::of(text).change(|request| request.target = Some("final".into()));
    let done = build.run(client).await;
    // The fake shell expands no variables: the line arrives as it was written.
    assert_eq!(
        (done.counts, done.output.as_str()),
        ((3, 0), "hello $WHO\n"),
        "{done:?}"
    );
    let detail = client.image("built").await.unwrap();
    assert_eq!(detail.working_dir.as_deref(), Some("/srv"));
    // Another value of an argument is another key.
    let other = build.clone().change(|request| {
        request.args.insert("WHO".into(), "you".into());
    });
    assert_eq!(other.run(client).await.counts.0, 3);
    assert_eq!(build.run(client).await.counts, (0, 3));
    let missing = build.change(|request| request.target = Some("no".into()));
    assert_eq!(missing.run(client).await.code(), ErrorCode::InvalidRequest);
}

#[tokio::test]
async fn refusals_name_the_line_and_leave_nothing() {
    let daemon = daemon().await;
    let client = daemon.client();
    for (text, line, code) in [
        (
            "FROM base\nONBUILD RUN true",
            Some(2),
            ErrorCode::UnsupportedInstruction,
        ),
        (
            "FROM base\n\nADD http://x/y /z",
            Some(3),
            ErrorCode::UnsupportedInstruction,
        ),
        ("FROM base\nJUMP", Some(2), ErrorCode::DockerfileInvalid),
        (
            "FROM base\nUSER ${X:?no user}",
            Some(2),
            ErrorCode::DockerfileInvalid,
        ),
        (
            "FROM base\nRUN true\nCOPY no /x",
            Some(3),
            ErrorCode::FileNotFound,
        ),
        (
            "FROM base\nCOPY --from=base /no /x",
            Some(2),
            ErrorCode::FileNotFound,
        ),
        (
            "FROM base\nCOPY --chmod=u+x a /x",
            Some(2),
            ErrorCode::UnsupportedInstruction,
        ),
        (
            "FROM --platform=linux/arm64 base",
            Some(1),
            ErrorCode::UnsupportedInstruction,
        ),
        ("FROM $NOTHING", Some(1), ErrorCode::DockerfileInvalid),
        ("FROM nowhere", Some(1), ErrorCode::InvalidRequest),
        (
            "FROM base\nRUN --mount=type=secret,id=t,required true",
            Some(2),
            ErrorCode::InvalidRequest,
        ),
    ] {
        let build = Build::of(text).change(|request| request.rm = true);
        let done = build.run(client).await;
        assert_eq!((done.line, done.code()), (line, code), "{text}: {done:?}");
    }
    let bad = Build::of("FROM base").change(|request| request.name = "../x".into());
    let error = bad.start(client).await.unwrap_err();
    assert_eq!(error.code(), Some(ErrorCode::InvalidName));
    let taken = Build::of("FROM base").change(|request| request.name = "base".into());
    assert_eq!(taken.run(client).await.code(), ErrorCode::AlreadyExists);
    let junk = futures::stream::iter([Ok(vec![7; 2000])]);
    let error = client.build_image(junk).await.unwrap_err();
    assert_eq!(error.code(), Some(ErrorCode::InvalidRequest));
    nothing_is_left(&daemon).await;
}

#[tokio::test]
async fn secrets_reach_the_step_and_nothing_else() {
    use base64::Engine;
    let daemon = daemon().await;
    let client = daemon.client();
    let secret = "open-sesame-4711";
    let text = "FROM base\nRUN --mount=type=secret,id=token cat /run/secrets/token\nRUN cat /run/secrets/token\n";
    let build = Build::of(text).change(|request| {
        let value = base64::engine::general_purpose::STANDARD.encode(secret);
        request.secrets.insert("token".into(), value);
        request.rm = true;
    });
    let done = build.run(client).await;
    assert_eq!(done.output, secret);
    // The second step does not find it.
    assert_eq!((done.code(), done.line), (ErrorCode::StepFailed, Some(3)));
    let first = text.rsplit_once("RUN cat").unwrap().0;
    let fine = build.change(|request| request.dockerfile = first.into());
    assert_eq!(fine.run(client).await.counts, (0, 1));
    let bytes = exported(client, "built").await;
    let contains = |bytes: &[u8]| bytes.windows(secret.len()).any(|w| w == secret.as_bytes());
    assert!(!contains(&bytes));
    let disk = std::fs::read(daemon.data().join("images/built/root.ext4")).unwrap();
    assert!(!contains(&disk));
}

async fn exported(client: &Client, name: &str) -> Vec<u8> {
    let content = client.export_image(name).await.expect("an archive");
    content
        .try_collect::<Vec<Bytes>>()
        .await
        .expect("a whole archive")
        .concat()
}

#[tokio::test]
async fn an_export_has_the_configuration_and_is_read_again() {
    let daemon = daemon().await;
    let client = daemon.client();
    let text = "FROM base\nCOPY a /a\nENV A=1\nEXPOSE 80 53/udp\nENTRYPOINT [\"/a\"]\nCMD [\"x\"]\nLABEL l=m\n";
    Build::of(text).file("a", "content").run(client).await;
    let bytes = exported(client, "built").await;
    let mut archive = tar::Archive::new(bytes.as_slice());
    let mut config = None;
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).unwrap();
        let json: Option<serde_json::Value> = serde_json::from_slice(&content).ok();
        config = config.or(json.filter(|json| json.get("rootfs").is_some()));
    }
    let config = &config.expect("a configuration")["config"];
    assert_eq!(config["Entrypoint"], serde_json::json!(["/a"]));
    assert_eq!(config["Cmd"], serde_json::json!(["x"]));
    assert_eq!(config["User"], "1234");
    // An OCI archive is what `forkd image pull -` takes.
    let pieces = [Ok(bytes)];
    let operation = client
        .send_image(Some("again"), Some(DISK_MIB), futures::stream::iter(pieces))
        .await
        .unwrap();
    let ended = client.operation(&operation.id, 60).await.unwrap();
    let image = ended.image.unwrap_or_else(|| panic!("{:?}", ended.error));
    let detail = client.image(&image.name).await.unwrap();
    assert_eq!(
        (detail.entrypoint, detail.ports),
        (vec!["/a".to_owned()], vec![80])
    );
    let error = client.export_image("none").await.map(drop).unwrap_err();
    assert_eq!(error.code(), Some(ErrorCode::ImageNotFound));
}

#[tokio::test]
async fn owners_have_their_own_images_and_caches() {
    let options = Options {
        tokens: vec!["operator".into()],
        ..Options::default()
    };
    let daemon = daemon_with(options).await;
    let (ann, bob) = (daemon.user("ann").await, daemon.user("bob").await);
    let build = Build::of("FROM base\nRUN echo a > /a\n");
    assert_eq!(build.run(&ann).await.counts, (1, 0));
    let other = build.clone().change(|request| request.name = "bobs".into());
    assert_eq!(other.run(&bob).await.counts, (1, 0));
    let theirs = bob.image("built").await.unwrap_err();
    assert_eq!(theirs.code(), Some(ErrorCode::ImageNotFound));
    let error = bob.export_image("built").await.map(drop).unwrap_err();
    assert_eq!(error.code(), Some(ErrorCode::ImageNotFound));
    let taken = build.run(&bob).await;
    assert_eq!(taken.code(), ErrorCode::AlreadyExists);
    let base = Build::of("FROM built\nRUN true\n").change(|request| request.name = "x".into());
    assert!(base.run(&bob).await.error.is_some());
    // What one prunes is not what the other has.
    bob.prune_images().await.unwrap();
    let again = build
        .clone()
        .change(|request| request.name = "again".into());
    assert_eq!(again.run(&ann).await.counts, (0, 1));
}

#[tokio::test]
async fn a_daemon_that_restarts_finds_the_cache() {
    let mut daemon = daemon().await;
    let build = Build::of("FROM base\nRUN echo a > /a\nRUN cat /a\n");
    assert_eq!(build.run(daemon.client()).await.counts, (2, 0));
    daemon.restart().await;
    assert_eq!(build.run(daemon.client()).await.counts, (0, 2));
    // A step of a daemon that was killed meanwhile is not there, and its sandbox goes.
    let long = Build::of("FROM base\nRUN echo a > /a\nRUN sleep 600\n");
    let mut events = long.start(daemon.client()).await.unwrap();
    while !matches!(
        events.next().await.unwrap(),
        Some(BuildEvent::Step { line: 3, .. })
    ) {}
    daemon.restart().await;
    // The stream of the old daemon has ended.
    drop(events);
    nothing_is_left(&daemon).await;
    let next = Build::of("FROM base\nRUN echo a > /a\nRUN echo b > /b\n");
    assert_eq!(next.run(daemon.client()).await.counts, (1, 1));
}
