//! Trees of files packed and unpacked by a real agent process.

mod common;

use common::{TestAgent, sh};
use forkd_agent_client::Calls;
use forkd_guest_proto::{ErrorCode, PackItem, PackRequest, UnpackRequest};
use rand::Rng;

fn of(from: &str) -> PackRequest {
    PackRequest {
        items: vec![PackItem {
            from: from.to_owned(),
            to: String::new(),
        }],
        ..PackRequest::default()
    }
}

async fn packed(
    client: &Calls,
    request: PackRequest,
) -> Result<Vec<u8>, forkd_agent_client::Error> {
    let mut packing = client.pack(request)?;
    let mut bytes = Vec::new();
    while let Some(piece) = packing.next().await? {
        bytes.extend(piece);
    }
    Ok(bytes)
}

#[tokio::test]
async fn a_tree_goes_from_one_folder_to_another() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let (from, to) = (agent.path("from"), agent.path("to"));
    let mut content = vec![0; 20 << 20];
    rand::rng().fill_bytes(&mut content);
    std::fs::create_dir_all(format!("{from}/deep/er")).unwrap();
    std::fs::write(format!("{from}/deep/big"), &content).unwrap();
    client
        .exec_capture(sh(&format!(
            "cd {from} && ln -s deep/big link && mkfifo pipe"
        )))
        .await
        .unwrap();
    let bytes = packed(&client, of(&from)).await.unwrap();
    let request = UnpackRequest {
        path: to.clone(),
        ..UnpackRequest::default()
    };
    let mut unpacking = client.unpack(request).unwrap();
    for piece in bytes.chunks(100_000) {
        unpacking.write(piece).await.unwrap();
    }
    let done = unpacking.finish().await.unwrap();
    assert_eq!((done.entries, done.bytes), (5, content.len() as u64));
    assert!(std::fs::read(format!("{to}/link")).unwrap() == content);
    let compared = client
        .exec_capture(sh(&format!(
            "cd {from} && find . | sort >../a; cd {to} && find . | sort | cmp - ../a"
        )))
        .await;
    assert!(compared.unwrap().result.status.success());
    assert!(agent.rss_kib() < 16 * 1024, "{} KiB", agent.rss_kib());
}

#[tokio::test]
async fn failures_name_the_path_and_the_agent_goes_on() {
    let agent = TestAgent::start().await;
    let client = agent.connect().await;
    let code = |error: forkd_agent_client::Error| match error {
        forkd_agent_client::Error::Agent(error) => error.code,
        other => panic!("{other:?}"),
    };
    let missing = packed(&client, of(&agent.path("nothing"))).await;
    assert_eq!(code(missing.unwrap_err()), ErrorCode::NotFound);
    let request = UnpackRequest {
        path: agent.path("to"),
        ..UnpackRequest::default()
    };
    let mut unpacking = client.unpack(request).unwrap();
    unpacking.write(&[7; 4096]).await.unwrap();
    assert!(unpacking.finish().await.is_err());
    client.ping().await.unwrap();
}
