//! Clients on the host: accepting them, their greeting, and the request to the guest.
//!
//! A client names the guest's port in its first line. Clients that stay silent are evicted first when all
//! connections are in use.

use std::io;

use super::connection::{Connection, Phase, Ports};
use super::greeting::{Greeter, Greeting};
use super::muxer::{FIRST_HOST_PORT, MAX_CONNECTIONS, Muxer};
use super::packet::Op;

/// The most clients taken in at once.
const MAX_ACCEPTS: usize = 16;

impl Muxer {
    /// Takes clients in. They wait outside while there are too many.
    pub(super) fn on_listener(&mut self) {
        for _ in 0..MAX_ACCEPTS {
            if self.connections.len() >= MAX_CONNECTIONS && !self.evict() {
                break;
            }
            match self.listener.accept() {
                Ok((stream, _)) if stream.set_nonblocking(true).is_ok() => {
                    // The ports come with the greeting.
                    let ports = Ports { host: 0, guest: 0 };
                    let phase = Phase::Greeting(Greeter::default());
                    let token = self.insert(Connection::new(ports, phase, Some(stream)));
                    self.listen(token);
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    // Out of descriptors or memory, perhaps through others. The socket stays readable, so
                    // it must not be listened to, nor given up.
                    self.rest_listener();
                    return;
                }
            }
        }
        if self.connections.len() >= MAX_CONNECTIONS {
            self.stop_listening();
        }
    }

    /// Makes room by sending the client away that has been silent longest.
    fn evict(&mut self) -> bool {
        let silent = self
            .connections
            .iter()
            .find(|(_, connection)| matches!(connection.phase, Phase::Greeting(_)))
            .map(|(token, _)| *token);
        if let Some(token) = silent {
            self.metrics.bad_clients.inc();
            self.remove(token);
        }
        silent.is_some()
    }

    pub(super) fn on_greeting(&mut self, token: u32) {
        let Some(connection) = self.connections.get_mut(&token) else {
            return;
        };
        let (Phase::Greeting(greeter), stream) = connection.greeter() else {
            return;
        };
        let guest = match stream.map_or(Greeting::Bad, |stream| greeter.read(stream)) {
            Greeting::Incomplete => return,
            Greeting::Bad => {
                self.metrics.bad_clients.inc();
                self.remove(token);
                return;
            }
            Greeting::Port(port) => port,
        };
        if self.is_full() {
            // Each client that comes and goes would leave packets for a guest that takes none.
            self.metrics.refused.inc();
            self.remove(token);
            return;
        }
        let ports = self.free_ports(guest);
        let Some(connection) = self.connections.get_mut(&token) else {
            return;
        };
        connection.ports = ports;
        connection.phase = Phase::Requested;
        self.by_ports.insert(ports, token);
        self.metrics.host_connections.inc();
        self.push(ports, Op::Request, 0);
        self.listen(token);
    }

    /// Ports of a new connection to the guest. There are more ports than connections, so this ends.
    fn free_ports(&mut self, guest: u32) -> Ports {
        loop {
            let ports = Ports {
                host: self.next_port,
                guest,
            };
            self.next_port = match self.next_port {
                u32::MAX => FIRST_HOST_PORT,
                port => port + 1,
            };
            if !self.by_ports.contains_key(&ports) {
                return ports;
            }
        }
    }
}
