//! The serial port as the guest and the VMM see it.
//!
//! The guest's accesses come from vCPU threads and fill a bounded buffer; the device thread writes the buffer
//! to the console, which does not block. Output that the console does not take is dropped.

use std::convert::Infallible;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vm_superio::serial::NoEvents;
use vm_superio::{SerialState, Trigger};

use super::output::{Drained, Output};
use super::{Console, SerialMetrics, SerialSnapshot};
use crate::bus::BusDevice;
use crate::metrics::Counters;
use crate::virtio::RestoreError;
use crate::{EventFd, Ready, Registrar};

/// The first port.
pub const SERIAL_BASE: u64 = 0x3f8;
/// The number of ports.
pub const SERIAL_LEN: u64 = 8;
/// The interrupt line.
pub const SERIAL_IRQ: u32 = 4;

pub(super) const WAKE: u32 = 0;
pub(super) const WRITABLE: u32 = 1;

pub(super) struct Line(Arc<EventFd>);

impl Trigger for Line {
    type E = Infallible;

    fn trigger(&self) -> Result<(), Infallible> {
        // An eventfd that is open can always be raised.
        let _ = self.0.signal();
        Ok(())
    }
}

type Port = vm_superio::Serial<Line, NoEvents, Output>;

/// The serial port. It exists before there is a console; until one is attached output is dropped.
pub struct Serial {
    port: Mutex<Port>,
    line: Arc<EventFd>,
    pub(super) wake: Arc<EventFd>,
    metrics: Arc<SerialMetrics>,
    pub(super) registrar: Registrar,
}

impl Serial {
    /// A port without a console.
    pub fn new(registrar: Registrar) -> io::Result<Arc<Self>> {
        let line = Arc::new(EventFd::new()?);
        let wake = Arc::new(EventFd::new()?);
        registrar.add(&wake, WAKE, Ready::IN)?;
        let metrics = Arc::new(SerialMetrics::default());
        let output = Output::new(Arc::clone(&wake), Arc::clone(&metrics));
        let port = vm_superio::Serial::new(Line(Arc::clone(&line)), output);
        Ok(Arc::new(Self {
            port: Mutex::new(port),
            line,
            wake,
            metrics,
            registrar,
        }))
    }

    /// The eventfd that KVM listens to for [`SERIAL_IRQ`].
    pub fn interrupt(&self) -> &EventFd {
        &self.line
    }

    /// Gives the port a console.
    pub fn attach(&self, console: Console) -> io::Result<()> {
        self.lock().writer_mut().attach(console)
    }

    /// Types `input` on the port; returns how much of it fitted.
    pub fn feed(&self, input: &[u8]) -> usize {
        let taken = self.lock().enqueue_raw_bytes(input).unwrap_or(0);
        self.metrics.fed.add(taken as u64);
        taken
    }

    /// Writes out what the console takes right now, for the last words of a guest.
    pub fn flush(&self) {
        self.lock().writer_mut().drain();
    }

    pub fn save(&self) -> SerialSnapshot {
        self.lock().state().into()
    }

    /// Takes over saved registers, which are not trusted. The console stays.
    pub fn restore(&self, snapshot: SerialSnapshot) -> Result<(), RestoreError> {
        let state = SerialState::from(snapshot);
        let mut port = self.lock();
        let empty = Output::new(Arc::clone(&self.wake), Arc::clone(&self.metrics));
        let mut restored =
            vm_superio::Serial::from_state(&state, Line(Arc::clone(&self.line)), NoEvents, empty)
                .map_err(|_| RestoreError::Device("the serial port has more input than fits"))?;
        std::mem::swap(restored.writer_mut(), port.writer_mut());
        *port = restored;
        Ok(())
    }

