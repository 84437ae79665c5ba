//! `forkd-image fetch`, as the daemon runs it: a request and an archive go in, lines and an image come out.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use forkd_formats::image::ImageRecord;
use forkd_formats::image_cli::{FORMAT, FetchLine, FetchProblem, FetchRequest};
use forkd_oci::digest::Digest;
use serde_json::json;
use tar::{Builder, Header};

fn tar(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut tar = Builder::new(Vec::new());
    for (path, content) in files {
        let mut header = Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o755);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        tar.append_data(&mut header, path, *content).unwrap();
    }
    tar.into_inner().unwrap()
}

fn archive() -> Vec<u8> {
    let layer = tar(&[("app/run", b"program")]);
    let config = json!({
        "config": {"Cmd": ["/app/run"], "Healthcheck": {"Test": ["CMD", "/app/run", "--well"]}},
        "rootfs": {"diff_ids": [Digest::of(&layer)]},
    });
    let manifest = json!([{"Config": "config.json", "RepoTags": null, "Layers": ["layer.tar"]}]);
    tar(&[
        ("config.json", config.to_string().as_bytes()),
        ("layer.tar", &layer),
        ("manifest.json", manifest.to_string().as_bytes()),
    ])
}

fn request(source: &str) -> FetchRequest {
    FetchRequest {
        format: FORMAT,
        source: source.into(),
        name: None,
        platform: None,
        disk_mib: 64,
        credential: None,
    }
}

/// The last line, and whether the program succeeded.
fn fetch(folder: &Path, line: &str, archive: &[u8]) -> (FetchLine, bool) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_forkd-image"))
        .arg("fetch")
        .arg("--into")
        .arg(folder.join("image"))
        .arg("--blobs")
        .arg(folder.join("blobs"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    // A program that refuses the request reads no archive.
    let _ = stdin
        .write_all(line.as_bytes())
        .and_then(|()| stdin.write_all(b"\n"))
        .and_then(|()| stdin.write_all(archive));
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let last = text.lines().last().unwrap_or_default();
    let last = serde_json::from_str(last).unwrap_or_else(|error| panic!("{error}: {text}"));
    (last, output.status.success())
}

#[test]
fn an_archive_becomes_an_image_with_its_digest_in_the_name() {
    let folder = tempfile::tempdir().unwrap();
    let line = json!(request("-")).to_string();
    let (last, succeeded) = fetch(folder.path(), &line, &archive());
    let FetchLine::Done(made) = &last else {
        panic!("{last:?}");
    };
    assert!(succeeded);
    let short = made
        .digest
        .strip_prefix("sha256:")
        .unwrap()
        .get(..12)
        .unwrap();
    assert_eq!(made.name, format!("image-{short}"));
    let record = fs::read(folder.path().join("image/image.json")).unwrap();
    let record = ImageRecord::parse(&record).unwrap();
    assert_eq!(record.run.healthcheck, ["CMD", "/app/run", "--well"]);
    let mut left: Vec<_> = fs::read_dir(folder.path().join("image"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    left.sort();
    assert_eq!(left, ["image.json", "root.ext4"]);
}

#[test]
fn what_cannot_be_fetched_has_a_kind() {
    let folder = tempfile::tempdir().unwrap();
    let damaged = &archive()[..1500];
    for (line, archive, kind) in [
        (
            json!(request("python:3-slim")).to_string(),
            &b""[..],
            FetchProblem::Configuration,
        ),
        (
            json!(request("127.0.0.1:1/a:1")).to_string(),
            b"",
            FetchProblem::Unreachable,
        ),
        (
            json!(request("dir:/etc")).to_string(),
            b"",
            FetchProblem::Invalid,
        ),
        (
            json!(request("-")).to_string(),
            damaged,
            FetchProblem::Invalid,
        ),
        ("{}".into(), b"", FetchProblem::Internal),
    ] {
        let (last, succeeded) = fetch(folder.path(), &line, archive);
        let FetchLine::Failed(failure) = &last else {
            panic!("{line}: {last:?}");
        };
        assert_eq!(failure.kind, kind, "{line}: {failure:?}");
        assert!(!succeeded);
    }
}
