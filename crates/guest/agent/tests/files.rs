//! Files read and written by a real agent process.

mod common;

use std::os::unix::fs::{MetadataExt, PermissionsExt};

use common::{TestAgent, sh};
use forkd_guest_proto::{
    DialRequest, ErrorCode, FileKind, ListRequest, MkdirRequest, ReadRequest, RemoveRequest,
    RenameRequest, SetAttrRequest, WatchChange, WatchRequest, WriteRequest,
};
use rand::Rng;

fn to(path: &str) -> WriteRequest {
    WriteRequest {
        path: path.to_owned(),
        ..Default::default()
    }
}

#[tokio::test]
async fn content_goes_in_and_out_unchanged() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let path = agent.path("big");
    let mut content = vec![0; 48 * 1024 * 1024 + 17];
    rand::rng().fill_bytes(&mut content);
    let written = client.upload(to(&path), content.as_slice()).await.unwrap();
    assert_eq!(written.bytes, content.len() as u64);
    assert!(std::fs::read(&path).unwrap() == content);
    let mut back = Vec::new();
    let request = ReadRequest {
        path: path.clone(),
        ..Default::default()
    };
    client.download(request, &mut back).await.unwrap();
    assert!(back == content);
    assert!(agent.rss_kib() < 16 * 1024, "{} KiB", agent.rss_kib());
    let part = ReadRequest {
        path,
        offset: 1_000_000,
        len: Some(12_345),
    };
    let mut back = Vec::new();
    client.download(part, &mut back).await.unwrap();
    assert!(back == content[1_000_000..1_012_345]);
}

#[tokio::test]
async fn ways_to_write() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let path = agent.path("a/b/file");
    let missing = client.write_file(to(&path), b"x").await.unwrap_err();
    assert_eq!(missing.code(), Some(ErrorCode::NotFound));
    let request = WriteRequest {
        parents: true,
        mode: Some(0o640),
        owner: Some("12:34".into()),
        ..to(&path)
    };
    client.write_file(request, b"one").await.unwrap();
    let found = std::fs::metadata(&path).unwrap();
    assert_eq!(
        (
            found.uid(),
            found.gid(),
            found.permissions().mode() & 0o7777
        ),
        (12, 34, 0o640)
    );
    client
        .write_file(
            WriteRequest {
                append: true,
                ..to(&path)
            },
            b" two",
        )
        .await
        .unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"one two");
    let request = WriteRequest {
        truncate: false,
        offset: 4,
        ..to(&path)
    };
    client.write_file(request, b"T").await.unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"one Two");
    let taken = client
        .write_file(
            WriteRequest {
                create_new: true,
                ..to(&path)
            },
            b"",
        )
        .await;
    assert_eq!(taken.unwrap_err().code(), Some(ErrorCode::Exists));
    // An atomic write that is broken off leaves the old content and nothing else.
    let mut writer = client
        .write(WriteRequest {
            atomic: true,
            ..to(&path)
        })
        .unwrap();
    writer.write(b"half").await.unwrap();
    drop(writer);
    client
        .write_file(
            WriteRequest {
                atomic: true,
                sync: true,
                ..to(&path)
            },
            b"new",
        )
        .await
        .unwrap();
    let found = std::fs::metadata(&path).unwrap();
    assert_eq!(
        (
            found.uid(),
            found.gid(),
            found.permissions().mode() & 0o7777
        ),
        (12, 34, 0o640)
    );
    assert_eq!(std::fs::read(&path).unwrap(), b"new");
    let directory = agent.path("a/b");
    while std::fs::read_dir(&directory).unwrap().count() > 1 {
        client.ping().await.unwrap();
    }
    let bad = client.write_file(to("relative"), b"").await.unwrap_err();
    assert_eq!(bad.code(), Some(ErrorCode::BadRequest));
    let directory = client.write_file(to(&directory), b"").await.unwrap_err();
    assert_eq!(directory.code(), Some(ErrorCode::IsDirectory));
}

#[tokio::test]
async fn directories_and_attributes() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let top = agent.path("top");
    let deep = agent.path("top/x/y");
    client
        .mkdir(MkdirRequest {
            path: deep.clone(),
            parents: true,
            mode: Some(0o700),
            owner: None,
        })
        .await
        .unwrap();
    let exists = client
        .mkdir(MkdirRequest {
            path: deep.clone(),
            ..Default::default()
        })
        .await;
    assert_eq!(exists.unwrap_err().code(), Some(ErrorCode::Exists));
    for number in 0..130 {
        std::fs::write(format!("{top}/f{number:03}"), "").unwrap();
    }
    std::os::unix::fs::symlink("f000", format!("{top}/link")).unwrap();
    let list = ListRequest {
        path: top.clone(),
        depth: 1,
        limit: None,
    };
    let (entries, result) = client.list(list.clone()).await.unwrap();
    assert_eq!(
        (entries.len(), result.count, result.truncated),
        (132, 132, false)
    );
    let link = entries.iter().find(|entry| entry.path == "link").unwrap();
    assert_eq!(
        (link.info.kind, link.info.target.as_deref()),
        (FileKind::Symlink, Some("f000"))
    );
    let (entries, result) = client
        .list(ListRequest {
            limit: Some(60),
            ..list.clone()
        })
        .await
        .unwrap();
    assert_eq!((entries.len(), result.truncated), (60, true));
    let (entries, _) = client.list(ListRequest { depth: 3, ..list }).await.unwrap();
    assert!(entries.iter().any(|entry| entry.path == "x/y"));
    client
        .rename(RenameRequest {
            from: format!("{top}/f001"),
            to: format!("{top}/g"),
            no_replace: true,
        })
        .await
        .unwrap();
    let taken = RenameRequest {
        from: format!("{top}/f002"),
        to: format!("{top}/g"),
        no_replace: true,
    };
    assert_eq!(
        client.rename(taken).await.unwrap_err().code(),
        Some(ErrorCode::Exists)
    );
    client
        .set_attr(SetAttrRequest {
            path: format!("{top}/g"),
            mode: Some(0o4755),
            owner: Some("1".into()),
        })
        .await
        .unwrap();
    let info = client.stat(&format!("{top}/g")).await.unwrap();
    assert_eq!(
        (info.mode, info.uid, info.kind),
        (0o4755, 1, FileKind::File)
    );
    let full = client
        .remove(RemoveRequest {
            path: top.clone(),
            ..Default::default()
        })
        .await;
    assert_eq!(full.unwrap_err().code(), Some(ErrorCode::NotEmpty));
    let remove = RemoveRequest {
        path: top.clone(),
        recursive: true,
        missing_ok: false,
    };
    client.remove(remove.clone()).await.unwrap();
    assert_eq!(
        client.remove(remove.clone()).await.unwrap_err().code(),
        Some(ErrorCode::NotFound)
    );
    client
        .remove(RemoveRequest {
            missing_ok: true,
            ..remove
        })
        .await
        .unwrap();
    assert_eq!(
        client.stat(&top).await.unwrap_err().code(),
        Some(ErrorCode::NotFound)
    );
}

