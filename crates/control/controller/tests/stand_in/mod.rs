//! A `forkd-spawn` that says what a test wants.

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
            let result = match command {
                SpawnCommand::Hello { .. } => Ok(SpawnReply::Hello {
                    version: SPAWN_VERSION,
                    engine: Engine::FORKD,
                    walls: Walls::empty(),
                }),
                command => answer(command),
            };
            let said = encode(&FromSpawn::Response { seq, result }).unwrap();
            connection.send(&said, &[]).unwrap();
        }
    });
}
