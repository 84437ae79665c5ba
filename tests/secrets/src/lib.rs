//! A world with TLS: an authority of its own, servers that record the requests they get, and the broker as a process.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use forkd_channel::Channel;
use forkd_net_proto::broker::{
    BROKER_VERSION, BrokerCommand, BrokerError, BrokerReply, BrokerRequest, BrokerRule, FromBroker,
    WireValue,
};
use forkd_net_proto::{FdIndex, decode, encode};
use forkd_types::{InjectRule, SecretValue};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig, StreamOwned};

/// A test that waits longer has failed.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// An authority that the broker trusts.
pub struct TestAuthority {
    issuer: Issuer<'static, KeyPair>,
    certificate: CertificateDer<'static>,
}

impl Default for TestAuthority {
    fn default() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, "the world");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).unwrap().der().clone();
        let issuer = Issuer::new(params, key);
        Self {
            issuer,
            certificate,
        }
    }
}

impl TestAuthority {
    /// The settings of a server with a certificate for these names.
    pub fn server(&self, names: &[&str]) -> Arc<ServerConfig> {
        let key = KeyPair::generate().unwrap();
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let params = CertificateParams::new(names).unwrap();
        let made = params.signed_by(&key, &self.issuer).unwrap();
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let config = ServerConfig::builder_with_provider(forkd_broker::authority::provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![made.der().clone()], key);
        Arc::new(config.unwrap())
    }

    /// The certificate as a file in PEM.
    pub fn write_to(&self, folder: &Path) -> PathBuf {
        let path = folder.join("world.pem");
        std::fs::write(&path, pem(&self.certificate)).unwrap();
        path
    }

    pub fn certificate(&self) -> &[u8] {
        &self.certificate
    }
}

/// A certificate in PEM.
pub fn pem(der: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::from("-----BEGIN CERTIFICATE-----\n");
    for (index, part) in der.chunks(3).enumerate() {
        let mut bytes = [0u8; 4];
        bytes[1..=part.len()].copy_from_slice(part);
        let number = u32::from_be_bytes(bytes);
        for place in 0..4 {
            let letter = LETTERS[(number >> (18 - 6 * place)) as usize & 63];
            text.push(if place > part.len() {
                '='
            } else {
                letter.into()
            });
        }
        if index % 16 == 15 {
            text.push('\n');
        }
    }
    text + "\n-----END CERTIFICATE-----\n"
}

/// The settings of a client that trusts one authority.
pub fn client(authority: &[u8]) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(authority.to_vec().into()).unwrap();
    let config = ClientConfig::builder_with_provider(forkd_broker::authority::provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    Arc::new(config)
}

/// Requests that servers of a test got: each head, and the length of its body.
#[derive(Clone, Default)]
pub struct Recorded(Arc<Mutex<Vec<(String, usize)>>>);

impl Recorded {
    pub fn all(&self) -> Vec<(String, usize)> {
        self.0.lock().unwrap().clone()
    }
}

/// Serves HTTP/1.1 over TLS on one connection, until the client ends it.
pub fn serve(stream: TcpStream, config: Arc<ServerConfig>, recorded: &Recorded) {
    let connection = rustls::ServerConnection::new(config).unwrap();
    let mut reader = BufReader::new(StreamOwned::new(connection, stream));
    while let Some((head, body)) = next_request(&mut reader) {
        recorded.0.lock().unwrap().push((head, body));
        let count = recorded.0.lock().unwrap().len();
        let answer = format!("answer {count} of {body}");
        let text = format!(
            "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{answer}",
            answer.len()
        );
        if reader.get_mut().write_all(text.as_bytes()).is_err() {
            return;
        }
    }
}

fn next_request(reader: &mut impl BufRead) -> Option<(String, usize)> {
    let (mut head, mut length, mut chunked) = (String::new(), 0, false);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        if line == "\r\n" {
            break;
        }
        let lower = line.to_ascii_lowercase();
        if let Some(value) = lower.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        chunked |= lower.starts_with("transfer-encoding: chunked");
        head.push_str(&line);
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    while chunked {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let size = usize::from_str_radix(line.trim(), 16).unwrap();
        let mut part = vec![0; size + 2];
        reader.read_exact(&mut part).ok()?;
        length += size;
        if size == 0 {
            break;
        }
    }
    Some((head, length))
}