#[tokio::test]
async fn the_root_is_neither_removed_nor_renamed() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    // Never recursive: a regression would empty the host that runs this test.
    for path in ["/", "/tmp/..", "/proc/.."] {
        let removed = client
            .remove(RemoveRequest {
                path: path.into(),
                ..Default::default()
            })
            .await;
        assert_eq!(removed.unwrap_err().code(), Some(ErrorCode::BadRequest));
        let renamed = client
            .rename(RenameRequest {
                from: path.into(),
                to: agent.path("root"),
                no_replace: false,
            })
            .await;
        assert_eq!(renamed.unwrap_err().code(), Some(ErrorCode::BadRequest));
    }
}

#[tokio::test]
async fn a_pipe_does_not_hang_the_reader() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let path = agent.path("pipe");
    assert!(
        client
            .exec_capture(sh(&format!("mkfifo {path}")))
            .await
            .unwrap()
            .result
            .status
            .success()
    );
    assert_eq!(
        client.read_file(&path, 10).await.unwrap_err().code(),
        Some(ErrorCode::BadRequest)
    );
}

#[tokio::test]
async fn changes_are_seen_also_in_new_directories() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let top = agent.path("watched");
    std::fs::create_dir_all(&top).unwrap();
    let mut watch = client
        .watch(WatchRequest {
            path: top.clone(),
            recursive: true,
        })
        .await
        .unwrap();
    std::fs::create_dir_all(format!("{top}/new/deeper")).unwrap();
    let mut seen = Vec::new();
    while !seen.contains(&(WatchChange::Created, "new/deeper".to_owned())) {
        seen.extend(
            watch
                .next()
                .await
                .unwrap()
                .into_iter()
                .map(|event| (event.change, event.path)),
        );
    }
    std::fs::write(format!("{top}/new/deeper/file"), "x").unwrap();
    while !seen.contains(&(WatchChange::Written, "new/deeper/file".to_owned())) {
        seen.extend(
            watch
                .next()
                .await
                .unwrap()
                .into_iter()
                .map(|event| (event.change, event.path)),
        );
    }
    std::fs::rename(format!("{top}/new/deeper/file"), format!("{top}/file")).unwrap();
    std::fs::remove_file(format!("{top}/file")).unwrap();
    while !seen.contains(&(WatchChange::Removed, "file".to_owned())) {
        seen.extend(
            watch
                .next()
                .await
                .unwrap()
                .into_iter()
                .map(|event| (event.change, event.path)),
        );
    }
    assert!(seen.contains(&(WatchChange::MovedOut, "new/deeper/file".to_owned())));
    assert!(seen.contains(&(WatchChange::MovedIn, "file".to_owned())));
}

#[tokio::test]
async fn a_dialled_connection_carries_bytes_both_ways() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let echo = tokio::spawn(async move {
        let (mut peer, _) = listener.accept().await.unwrap();
        let (mut reader, mut writer) = peer.split();
        tokio::io::copy(&mut reader, &mut writer).await.unwrap()
    });
    let io = client
        .dial(DialRequest::Tcp(port.to_string()))
        .await
        .unwrap()
        .into_io();
    let (mut reader, mut writer) = tokio::io::split(io);
    let mut content = vec![0; 3_000_000];
    rand::rng().fill_bytes(&mut content);
    let sent = content.clone();
    let sending = tokio::spawn(async move {
        use tokio::io::AsyncWriteExt;
        writer.write_all(&sent).await.unwrap();
        writer.shutdown().await.unwrap();
    });
    let mut back = Vec::new();
    tokio::io::AsyncReadExt::read_to_end(&mut reader, &mut back)
        .await
        .unwrap();
    sending.await.unwrap();
    assert!(back == content);
    assert_eq!(echo.await.unwrap(), 3_000_000);
    let refused = client
        .dial(DialRequest::Unix("/no/such/socket".into()))
        .await;
    assert_eq!(refused.err().unwrap().code(), Some(ErrorCode::NotFound));
}
