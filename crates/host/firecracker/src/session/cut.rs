//! A cut: Firecracker writes a full snapshot while the VM stands still.
//!
//! ```text
//!   paused ─► state and memory into the VM's folder ─► changes of disks into their layers ─► instant captured
//!                                                                                                  │
//!             non-zero pages and the state are copied into the daemon's files ◄── resumed, if asked ┘
//! ```

use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::unix::fs::FileExt;
use std::time::Instant;

use forkd_os::sparse::DataRanges;
use forkd_types::PAGE_SIZE;
use forkd_vmm_proto::{
    CutExtent, CutReport, CutSpec, Event, Fds, ImageId, PauseParts, Reply, VmmError,
};
use serde_json::json;

use super::error::OperationError;
use super::{Answer, SNAPSHOT, Session, SessionError, Vm};

const NEW_STATE: &str = "state.new";
const NEW_MEMORY: &str = "memory.new";
/// Bytes that are looked at in one piece.
const PIECE: usize = 1 << 20;

/// Files that a cut is written to.
struct Targets {
    state: File,
    memory: File,
    layers: Vec<File>,
}

/// A captured instant.
struct Captured {
    parts: PauseParts,
    pause_us: u64,
}

impl Session {
    pub(super) fn cut(
        &mut self,
        seq: u64,
        spec: &CutSpec,
        fds: Fds,
    ) -> Result<Answer, SessionError> {
        let started = Instant::now();
        let vm = match self.live() {
            Ok(vm) => vm,
            Err(error) => return Ok(Err(error)),
        };
        let captured = targets(vm, spec, fds).and_then(|mut targets| {
            let captured = vm.capture(&mut targets.layers, spec.resume)?;
            Ok((targets, captured))
        });
        let (mut targets, captured) = match captured {
            Ok(captured) => captured,
            Err(error) => return Ok(Err(error.wire())),
        };
        let pause_us = captured.pause_us;
        self.event(Event::CutTaken { seq, pause_us })?;
        Ok(self.finish_cut(&mut targets, &captured, spec.resume, started))
    }

    /// Copies what Firecracker wrote. If that fails, a VM that was to stay paused goes on.
    fn finish_cut(
        &mut self,
        targets: &mut Targets,
        captured: &Captured,
        resumed: bool,
        started: Instant,
    ) -> Answer {
        let copied = copy_out(targets);
        remove_new_files();
        let vm = self.live()?;
        match copied {
            Ok((state_bytes, pages_written, zero_pages)) => {
                vm.cuts += 1;
                Ok(Reply::Cut(CutReport {
                    image: ImageId(vm.cuts),
                    pause_us: captured.pause_us,
                    parts: captured.parts,
                    pages_written,
                    zero_pages,
                    state_bytes,
                    total_us: micros(started),
                }))
            }
            Err(source) => {
                let error = OperationError::io("write the cut")(source);
                if !resumed && let Err(failed) = vm.set_paused(false) {
                    return Err(both(&error, &failed));
                }
                Err(error.wire())
            }
        }
    }
}

impl Vm {
    /// Takes the state at one instant. After a failure the VM is as it was before.
    fn capture(
        &mut self,
        layers: &mut Vec<File>,
        resume: bool,
    ) -> Result<Captured, OperationError> {
        let was_paused = self.paused;
        let stopped = Instant::now();
        if !was_paused {
            self.set_paused(true)?;
        }
        let mut parts = PauseParts {
            stop_us: micros(stopped),
            ..PauseParts::default()
        };
        if let Err(error) = self.write_snapshot(layers, &mut parts) {
            remove_new_files();
            if !was_paused {
                self.set_paused(false)?;
            }
            return Err(error);
        }
        let starting = Instant::now();
        if resume {
            self.set_paused(false)?;
        }
        parts.start_us = micros(starting);
        let pause_us = if resume { micros(stopped) } else { 0 };
        Ok(Captured { parts, pause_us })
    }

    fn write_snapshot(
        &mut self,
        layers: &mut Vec<File>,
        parts: &mut PauseParts,
    ) -> Result<(), OperationError> {
        let writing = Instant::now();
        let create = json!({
            "snapshot_type": "Full",
            "snapshot_path": NEW_STATE,
            "mem_file_path": NEW_MEMORY,
        });
        self.process
            .api()
            .put("/snapshot/create", &create, SNAPSHOT)?;
        parts.memory_us = micros(writing);
        let disks = Instant::now();
        for disk in &mut self.disks {
            disk.write_changes()?;
        }
        let writable = self.disks.iter_mut().filter(|disk| disk.writable());
        for (disk, layer) in writable.zip(layers.drain(..)) {
            disk.push_layer(layer)?;
        }
        parts.disks_us = micros(disks);
        Ok(())
    }
}