/// The broker as a process.
pub struct Broker {
    process: Child,
    control: Channel,
    /// Keeps the socket and the certificates.
    _folder: tempfile::TempDir,
    news: Mutex<Vec<FromBroker>>,
    written: Receiver<String>,
    /// The certificate that guests trust.
    pub certificate: Vec<u8>,
}

impl Broker {
    /// Starts a program and gives it an authority.
    pub fn start(program: &str, world: &TestAuthority) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("broker.sock");
        let mut process = Command::new(program)
            .arg("--socket")
            .arg(&socket)
            .arg("--roots")
            .arg(world.write_to(folder.path()))
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, written) = channel();
        let mut errors = process.stderr.take().unwrap();
        thread::spawn(move || {
            let mut text = String::new();
            let _ = errors.read_to_string(&mut text);
            let _: Result<(), _> = Sender::send(&sender, text);
        });
        let control = dial(&socket);
        let mut broker = Self {
            process,
            control,
            _folder: folder,
            news: Mutex::default(),
            written,
            certificate: Vec::new(),
        };
        let version = BROKER_VERSION;
        broker.ask(BrokerCommand::Hello { version }, &[]).unwrap();
        let made = broker.ask(BrokerCommand::Authority { kept: None }, &[]);
        let Ok(BrokerReply::Authority(authority)) = made else {
            panic!("{made:?}");
        };
        broker.certificate = authority.certificate;
        broker
    }

    pub fn ask(
        &self,
        command: BrokerCommand,
        fds: &[BorrowedFd<'_>],
    ) -> Result<BrokerReply, BrokerError> {
        let request = BrokerRequest { seq: 7, command };
        self.control.send(&encode(&request).unwrap(), fds).unwrap();
        loop {
            match self.next() {
                FromBroker::Response { seq: 7, result } => return result,
                other => self.news.lock().unwrap().push(other),
            }
        }
    }

    fn next(&self) -> FromBroker {
        let mut buffer = vec![0; 65536];
        let received = self.control.recv(&mut buffer).unwrap();
        decode(&buffer[..received.len]).unwrap()
    }

    /// The next refusal that the broker reports.
    pub fn news(&self) -> FromBroker {
        if let Some(first) = self.news.lock().unwrap().pop() {
            return first;
        }
        self.next()
    }

    /// Takes flows from the other end of the returned link.
    pub fn link(&self) -> OwnedFd {
        let (ours, theirs) = Channel::pair().unwrap();
        let link = FdIndex(0);
        self.ask(BrokerCommand::Engine { link }, &[theirs.as_fd()])
            .unwrap();
        ours.into()
    }

    pub fn set_secret(&self, owner: &str, name: &str, value: &str) {
        let command = BrokerCommand::SetSecret {
            owner: owner.into(),
            name: name.parse().unwrap(),
            value: WireValue(SecretValue::new(value.into()).unwrap()),
        };
        self.ask(command, &[]).unwrap();
    }

    pub fn set_rules(&self, id: &str, owner: &str, rules: Vec<BrokerRule>) {
        let command = BrokerCommand::SetRules {
            id: id.parse().unwrap(),
            owner: owner.into(),
            rules,
        };
        self.ask(command, &[]).unwrap();
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Ends the process and returns what it printed.
    pub fn end(mut self) -> String {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        self.written.recv().unwrap()
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn dial(path: &Path) -> Channel {
    let address = SocketAddrUnix::new(path).unwrap();
    let start = Instant::now();
    loop {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        if connect(&socket, &address).is_ok() {
            return Channel::from_fd(socket);
        }
        assert!(start.elapsed() < PATIENCE, "the broker does not listen");
        thread::yield_now();
    }
}

/// A rule; with a placeholder if one is given.
pub fn rule(to: &str, header: &str, value: &str, placeholder: Option<&str>) -> BrokerRule {
    let rule = InjectRule::new(
        to.parse().unwrap(),
        header.parse().unwrap(),
        value.parse().unwrap(),
        placeholder.map(|_| "API_KEY".parse().unwrap()),
    );
    BrokerRule {
        rule: rule.unwrap(),
        placeholder: placeholder.map(str::to_owned),
    }
}

/// A client in TLS on one end of a stream.
pub fn tls_client(
    stream: UnixStream,
    config: &Arc<ClientConfig>,
    name: &str,
) -> StreamOwned<rustls::ClientConnection, UnixStream> {
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let connection = rustls::ClientConnection::new(Arc::clone(config), name).unwrap();
    StreamOwned::new(connection, stream)
}
