//! A `forkd-spawn` that says what a test wants.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use forkd_channel::{Channel, ChannelError};
use forkd_types::Engine;
use forkd_vmm_proto::spawn::{
    FromSpawn, SPAWN_VERSION, SpawnCommand, SpawnError, SpawnReply, SpawnRequest, Walls,
};
use forkd_vmm_proto::{MAX_MESSAGE, decode, encode};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, accept, bind, listen, socket};

pub type Answer = Result<SpawnReply, SpawnError>;

/// Answers one daemon at that address, and greets by itself.
pub fn stand_in(path: &Path, mut answer: impl FnMut(SpawnCommand) -> Answer + Send + 'static) {
    stand_in_with_fds(path, move |command| (answer(command), Vec::new()));
}

/// The same for answers that descriptors come with.
pub fn stand_in_with_fds(
    path: &Path,
    mut answer: impl FnMut(SpawnCommand) -> (Answer, Vec<OwnedFd>) + Send + 'static,
) {
    let listener = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
    listen(&listener, 1).unwrap();
    std::thread::spawn(move || {
        let connection = Channel::from_fd(accept(&listener).unwrap());
        let mut packet = vec![0; MAX_MESSAGE];
        loop {
            let received = match connection.recv(&mut packet) {
                Ok(received) => received,
                Err(ChannelError::Closed) => return,
                Err(error) => panic!("{error}"),
            };
            let SpawnRequest { seq, command } = decode(&packet[..received.len]).unwrap();
            let (result, fds) = match command {
                SpawnCommand::Hello { .. } => (
                    Ok(SpawnReply::Hello {
                        version: SPAWN_VERSION,
                        engines: vec![Engine::FORKD],
                        walls: Walls::empty(),
                        missing: Vec::new(),
                    }),
                    Vec::new(),
                ),
                command => answer(command),
            };
            let said = encode(&FromSpawn::Response { seq, result }).unwrap();
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            connection.send(&said, &fds).unwrap();
        }
    });
}