fn targets(vm: &Vm, spec: &CutSpec, mut fds: Fds) -> Result<Targets, OperationError> {
    if spec.extent != CutExtent::All {
        return Err(OperationError::Unsupported("cuts of changed pages"));
    }
    let writable = vm.disks.iter().filter(|disk| disk.writable()).count();
    match spec.new_layers.len() {
        0 if spec.resume && writable > 0 => {
            return Err(OperationError::Request(
                "a VM that goes on needs new layers",
            ));
        }
        count if count != 0 && count != writable => {
            return Err(OperationError::Request("one new layer per writable disk"));
        }
        _ => {}
    }
    let layers: Result<Vec<File>, _> = spec
        .new_layers
        .iter()
        .map(|index| fds.file(*index))
        .collect();
    Ok(Targets {
        state: fds.file(spec.state)?,
        memory: fds.file(spec.memory)?,
        layers: layers?,
    })
}

/// Copies state and memory. Gives the bytes of state, the pages written and the pages left out.
fn copy_out(targets: &mut Targets) -> io::Result<(u64, u64, u64)> {
    let mut state = File::open(NEW_STATE)?;
    targets.state.rewind()?;
    targets.state.set_len(0)?;
    let state_bytes = io::copy(&mut state, &mut targets.state)?;
    targets.state.flush()?;
    let (written, zero) = copy_pages(&File::open(NEW_MEMORY)?, &targets.memory)?;
    Ok((state_bytes, written, zero))
}

/// Copies a file page by page into an empty one of the same length, and leaves zero pages as holes.
fn copy_pages(from: &File, to: &File) -> io::Result<(u64, u64)> {
    let len = from.metadata()?.len();
    to.set_len(0)?;
    to.set_len(len)?;
    let mut buffer = vec![0; PIECE];
    let mut written = 0;
    for range in DataRanges::new(from, 0..len) {
        let range = range?;
        let mut at = range.start;
        while at < range.end {
            // At most `PIECE`.
            let count = (range.end - at).min(PIECE as u64) as usize;
            let piece = &mut buffer[..count];
            from.read_exact_at(piece, at)?;
            written += write_pages(piece, to, at)?;
            at += count as u64;
        }
    }
    Ok((written, len.div_ceil(PAGE_SIZE).saturating_sub(written)))
}

/// Writes runs of pages that are not zero. Gives their number.
fn write_pages(piece: &[u8], to: &File, at: u64) -> io::Result<u64> {
    let page = PAGE_SIZE as usize;
    let used: Vec<bool> = piece
        .chunks(page)
        .map(|page| page.iter().any(|byte| *byte != 0))
        .collect();
    let mut first = 0;
    while let Some(start) = used[first..].iter().position(|used| *used) {
        let start = first + start;
        let end = start + used[start..].iter().take_while(|used| **used).count();
        let bytes = &piece[start * page..(end * page).min(piece.len())];
        to.write_all_at(bytes, at + (start * page) as u64)?;
        first = end;
    }
    Ok(used.iter().filter(|used| **used).count() as u64)
}

fn remove_new_files() {
    for name in [NEW_STATE, NEW_MEMORY] {
        // A snapshot that failed early has none of them.
        let _ = std::fs::remove_file(name);
    }
}

fn both(error: &OperationError, later: &OperationError) -> VmmError {
    let mut wire = error.wire();
    wire.message = format!("{}; {}", wire.message, later.wire().message);
    wire
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_pages_become_holes_and_all_others_are_copied() {
        let from = tempfile::tempfile().unwrap();
        let pages = 600 * PAGE_SIZE;
        from.write_all_at(&vec![0; pages as usize], 0).unwrap();
        for page in [0, 1, 255, 256, 599] {
            from.write_all_at(&[5], page * PAGE_SIZE + 17).unwrap();
        }
        let to = tempfile::tempfile().unwrap();
        to.write_all_at(&[9; 100], pages + 1).unwrap();
        assert_eq!(copy_pages(&from, &to).unwrap(), (5, 595));
        let content = |file: &File| {
            let mut bytes = vec![0; pages as usize];
            file.read_exact_at(&mut bytes, 0).unwrap();
            bytes
        };
        assert!(content(&from) == content(&to));
        assert_eq!(to.metadata().unwrap().len(), pages);
        let data: u64 = DataRanges::new(&to, 0..pages)
            .map(|range| range.unwrap())
            .map(|range| range.end - range.start)
            .sum();
        assert_eq!(data, 5 * PAGE_SIZE);
    }
}
