//! Files in and out of a guest, including files larger than its memory.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use forkd_agent_client::{Calls, Watch};
use forkd_guest_proto::{
    ErrorCode, FileKind, ListRequest, MkdirRequest, ReadRequest, RemoveRequest, RenameRequest,
    SetAttrRequest, WatchChange, WatchRequest, WriteRequest,
};
use forkd_testkit::{BootOptions, Disk, procfs};
use forkd_types::MiB;
use sha2::{Digest, Sha256};

use crate::scenario::{Registered, Run, everyday, times};

pub const SCENARIOS: &[Registered] = &[
    everyday!(more_than_fits_into_memory),
    everyday!(everything_else),
];

/// In a soak the file is larger than the guest's memory; otherwise it is half of it.
pub async fn more_than_fits_into_memory(run: Run) -> anyhow::Result<()> {
    let options = BootOptions {
        // The smallest size that boots a stock kernel with its initramfs.
        memory: MiB(96),
        disks: vec![Disk::empty(&run.kit.folder("disks")?, "data", 2 << 30)?],
        ..Default::default()
    };
    let vm = run.kit.boot(options).await?;
    vm.sh("mkfs.ext4 -q /dev/vdb && mount /dev/vdb /mnt")
        .await?;
    let agent = vm.agent().await?;
    let before = procfs::memory(std::process::id())?.own_pss;
    let path = "/mnt/large";
    let blocks = times(48, 1_024);
    let mut writer = agent.write(WriteRequest {
        path: path.to_owned(),
        ..Default::default()
    })?;
    let mut sent = Sha256::new();
    for number in 0..blocks {
        let block = block(number);
        sent.update(&block);
        writer.write(&block).await?;
    }
    let written = writer.finish().await?;
    ensure!(written.bytes == (blocks as u64) << 20, "{written:?}");
    let sent = hex::encode(sent.finalize());
    let inside = vm.sh(&format!("sha256sum < {path}")).await?;
    ensure!(inside.starts_with(&sent), "{inside} is not {sent}");

    let mut reader = agent
        .read(ReadRequest {
            path: path.to_owned(),
            ..Default::default()
        })
        .await?;
    ensure!(reader.info().size == written.bytes, "{:?}", reader.info());
    let mut received = Sha256::new();
    while let Some(bytes) = reader.next().await? {
        received.update(&bytes);
    }
    let received = hex::encode(received.finalize());
    ensure!(received == sent, "{received} came back, not {sent}");
    let grown = procfs::memory(std::process::id())?
        .own_pss
        .saturating_sub(before);
    ensure!(grown < 32 << 10, "this process grew by {grown} KiB");
    Ok(())
}

