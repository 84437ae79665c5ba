//! Signatures of `ssh-keygen`, and who is trusted.

mod kit;

use std::path::Path;
use std::process::{Command, Stdio};

use forkd_hub::documents::{Documents, Signature};
use forkd_hub::pack::Base;
use forkd_hub::sign::{NAMESPACE, Signers, fingerprints, message};
use forkd_hub::{HubError, Kind};
use kit::{machine, make, stream};

fn key(dir: &Path, name: &str, kind: &str) -> (std::path::PathBuf, String) {
    let path = dir.join(name);
    let made = Command::new("ssh-keygen")
        .args(["-q", "-t", kind, "-N", "", "-C", name, "-f"])
        .arg(&path)
        .status();
    assert!(made.unwrap().success());
    let public = std::fs::read_to_string(path.with_extension("pub")).unwrap();
    (path, public)
}

fn sign(key: &Path, namespace: &str, text: &str) -> Vec<u8> {
    use std::io::Write;
    let mut child = Command::new("ssh-keygen")
        .args(["-Y", "sign", "-n", namespace, "-f"])
        .arg(key)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(text.as_bytes())
        .unwrap();
    child.wait_with_output().unwrap().stdout
}

fn documents() -> Documents {
    let folder = tempfile::tempdir().unwrap();
    let [disk, memory, state] = machine(1);
    make([&disk, &memory, &state], &Base::default(), folder.path()).documents
}

#[test]
fn a_signature_of_an_allowed_key_counts_and_no_other() {
    let dir = tempfile::tempdir().unwrap();
    for kind in ["ed25519", "ecdsa"] {
        let (ours, public) = key(dir.path(), &format!("ours-{kind}"), kind);
        let (theirs, _) = key(dir.path(), &format!("theirs-{kind}"), kind);
        let signers = Signers::parse(&format!("# people\n\nann@example {public}")).unwrap();
        let mut signed = documents();
        let digest = signed.artifact.digest;
        let check = |documents: &Documents| signers.check(documents);
        assert!(matches!(check(&signed), Err(HubError::Unsigned { .. })));

        let with = |text: Vec<u8>| {
            let mut documents = documents();
            let signature = Signature::of(&documents.artifact, text);
            documents.add_signature(signature).unwrap();
            documents
        };
        let text = message(&digest);
        for bad in [
            sign(&theirs, NAMESPACE, &text),
            sign(&ours, "file", &text),
            sign(&ours, NAMESPACE, "sha256:00"),
            b"garbage".to_vec(),
        ] {
            let error = check(&with(bad)).unwrap_err();
            assert_eq!(error.kind(), Kind::Untrusted, "{error}");
        }
        let good = sign(&ours, NAMESPACE, &text);
        let signature = Signature::of(&signed.artifact, good);
        signed.add_signature(signature).unwrap();
        assert_eq!(check(&signed).unwrap(), "ann@example");
        assert_eq!(fingerprints(&signed).len(), 1);
    }
}

#[test]
fn signatures_travel_with_a_stream() {
    let (dir, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (ours, public) = key(dir.path(), "ours", "ed25519");
    let [disk, memory, state] = machine(1);
    let mut made = make([&disk, &memory, &state], &Base::default(), folder.path());
    let text = sign(&ours, NAMESPACE, &message(&made.documents.artifact.digest));
    let signature = Signature::of(&made.documents.artifact, text);
    made.documents.add_signature(signature).unwrap();
    let bytes = stream(&made, |_| true);
    let (read, _, next) = forkd_hub::archive::StreamReader::open(bytes.as_slice()).unwrap();
    assert!(next.is_some());
    let signers =
        Signers::parse(&format!("ann,bob namespaces=\"file,{NAMESPACE}\" {public}")).unwrap();
    assert_eq!(signers.check(&read).unwrap(), "ann,bob");
    kit::unpack_all(&bytes, &[]).unwrap();
    let file = dir.path().join("py.forkd");
    std::fs::write(&file, &bytes).unwrap();
    let archive = forkd_hub::layout::ArchiveFile::open(&file).unwrap();
    let read = forkd_hub::layout::load(&archive, None).unwrap();
    assert_eq!(signers.check(&read).unwrap(), "ann,bob");
}

#[test]
fn lines_that_would_allow_more_than_they_say_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (_, public) = key(dir.path(), "k", "ed25519");
    for line in [
        format!("ann cert-authority {public}"),
        format!("ann valid-before=\"20200101\" {public}"),
        "ann".to_owned(),
        "ann ssh-ed25519 AAAA".to_owned(),
    ] {
        let error = Signers::parse(&line).unwrap_err();
        assert!(error.starts_with("line 1"), "{error}");
    }
    let other = Signers::parse(&format!("ann namespaces=\"file\" {public}")).unwrap();
    assert!(matches!(
        other.check(&documents()),
        Err(HubError::Unsigned { .. })
    ));
}
