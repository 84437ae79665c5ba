//! The cut of a live fork: its content stays in memory.
//!
//! Nothing is hashed, synced or named. The content is volatile ([`forkd_store::Store::enter_volatile`]), and a copy of
//! each descriptor that a later daemon needs lies with `forkd-spawn`.

use std::os::fd::AsFd;

use forkd_store::Ingested;

use super::Place;
use crate::app::App;
use crate::error::Error;
use crate::limits::PromisedMemory;
use crate::process;
use crate::sandbox::headroom;
use crate::state::SandboxRecord;

/// Live cuts in a row that build on each other. The next one holds every page that differs from the start of the source,
/// and so frees those before it.
const MAX_DEPTH: usize = 8;

/// The last cuts of this source build on each other so often that the next begins anew.
pub(super) fn is_deep(record: &SandboxRecord) -> bool {
    let built = record.builds_on().0.layers.len();
    built.saturating_sub(record.memory.layers.len()) >= MAX_DEPTH
}

/// Where the pages of a live cut go, with a promise for their memory. The memory counts in the cgroup of the source as long
/// as a child uses it. A source whose limit has no room for these pages beside all of its guest's memory is therefore
/// copied to a file, which the kernel can write back.
pub(super) fn room(
    app: &App,
    record: &SandboxRecord,
    copied_mib: u64,
) -> Result<(Place, Option<PromisedMemory>), Error> {
    // Memory of the VMM itself and of earlier live cuts.
    let held = record.pid.and_then(process::held_bytes);
    let beside = held.map_or(0, |bytes| bytes.div_ceil(1 << 20));
    let beside = beside.saturating_sub(headroom::private_mib(record));
    let all = u64::from(record.memory_mib) + beside + copied_mib;
    if record.memory_limit_mib.is_some_and(|limit| all > limit) {
        return Ok((Place::MixedMemory, None));
    }
    let promised = app.limits.live_cut(copied_mib)?;
    Ok((Place::Memory, Some(promised)))
}

/// Leaves copies of volatile content with `forkd-spawn`, before any record names it.
pub(super) async fn keep<'a>(
    app: &App,
    content: impl Iterator<Item = &'a Ingested>,
) -> Result<(), Error> {
    let mut files = Vec::new();
    for entered in content {
        let name = entered.blob.digest;
        let file = app.store.open_volatile(&name);
        let file = file.map_err(Error::store("the cut is not there any more"))?;
        files.push((name, file.ok_or(Error::Task)?));
    }
    let files: Vec<_> = files
        .iter()
        .map(|(name, file)| (*name, file.as_fd()))
        .collect();
    Ok(app.launcher.keep(&files).await?)
}

#[cfg(test)]
mod tests {
    use forkd_store::BlobRef;
    use forkd_types::Digest;
    use forkd_vmm_proto::ImageId;

    use super::*;
    use crate::config::Config;
    use crate::state::BuiltRecord;

    fn record() -> SandboxRecord {
        let mut record = SandboxRecord::unreadable("sb-1".parse().unwrap());
        record.memory_mib = 64;
        record.pid = Some(std::process::id());
        record
    }

    fn with_layers(count: usize) -> SandboxRecord {
        let blob = BlobRef {
            digest: Digest([1; 32]),
            bytes: 1,
        };
        let mut record = record();
        record.memory.layers = vec![blob; 3];
        let mut memory = record.memory.clone();
        memory.layers = vec![blob; 3 + count];
        let image = ImageId(7);
        record.built = Some(BuiltRecord { image, memory });
        record
    }

    #[test]
    fn a_chain_of_live_cuts_begins_anew_when_it_is_deep() {
        assert!(!is_deep(&record()));
        assert!(!is_deep(&with_layers(MAX_DEPTH - 1)));
        assert!(is_deep(&with_layers(MAX_DEPTH)));
    }

    #[test]
    fn a_source_at_its_memory_limit_is_copied_to_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let (app, _endings) = App::open(Config::below(dir.path())).unwrap();
        let mut record = record();
        let (place, promised) = room(&app, &record, 10).unwrap();
        assert_eq!(place, Place::Memory);
        assert!(promised.is_some());
        // The guest may fill its memory later, and the copy still counts then.
        record.memory_limit_mib = Some(64 + 9);
        let (place, promised) = room(&app, &record, 10).unwrap();
        assert_eq!(place, Place::MixedMemory);
        assert!(promised.is_none());
        record.memory_limit_mib = Some(64 + 10);
        assert_eq!(room(&app, &record, 10).unwrap().0, Place::Memory);
    }

    #[test]
    fn a_host_without_room_refuses_before_the_source_stops() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config {
            reserve_mib: u64::MAX / 2,
            ..Config::below(dir.path())
        };
        let (app, _endings) = App::open(config).unwrap();
        let refused = room(&app, &record(), 64).unwrap_err();
        assert_eq!(refused.code(), forkd_api::ErrorCode::LimitReached);
    }
}
