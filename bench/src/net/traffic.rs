//! A server in the world and clients in the namespaces of guests.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

use super::world::{SERVER, WORLD, World};
use crate::stats::Spread;

const PORT: u16 = 7000;
const PART: usize = 256 * 1024;
/// A transfer that stalls has failed.
const PATIENCE: Duration = Duration::from_secs(300);

/// The direction of a transfer, seen from the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Up,
    Down,
}

/// Starts the server. It ends with this process.
pub fn serve(world: &World) -> anyhow::Result<()> {
    let listener = world.within(WORLD, || {
        TcpListener::bind((SERVER, PORT)).context("cannot listen in the world")
    })?;
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                // A client that goes away is its own failure.
                let _ = answer(stream);
            });
        }
    });
    Ok(())
}

/// A request is a direction and a length. An upload is answered by one byte.
fn answer(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut head = [0; 9];
    stream.read_exact(&mut head)?;
    let [way, length @ ..] = head;
    let mut left = u64::from_le_bytes(length);
    let mut part = vec![7; PART];
    while left > 0 {
        let most = part.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let done = match way {
            b'u' => stream.read(&mut part[..most])?,
            _ => stream.write(&part[..most])?,
        };
        if done == 0 {
            return Ok(());
        }
        left -= done as u64;
    }
    stream.write_all(b"!")
}

fn dial() -> anyhow::Result<TcpStream> {
    let stream = TcpStream::connect((SERVER, PORT)).context("the server cannot be reached")?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

fn ask(stream: &mut TcpStream, way: Way, bytes: u64) -> std::io::Result<()> {
    let mut head = vec![match way {
        Way::Up => b'u',
        Way::Down => b'd',
    }];
    head.extend(bytes.to_le_bytes());
    stream.write_all(&head)
}

/// Moves bytes over one connection and returns how long it took.
pub fn transfer(world: &World, from: &str, way: Way, bytes: u64) -> anyhow::Result<Duration> {
    world.within(from, || {
        let mut stream = dial()?;
        let mut part = vec![7; PART];
        let start = Instant::now();
        ask(&mut stream, way, bytes)?;
        let mut left = bytes;
        while way == Way::Up && left > 0 {
            let most = part.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            left -= stream.write(&part[..most])? as u64;
        }
        let mut got = 0;
        let wanted = if way == Way::Down { bytes + 1 } else { 1 };
        while got < wanted {
            let len = stream.read(&mut part)?;
            ensure!(
                len > 0,
                "the connection ended after {got} of {wanted} bytes"
            );
            got += len as u64;
        }
        Ok(start.elapsed())
    })
}

/// Opens connections one after another, and waits for one byte on each.
pub fn connect(world: &World, from: &str, count: u32) -> anyhow::Result<Spread> {
    world.within(from, || {
        let mut times = Vec::new();
        for _ in 0..count {
            let start = Instant::now();
            let mut stream = dial()?;
            ask(&mut stream, Way::Down, 0)?;
            stream.read_exact(&mut [0])?;
            times.push(start.elapsed());
        }
        Ok(Spread::of(&times))
    })
}
