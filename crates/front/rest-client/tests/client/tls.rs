//! A daemon behind TLS, as far as a client sees it.

use std::net::SocketAddr;
use std::sync::Arc;

use forkd_api::{ExecFrame, TerminalInput, TerminalStart};
use forkd_rest_client::{Client, Error, Target, TerminalEvent};
use futures::{SinkExt, StreamExt};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_tungstenite::accept_hdr_async;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::server::{Request, Response};

const CERT: &[u8] = include_bytes!("../data/localhost.pem");
const KEY: &[u8] = include_bytes!("../data/localhost.key");

/// Offers HTTP/2 like the daemon does, and serves the first connection that gets past its handshake.
async fn listen() -> (Target, tokio::task::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address: SocketAddr = listener.local_addr().unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(
            vec![CertificateDer::from_pem_slice(CERT).unwrap()],
            PrivateKeyDer::from_pem_slice(KEY).unwrap(),
        )
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let serving = tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            if let Ok(stream) = acceptor.accept(stream).await {
                return echo(stream).await;
            }
        }
    });
    (format!("https://{address}").parse().unwrap(), serving)
}

/// Plays the daemon for a terminal that runs `cat`.
async fn echo(stream: tokio_rustls::server::TlsStream<tokio::net::TcpStream>) {
    #[allow(clippy::result_large_err)]
    let check = |request: &Request, response: Response| {
        assert_eq!(request.uri().path(), "/v1/sandboxes/sb-1/terminal");
        assert_eq!(request.headers()["authorization"], "Bearer correct-horse");
        Ok(response)
    };
    let mut socket = accept_hdr_async(stream, check).await.unwrap();
    let start = socket.next().await.unwrap().unwrap().into_text().unwrap();
    let start: TerminalStart = serde_json::from_str(&start).unwrap();
    assert_eq!(start.args, ["cat"]);
    while let Some(message) = socket.next().await {
        match message.unwrap() {
            Message::Binary(bytes) => {
                let mut output = vec![1];
                output.extend_from_slice(&bytes);
                socket.send(Message::binary(output)).await.unwrap();
            }
            Message::Text(text) => {
                let input: TerminalInput = serde_json::from_str(&text).unwrap();
                assert_eq!(input, TerminalInput::Eof);
                let exit = ExecFrame::Exit {
                    exit_code: 0,
                    timed_out: false,
                };
                let text = serde_json::to_string(&exit).unwrap();
                socket.send(Message::text(text)).await.unwrap();
                socket.close(None).await.unwrap();
                return;
            }
            _ => return,
        }
    }
}

fn cat() -> TerminalStart {
    serde_json::from_str(r#"{"args": ["cat"]}"#).unwrap()
}

#[tokio::test]
async fn a_program_takes_input_over_tls() {
    let (target, serving) = listen().await;
    let client = Client::trusting(&target, Some("correct-horse".into()), CERT).unwrap();
    let mut terminal = client.terminal("sb-1", &cat()).await.unwrap();
    let text = vec![b'x'; 300_000];
    terminal.write(text.clone()).await.unwrap();
    match terminal.next().await.unwrap() {
        Some(TerminalEvent::Stdout(bytes)) => assert!(bytes == text),
        other => panic!("{other:?}"),
    }
    terminal.control(&TerminalInput::Eof).await.unwrap();
    match terminal.next().await.unwrap() {
        Some(TerminalEvent::Frame(ExecFrame::Exit { exit_code: 0, .. })) => {}
        other => panic!("{other:?}"),
    }
    assert!(terminal.next().await.unwrap().is_none());
    drop(terminal);
    serving.await.unwrap();
}

#[tokio::test]
async fn a_stranger_is_not_spoken_to() {
    let (target, serving) = listen().await;
    let client = Client::new(&target, Some("correct-horse".into())).unwrap();
    match client.terminal("sb-1", &cat()).await {
        Err(Error::Unreachable { source, .. }) => {
            assert!(source.to_string().contains("certificate"), "{source}");
        }
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("an untrusted certificate was accepted"),
    }
    assert!(matches!(
        Client::trusting(&target, None, b"not PEM"),
        Err(Error::NoCertificate)
    ));
    serving.abort();
}