    /// Adds the counters under `name`.
    pub fn counters(&self, name: &str, out: &mut Vec<(String, u64)>) {
        self.metrics
            .visit(&mut |counter, value| out.push((format!("{name}.{counter}"), value)));
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Port> {
        self.port.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drains, and listens for room if the console is full.
    pub(super) fn drain(&self) {
        let mut port = self.lock();
        let drained = port.writer_mut().drain();
        let Some(fd) = port.writer().fd() else {
            return;
        };
        self.registrar.remove(fd);
        if drained == Drained::Blocked {
            // A descriptor that cannot be waited for never says that it is full.
            let _ = self.registrar.add(fd, WRITABLE, Ready::OUT);
        }
    }
}

impl BusDevice for Serial {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let ([value], Ok(offset)) = (data, u8::try_from(offset)) {
            *value = self.lock().read(offset);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let (&[value], Ok(offset)) = (data, u8::try_from(offset)) {
            // The output takes everything and the line cannot fail.
            let _ = self.lock().write(offset, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{EventLoop, EventTarget};
    use std::io::{Read, Write};

    fn serial() -> (EventLoop, Arc<Serial>) {
        let mut event_loop = EventLoop::new().unwrap();
        let serial = event_loop.add(Serial::new).unwrap();
        (event_loop, serial)
    }

    fn print(serial: &Serial, text: &[u8]) {
        for byte in text {
            serial.write(0, &[*byte]);
        }
    }

    fn counter(serial: &Serial, name: &str) -> u64 {
        let mut out = Vec::new();
        serial.counters("console", &mut out);
        out.into_iter()
            .find(|(n, _)| n == &format!("console.{name}"))
            .unwrap()
            .1
    }

    fn console(output: OwnedFd, bytes_per_second: u64, max_bytes: u64) -> Console {
        Console {
            output,
            bytes_per_second,
            max_bytes,
        }
    }
    use std::os::fd::OwnedFd;

    #[test]
    fn output_reaches_the_console_file() {
        let (_loop, serial) = serial();
        let mut file = tempfile::tempfile().unwrap();
        serial
            .attach(console(file.try_clone().unwrap().into(), 0, 0))
            .unwrap();
        print(&serial, b"hello\n");
        serial.on_event(WAKE, Ready::IN);
        let mut text = String::new();
        std::io::Seek::rewind(&mut file).unwrap();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "hello\n");
    }

    #[test]
    fn output_ends_at_the_size_and_is_counted() {
        let (_loop, serial) = serial();
        let file = tempfile::tempfile().unwrap();
        serial
            .attach(console(file.try_clone().unwrap().into(), 0, 10))
            .unwrap();
        print(&serial, &[b'x'; 100]);
        serial.flush();
        assert_eq!(file.metadata().unwrap().len(), 10);
        assert_eq!(counter(&serial, "dropped"), 90);
    }

    #[test]
    fn a_flood_passes_only_its_burst() {
        let (_loop, serial) = serial();
        let file = tempfile::tempfile().unwrap();
        serial
            .attach(console(file.try_clone().unwrap().into(), 1, 0))
            .unwrap();
        for _ in 0..3 {
            print(&serial, &[b'x'; 50_000]);
            serial.flush();
        }
        let len = file.metadata().unwrap().len();
        assert!((65536..66000).contains(&len), "{len}");
    }

    #[test]
    fn a_full_pipe_neither_blocks_nor_loses_what_fits_the_buffer() {
        let (_loop, serial) = serial();
        let (mut reader, mut writer) = std::io::pipe().unwrap();
        writer.write_all(b">").unwrap();
        serial.attach(console(writer.into(), 0, 0)).unwrap();
        print(&serial, &[b'x'; 60_000]);
        serial.on_event(WAKE, Ready::IN);
        print(&serial, &[b'y'; 60_000]);
        serial.on_event(WAKE, Ready::IN);
        let mut seen = vec![0; 60_001];
        reader.read_exact(&mut seen).unwrap();
        serial.on_event(WRITABLE, Ready::OUT);
        let mut rest = vec![0; 60_000];
        reader.read_exact(&mut rest).unwrap();
        assert!(rest.iter().all(|b| *b == b'y'));
        assert_eq!(counter(&serial, "dropped"), 0);
    }

    #[test]
    fn a_console_that_is_gone_is_an_error_count() {
        let (_loop, serial) = serial();
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        serial.attach(console(writer.into(), 0, 0)).unwrap();
        print(&serial, b"hello");
        serial.on_event(WAKE, Ready::IN);
        assert_eq!(counter(&serial, "write_errors"), 1);
    }

    #[test]
    fn registers_and_input_survive_a_save() {
        let (_loop, first) = serial();
        first.write(7, &[0x5a]);
        assert_eq!(first.feed(b"typed"), 5);
        let saved = first.save();
        let (_loop, second) = serial();
        second.restore(saved.clone()).unwrap();
        assert_eq!(second.save(), saved);
        let mut byte = [0];
        second.read(0, &mut byte);
        assert_eq!(byte, *b"t");
        let SerialSnapshot::V1(mut state) = saved;
        state.input = vec![0; 100];
        assert!(second.restore(SerialSnapshot::V1(state)).is_err());
    }
}