/// A MiB with content that is unique per number.
fn block(number: usize) -> Vec<u8> {
    let mut state = number as u64 ^ 0x9e37_79b9_7f4a_7c15;
    let mut bytes = Vec::with_capacity(1 << 20);
    while bytes.len() < 1 << 20 {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes
}

pub async fn everything_else(run: Run) -> anyhow::Result<()> {
    let vm = run.kit.boot(BootOptions::default()).await?;
    let agent = vm.agent().await?;
    content(&agent).await?;
    permissions(&agent).await?;
    directories(&agent).await?;
    watching(&agent).await
}

fn at(path: &str) -> WriteRequest {
    WriteRequest {
        path: path.to_owned(),
        ..Default::default()
    }
}

async fn content(agent: &Calls) -> anyhow::Result<()> {
    let path = "/tmp/content/deep/file";
    let write = WriteRequest {
        parents: true,
        ..at(path)
    };
    agent.write_file(write, b"one two three").await?;
    let append = WriteRequest {
        append: true,
        truncate: false,
        ..at(path)
    };
    agent.write_file(append, b" four").await?;
    let middle = WriteRequest {
        truncate: false,
        offset: 4,
        ..at(path)
    };
    agent.write_file(middle, b"TWO").await?;
    let all = agent.read_file(path, 1 << 20).await?;
    ensure!(all == b"one TWO three four", "{all:?}");
    let mut part = agent
        .read(ReadRequest {
            path: path.to_owned(),
            offset: 4,
            len: Some(3),
        })
        .await?;
    ensure!(part.next().await?.as_deref() == Some(b"TWO"), "a part");
    let anew = WriteRequest {
        create_new: true,
        ..at(path)
    };
    refused(agent.write_file(anew, b"x").await, ErrorCode::Exists)?;
    refused(
        agent.read_file("/tmp/nothing", 10).await,
        ErrorCode::NotFound,
    )?;
    refused(agent.read_file("/tmp", 10).await, ErrorCode::IsDirectory)?;
    let atomic = WriteRequest {
        atomic: true,
        sync: true,
        ..at(path)
    };
    agent.write_file(atomic, b"new").await?;
    ensure!(agent.read_file(path, 10).await? == b"new", "atomic");
    Ok(())
}

fn refused<T>(
    result: Result<T, forkd_agent_client::Error>,
    wanted: ErrorCode,
) -> anyhow::Result<()> {
    let Err(error) = result else {
        bail!("{wanted:?} was expected, and it worked");
    };
    ensure!(error.code() == Some(wanted), "{error}, not {wanted:?}");
    Ok(())
}

async fn permissions(agent: &Calls) -> anyhow::Result<()> {
    let path = "/tmp/permissions";
    let write = WriteRequest {
        mode: Some(0o640),
        owner: Some("nobody".into()),
        ..at(path)
    };
    agent.write_file(write, b"x").await?;
    let info = agent.stat(path).await?;
    ensure!(
        info.mode & 0o7777 == 0o640 && info.uid == 65534 && info.user.as_deref() == Some("nobody"),
        "{info:?}"
    );
    agent
        .set_attr(SetAttrRequest {
            path: path.to_owned(),
            mode: Some(0o4755),
            owner: Some("0:0".into()),
            attributes: None,
        })
        .await?;
    let info = agent.stat(path).await?;
    ensure!(
        info.mode & 0o7777 == 0o4755 && info.uid == 0 && info.gid == 0,
        "{info:?}"
    );
    Ok(())
}

async fn directories(agent: &Calls) -> anyhow::Result<()> {
    let mkdir = |path: &str, parents| MkdirRequest {
        path: path.to_owned(),
        parents,
        ..Default::default()
    };
    agent.mkdir(mkdir("/tmp/tree/a/b", true)).await?;
    refused(
        agent.mkdir(mkdir("/tmp/tree/a", false)).await,
        ErrorCode::Exists,
    )?;
    agent.write_file(at("/tmp/tree/a/file"), b"12345").await?;
    let (entries, result) = agent
        .list(ListRequest {
            path: "/tmp/tree".into(),
            depth: 9,
            ..Default::default()
        })
        .await?;
    let mut found: Vec<_> = entries
        .iter()
        .map(|entry| (entry.path.as_str(), entry.info.kind))
        .collect();
    found.sort_by_key(|(path, _)| *path);
    ensure!(
        found
            == [
                ("a", FileKind::Directory),
                ("a/b", FileKind::Directory),
                ("a/file", FileKind::File)
            ]
            && !result.truncated,
        "{found:?}"
    );
    let rename = |to: &str, no_replace| RenameRequest {
        from: "/tmp/tree/a/file".into(),
        to: to.to_owned(),
        no_replace,
    };
    agent.write_file(at("/tmp/tree/other"), b"").await?;
    refused(
        agent.rename(rename("/tmp/tree/other", true)).await,
        ErrorCode::Exists,
    )?;
    agent.rename(rename("/tmp/tree/other", false)).await?;
    ensure!(
        agent.stat("/tmp/tree/other").await?.size == 5,
        "the renamed file"
    );
    let remove = |recursive| RemoveRequest {
        path: "/tmp/tree".into(),
        recursive,
        ..Default::default()
    };
    refused(agent.remove(remove(false)).await, ErrorCode::NotEmpty)?;
    agent.remove(remove(true)).await?;
    refused(agent.stat("/tmp/tree").await, ErrorCode::NotFound)
}

async fn watching(agent: &Calls) -> anyhow::Result<()> {
    agent
        .mkdir(MkdirRequest {
            path: "/tmp/watched".into(),
            ..Default::default()
        })
        .await?;
    let mut watch = agent
        .watch(WatchRequest {
            path: "/tmp/watched".into(),
            recursive: true,
        })
        .await?;
    agent.write_file(at("/tmp/watched/first"), b"1").await?;
    see(&mut watch, WatchChange::Created, "first").await?;
    agent
        .rename(RenameRequest {
            from: "/tmp/watched/first".into(),
            to: "/tmp/watched/second".into(),
            no_replace: false,
        })
        .await?;
    see(&mut watch, WatchChange::MovedIn, "second").await?;
    agent
        .mkdir(MkdirRequest {
            path: "/tmp/watched/inner".into(),
            ..Default::default()
        })
        .await?;
    see(&mut watch, WatchChange::Created, "inner").await?;
    agent.write_file(at("/tmp/watched/inner/x"), b"1").await?;
    see(&mut watch, WatchChange::Written, "inner/x").await?;
    agent
        .remove(RemoveRequest {
            path: "/tmp/watched/second".into(),
            ..Default::default()
        })
        .await?;
    see(&mut watch, WatchChange::Removed, "second").await
}

async fn see(watch: &mut Watch, change: WatchChange, path: &str) -> anyhow::Result<()> {
    let looking = async {
        loop {
            for event in watch.next().await? {
                if event.change == change && event.path == path {
                    return anyhow::Ok(());
                }
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(60), looking)
        .await
        .with_context(|| format!("{change:?} of {path} was not seen"))?
}
