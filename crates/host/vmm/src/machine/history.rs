//! The history of guest memory: pages changed since the last cut, and checkpoints.
//!
//! Two sets grow with every change: pages changed since the last cut (`since_image`), which the next cut
//! builds on, and pages changed since the checkpoint the machine stands on (`since_head`). Checkpoints are a
//! tree. Each holds the pages that differ from its parent, so the content of a page at a checkpoint is in the
//! nearest ancestor that has the page, or else in the image the machine was started from.
//!
//! Errors lean to "changed": a page that may have changed is in both sets.
//!
//! A roll-back maps the files of checkpoints over long runs of pages, and copies the rest. A page of such a mapping
//! ([`Overlays`]) differs from the image although it is not private. Only files of the head and of its ancestors are
//! mapped: a roll-back that leaves a checkpoint replaces all pages of it. So a mapping never outlives its checkpoint.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::AsFd;

use forkd_devices::disk::DiskStack;
use forkd_memory::{GuestRam, MemoryError, PageSet};
use forkd_sys::{Pagemap, PagemapError, WriteTracker};
use forkd_vmm_proto::{ImageId, PageMap};

use crate::state::MachineState;

/// The most checkpoints one machine keeps.
const MAX_CHECKPOINTS: usize = 256;

/// Pages of a run for which a roll-back maps the file of the checkpoint. Shorter runs are copied: that takes less than a
/// mapping.
const LONG_RUN: u64 = 16;
/// The most borders between mappings that roll-backs leave. The kernel allows a process 65,530 mappings.
const MAX_BORDERS: usize = 4096;

/// A point to go back to.
pub struct Checkpoint {
    parent: Option<u64>,
    /// The pages that `memory` has.
    pages: PageSet,
    memory: File,
    /// vCPUs and devices.
    pub state: MachineState,
    /// Of the writable disks, in slot order.
    pub disks: Vec<DiskStack>,
    /// Dropped by the owner, and kept for the checkpoints that build on it.
    dropped: bool,
}

impl Checkpoint {
    /// A checkpoint that is about to be written.
    pub fn new(memory: File, state: MachineState, disks: Vec<DiskStack>) -> Self {
        Self {
            parent: None,
            pages: PageSet::default(),
            memory,
            state,
            disks,
            dropped: false,
        }
    }
}

/// The last cut, as the base of the next one.
struct Image {
    id: ImageId,
    map: PageMap,
}

/// Pages that came or were written since they were last looked at.
pub struct Fresh {
    touched: PageSet,
    /// The private ones among `touched`.
    own: PageSet,
    /// Given back by the guest since the last look.
    discarded: PageSet,
}

impl Fresh {
    pub fn touched(&self) -> &PageSet {
        &self.touched
    }

    /// All pages whose content may differ from what it was when they were marked.
    pub fn changed(&self) -> PageSet {
        let mut all = self.touched.clone();
        all.add(&self.own);
        all.add(&self.discarded);
        all
    }
}

/// The pages over which files of checkpoints are mapped.
#[derive(Default)]
struct Overlays {
    pages: PageSet,
    /// Where mappings begin and end, as page numbers.
    borders: BTreeSet<u64>,
}

impl Overlays {
    /// The runs that are worth a mapping, and the rest. All are rest once there are too many mappings.
    fn choose(&self, pages: &PageSet) -> (PageSet, PageSet) {
        let is_long = |range: &forkd_sys::PageRange| range.count >= LONG_RUN;
        let (long, short): (Vec<_>, Vec<_>) = pages.ranges().iter().copied().partition(is_long);
        if self.borders.len() + 2 * long.len() > MAX_BORDERS {
            return (PageSet::default(), pages.clone());
        }
        (PageSet::new(long), PageSet::new(short))
    }

    /// Notes new mappings: of checkpoints, or of the start.
    fn note(&mut self, mapped: &PageSet, of_checkpoint: bool) {
        for range in mapped.ranges() {
            let replaced = self.borders.range(range.first..=range.end());
            for border in replaced.copied().collect::<Vec<_>>() {
                self.borders.remove(&border);
            }
            self.borders.extend([range.first, range.end()]);
        }
        if of_checkpoint {
            self.pages.add(mapped);
        } else {
            self.pages = self.pages.split(mapped).1;
        }
    }
}

/// The history of one machine.
pub struct History {
    tracker: Option<WriteTracker>,
    pagemap: Result<Pagemap, PagemapError>,
    follows: bool,
    image: Option<Image>,
    since_image: PageSet,
    next_image: u64,
    checkpoints: BTreeMap<u64, Checkpoint>,
    head: Option<u64>,
    since_head: PageSet,
    next_checkpoint: u64,
    overlays: Overlays,
}

impl History {
    /// No history yet.
    pub fn new(tracker: Option<WriteTracker>, pagemap: Result<Pagemap, PagemapError>) -> Self {
        Self {
            tracker,
            pagemap,
            follows: false,
            image: None,
            since_image: PageSet::default(),
            next_image: 1,
            checkpoints: BTreeMap::new(),
            head: None,
            since_head: PageSet::default(),
            next_checkpoint: 1,
            overlays: Overlays::default(),
        }
    }

    /// The page map of this process.
    pub fn pagemap(&self) -> Option<&Pagemap> {
        self.pagemap.as_ref().ok()
    }

    /// Starts to follow writes and discards, at the first call. On a host that cannot follow writes every
    /// private page counts as written; discards are recorded all the same, since a discarded page is not
    /// private any more and a roll-back would miss it.
    pub fn follow(&mut self, ram: &GuestRam) {
        if self.follows {
            return;
        }
        self.follows = true;
        ram.remember_discarded();
        if self.pagemap().is_some_and(Pagemap::has_marks) {
            self.follow_new_mappings(ram);
        }
    }

    /// Follows writes to mappings that are new. Others stay as they are.
    fn follow_new_mappings(&mut self, ram: &GuestRam) {
        if let Some(tracker) = &self.tracker
            && let Err(error) = ram.follow_writes(tracker)
        {
            tracing::warn!(%error, "every cut will look at all changed pages");
            self.tracker = None;
        }
    }

    /// Marks pages of a stopped machine, all of which are noted by now: no page is marked unseen.
    pub fn mark_stopped(&self, ram: &GuestRam, pages: &PageSet) -> Result<(), MemoryError> {
        let (Some(_), Ok(pagemap)) = (&self.tracker, &self.pagemap) else {
            return Ok(());
        };
        ram.mark(pagemap, pages)?;
        Ok(())
    }

    /// Notes and marks the pages written so far, while the machine runs. Only pages written from now on are
    /// left for the pause. Returns the pages written since the last call; `None` if writes cannot be followed.
    pub fn look_ahead(&mut self, ram: &GuestRam) -> Result<Option<PageSet>, MemoryError> {
        let (Some(_), Ok(pagemap)) = (&self.tracker, &self.pagemap) else {
            return Ok(None);
        };
        let touched = match ram.mark_touched(pagemap) {
            Ok(touched) => touched,
            Err(error) => {
                // Some pages may have been marked, and would not show up again.
                self.note(&everything(ram));
                return Err(error);
            }
        };
        let own = ram.own_among(pagemap, &touched);
        // A marked page counts as changed unless it is known to be the image's.
        let own = own.unwrap_or(touched);
        self.note(&own);
        Ok(Some(own))
    }

    /// Notes the pages written since the last call of this or [`History::look_ahead`]. The machine is stopped.
    pub fn written(&mut self, ram: &GuestRam) -> Result<Fresh, MemoryError> {
        let fresh = match &self.pagemap {
            Ok(pagemap) => {
                let touched = ram.touched_set(pagemap)?;
                let own = ram.own_among(pagemap, &touched)?;
                Fresh {
                    touched,
                    own,
                    discarded: PageSet::default(),
                }
            }
            Err(_) => Fresh {
                touched: PageSet::default(),
                own: everything(ram),
                discarded: PageSet::default(),
            },
        };
        let fresh = Fresh {
            discarded: ram.discarded_set(),
            ..fresh
        };
        self.note(&fresh.discarded);
        self.note(&fresh.own);
        Ok(fresh)
    }

    fn note(&mut self, pages: &PageSet) {
        self.since_image.add(pages);
        self.since_head.add(pages);
    }

    /// All pages that differ from the image the machine was started from.
    pub fn private(&self, ram: &GuestRam) -> Result<PageSet, MemoryError> {
        match self.pagemap() {
            Some(pagemap) => {
                let mut differ = ram.private_set(pagemap)?;
                differ.add(&self.overlays.pages);
                Ok(differ)
            }
            None => Ok(everything(ram)),
        }
    }

    /// Marks pages that a forked child has, while the machine runs again. Pages written since the fork keep
    /// counting as changed.
    pub fn mark_shared(&mut self, ram: &GuestRam, fresh: &Fresh) {
        let written = match (&self.tracker, &self.pagemap) {
            (Some(_), Ok(pagemap)) => written_after_fork(ram, pagemap, fresh),
            _ => return,
        };
        match written {
            Ok(written) => self.note(&written),
            Err(error) => {
                tracing::warn!(%error, "the next cut will look at more pages than changed");
                self.note(&fresh.touched);
            }
        }
    }

    /// The pages of a cut onto an image, and the page map below it; `None` if there is no such image.
    pub fn since_image(
        &self,
        ram: &GuestRam,
        onto: ImageId,
    ) -> Result<Option<(PageSet, Option<PageMap>)>, MemoryError> {
        match &self.image {
            Some(image) if image.id == onto => {
                Ok(Some((self.since_image.clone(), Some(image.map.clone()))))
            }
            _ if onto == ImageId::START => {
                let map = ram.image().map(|image| image.map().clone());
                Ok(Some((self.private(ram)?, map)))
            }
            _ => Ok(None),
        }
    }

    /// A cut was captured: pages count as changed from now on. Returns those it has captured.
    pub fn begin_cut(&mut self) -> PageSet {
        std::mem::take(&mut self.since_image)
    }

    /// The cut failed; its pages count as changed again.
    pub fn cut_failed(&mut self, pages: &PageSet) {
        self.since_image.add(pages);
    }

    /// Registers the last cut as the image that the next one can build on.
    pub fn cut_done(&mut self, map: PageMap) -> ImageId {
        let id = ImageId(self.next_image);
        self.next_image += 1;
        self.image = Some(Image { id, map });
        id
    }

    /// The checkpoint the machine stands on, if no page has changed since.
    pub fn unwritten_head(&self) -> Option<(u64, &Checkpoint)> {
        let head = self.head.filter(|_| self.since_head.is_empty())?;
        let found = self.checkpoints.get(&head)?;
        (!found.dropped).then_some((head, found))
    }

    /// Whether one more checkpoint is allowed.
    pub fn has_room(&self) -> bool {
        self.checkpoints.len() < MAX_CHECKPOINTS
    }

    /// The pages of a new checkpoint.
    pub fn since_head(&self, ram: &GuestRam) -> Result<PageSet, MemoryError> {
        match self.head {
            Some(_) => Ok(self.since_head.clone()),
            None => self.private(ram),
        }
    }

    /// A checkpoint was captured: pages count as changed from now on.
    pub fn begin_checkpoint(&mut self) {
        self.since_head = PageSet::default();
    }

    /// The checkpoint failed; its pages count as changed again.
    pub fn checkpoint_failed(&mut self, pages: &PageSet) {
        self.since_head.add(pages);
    }

    /// The checkpoint succeeded, and is the new head. Returns its number.
    pub fn checkpoint_done(&mut self, mut made: Checkpoint, pages: PageSet) -> u64 {
        let id = self.next_checkpoint;
        self.next_checkpoint += 1;
        made.parent = self.head;
        made.pages = pages;
        self.checkpoints.insert(id, made);
        let before = self.head.replace(id);
        self.prune(before);
        id
    }

    /// A checkpoint by its number.
    pub fn checkpoint(&self, id: u64) -> Option<&Checkpoint> {
        self.checkpoints.get(&id).filter(|found| !found.dropped)
    }

    /// Drops a checkpoint; its pages stay while others build on it. Returns false if there is none.
    pub fn drop_checkpoint(&mut self, id: u64) -> bool {
        match self.checkpoints.get_mut(&id) {
            Some(found) if !found.dropped => {
                found.dropped = true;
                self.prune(Some(id));
                true
            }
            _ => false,
        }
    }

    /// Removes dropped checkpoints that are neither the head nor a parent.
    fn prune(&mut self, mut from: Option<u64>) {
        while let Some(id) = from {
            let needed = self.head == Some(id)
                || self.checkpoints.values().any(|c| c.parent == Some(id))
                || self.checkpoints.get(&id).is_none_or(|c| !c.dropped);
            if needed {
                return;
            }
            from = self.checkpoints.remove(&id).and_then(|gone| gone.parent);
        }
    }

    /// A checkpoint and those before it, the newest first.
    fn line(&self, from: Option<u64>) -> Vec<u64> {
        std::iter::successors(from, |id| self.checkpoints.get(id)?.parent).collect()
    }

    /// Restores memory to a checkpoint. The machine is stopped, and [`History::written`] was called since.
    /// Returns the number of pages.
    pub fn put_back(&mut self, ram: &GuestRam, to: u64) -> Result<u64, MemoryError> {
        let (from, target) = (self.line(self.head), self.line(Some(to)));
        let mut changed = std::mem::take(&mut self.since_head);
        for id in from
            .iter()
            .filter(|id| !target.contains(id))
            .chain(target.iter().filter(|id| !from.contains(id)))
        {
            if let Some(checkpoint) = self.checkpoints.get(id) {
                changed.add(&checkpoint.pages);
            }
        }
        let mut rest = changed.clone();
        let mut copied = PageSet::default();
        let mut mapped = false;
        for id in &target {
            let Some(checkpoint) = self.checkpoints.get(id) else {
                continue;
            };
            let (here, elsewhere) = rest.split(&checkpoint.pages);
            let (long, short) = self.overlays.choose(&here);
            ram.map_file(checkpoint.memory.as_fd(), &long)?;
            self.overlays.note(&long, true);
            mapped |= !long.is_empty();
            ram.read_back(checkpoint.memory.as_fd(), &short)?;
            copied.add(&short);
            rest = elsewhere;
        }
        let (overlaid, rest) = rest.split(&self.overlays.pages);
        ram.map_as_started(&overlaid)?;
        self.overlays.note(&overlaid, false);
        mapped |= !overlaid.is_empty();
        ram.drop_private(&rest)?;
        if mapped {
            self.follow_new_mappings(ram);
        }
        // Pages that were mapped or dropped are absent, and count as touched only when the guest has them again.
        self.mark_stopped(ram, &copied)?;
        self.since_image.add(&changed);
        let before = self.head.replace(to);
        self.prune(before);
        Ok(changed.pages())
    }
}

/// Marks pages, and returns those written between the fork and the mark: pages that were private at the fork
/// and are no longer shared with the child, and pages that were clean then and are private now.
fn written_after_fork(
    ram: &GuestRam,
    pagemap: &Pagemap,
    fresh: &Fresh,
) -> Result<PageSet, MemoryError> {
    let marked = ram.mark(pagemap, &fresh.touched)?;
    let mut written = ram.unshared(pagemap, &fresh.own)?;
    let (_, mut clean) = fresh.touched.split(&fresh.own);
    // Pages in gaps, touched since the fork.
    clean.add(&marked.split(&fresh.touched).1);
    written.add(&ram.own_among(pagemap, &clean)?);
    Ok(written)
}

fn everything(ram: &GuestRam) -> PageSet {
    PageSet::new(vec![forkd_sys::PageRange {
        first: 0,
        count: u64::from(ram.layout().pages()),
    }])
}

#[cfg(test)]
mod tests {
    use forkd_devices::EventLoop;
    use forkd_devices::legacy::Serial;
    use forkd_memory::{ImageLayers, PAGE_SIZE, RamLayout, plan_changed};
    use forkd_types::MiB;
    use forkd_vmm_proto::{CpuModel, Shape};
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::kvm::VmState;

    const MIB: u32 = 64;

    fn over_an_image() -> GuestRam {
        let image = tempfile::tempfile().unwrap();
        image.set_len(u64::from(MIB) << 20).unwrap();
        let ram = GuestRam::reserve(RamLayout::new(MIB).unwrap()).unwrap();
        let map = PageMap::identity((MIB << 20) / PAGE_SIZE as u32);
        ram.map_image(ImageLayers::new(map, vec![image.into()]).unwrap())
            .unwrap();
        ram
    }

    fn at(page: u64) -> GuestAddress {
        GuestAddress(page * PAGE_SIZE)
    }

    fn no_state() -> MachineState {
        let mut event_loop = EventLoop::new().unwrap();
        let serial = event_loop.add(Serial::new).unwrap();
        MachineState {
            shape: Shape {
                engine: forkd_types::Engine::FORKD,
                memory: MiB(MIB),
                vcpus: 1,
                cpu: CpuModel::Host,
            },
            vm: VmState {
                clock_ns: 0,
                pic_master: Default::default(),
                pic_slave: Default::default(),
                ioapic: Default::default(),
            },
            vcpus: vec![],
            slots: vec![],
            serial: serial.save(),
        }
    }

    /// Takes a checkpoint of memory alone.
    fn checkpoint(history: &mut History, ram: &GuestRam) -> u64 {
        history.follow(ram);
        history.look_ahead(ram).unwrap();
        let fresh = history.written(ram).unwrap();
        let file = tempfile::tempfile().unwrap();
        ram.size_file(file.as_fd()).unwrap();
        let pages = history.since_head(ram).unwrap();
        let plan = plan_changed(pages.ranges().to_vec());
        let pages = PageSet::new(plan.ranges.clone());
        let written = ram.write_frozen(plan, file.as_fd()).unwrap();
        history.begin_checkpoint();
        history.mark_shared(ram, &fresh);
        written.finish().unwrap();
        let made = Checkpoint::new(file, no_state(), vec![]);
        history.checkpoint_done(made, pages)
    }

    fn a_page_given_back_returns_with_a_roll_back(tracker: Option<WriteTracker>) {
        let ram = over_an_image();
        let (kept, given_back) = (10, 20);
        for page in [kept, given_back] {
            ram.memory().write_obj(7u8, at(page)).unwrap();
        }
        let mut history = History::new(tracker, Pagemap::open());
        let id = checkpoint(&mut history, &ram);
        ram.memory().write_obj(8u8, at(kept)).unwrap();
        ram.discard(given_back * PAGE_SIZE, PAGE_SIZE).unwrap();
        assert_eq!(ram.memory().read_obj::<u8>(at(given_back)).unwrap(), 0);
        history.written(&ram).unwrap();
        history.put_back(&ram, id).unwrap();
        let seen = [kept, given_back].map(|page| ram.memory().read_obj::<u8>(at(page)).unwrap());
        assert_eq!(seen, [7, 7]);
    }

    #[test]
    fn a_roll_back_restores_discarded_pages_without_write_tracking() {
        a_page_given_back_returns_with_a_roll_back(None);
    }

    #[test]
    fn a_roll_back_restores_discarded_pages_with_write_tracking() {
        let Ok(tracker) = WriteTracker::open() else {
            eprintln!("this kernel does not follow writes: nothing was tested");
            return;
        };
        a_page_given_back_returns_with_a_roll_back(Some(tracker));
    }

    fn fill(ram: &GuestRam, pages: std::ops::Range<u64>, byte: u8) {
        for page in pages {
            ram.memory().write_obj(byte, at(page)).unwrap();
        }
    }

    fn byte_of(ram: &GuestRam, page: u64) -> u8 {
        ram.memory().read_obj(at(page)).unwrap()
    }

    fn set(pages: std::ops::Range<u64>) -> PageSet {
        let (first, count) = (pages.start, pages.end - pages.start);
        PageSet::new(vec![forkd_sys::PageRange { first, count }])
    }

    /// A page of a mapped checkpoint is not private, but differs from the image like one that is.
    fn long_runs_are_mapped(tracker: Option<WriteTracker>) {
        let ram = over_an_image();
        let mut history = History::new(tracker, Pagemap::open());
        let start = checkpoint(&mut history, &ram);
        fill(&ram, 100..140, 7);
        fill(&ram, 200..203, 7);
        let later = checkpoint(&mut history, &ram);
        for round in [8, 9] {
            fill(&ram, 105..130, round);
            fill(&ram, 200..203, round);
            history.written(&ram).unwrap();
            history.put_back(&ram, later).unwrap();
            for page in [100, 105, 129, 139, 200, 202] {
                assert_eq!(byte_of(&ram, page), 7, "page {page}");
            }
        }
        // The rest of the run did not change.
        let overlaid = history.overlays.pages.split(&set(105..130)).0;
        assert_eq!(overlaid, set(105..130));
        let differ = history.private(&ram).unwrap();
        assert_eq!(differ.split(&set(100..140)).0, set(100..140));
        // All of it goes when the checkpoint is left.
        history.written(&ram).unwrap();
        history.put_back(&ram, start).unwrap();
        for page in [100, 105, 139, 202] {
            assert_eq!(byte_of(&ram, page), 0, "page {page}");
        }
        assert!(history.overlays.pages.is_empty());
        // A write to a page that was mapped anew is found.
        fill(&ram, 110..111, 5);
        history.written(&ram).unwrap();
        assert!(!history.since_head.split(&set(110..111)).0.is_empty());
        history.put_back(&ram, later).unwrap();
        assert_eq!([110, 139].map(|page| byte_of(&ram, page)), [7, 7]);
        assert_eq!(history.overlays.pages, set(100..140));
    }

    #[test]
    fn a_roll_back_maps_long_runs_without_write_tracking() {
        long_runs_are_mapped(None);
    }

    #[test]
    fn a_roll_back_maps_long_runs_with_write_tracking() {
        let Ok(tracker) = WriteTracker::open() else {
            forkd_sys::testing::leave_out("write-tracking");
            return;
        };
        long_runs_are_mapped(Some(tracker));
    }

    #[test]
    fn mappings_of_roll_backs_are_bounded() {
        let mut overlays = Overlays::default();
        let runs = |offset: u64| {
            let range = |n| forkd_sys::PageRange {
                first: n * 2 * LONG_RUN + offset,
                count: LONG_RUN,
            };
            PageSet::new((0..MAX_BORDERS as u64 / 2).map(range).collect())
        };
        let (long, short) = overlays.choose(&runs(0));
        assert!(short.is_empty());
        overlays.note(&long, true);
        // The same runs again replace mappings, but that is not known before.
        overlays.note(&long, true);
        assert_eq!(overlays.borders.len(), MAX_BORDERS);
        assert!(overlays.choose(&runs(1)).0.is_empty());
        overlays.note(&set(0..u64::from(u32::MAX)), false);
        assert!(overlays.pages.is_empty());
        assert_eq!(overlays.borders.len(), 2);
    }

    /// A machine reads a page, is cut, and writes the page before it is marked: the next cut has it.
    #[test]
    fn what_is_written_between_the_instant_and_the_mark_counts() {
        let Ok(tracker) = WriteTracker::open() else {
            forkd_sys::testing::leave_out("write-tracking");
            return;
        };
        let ram = over_an_image();
        let (read, own, later) = (10, 20, 30);
        ram.memory().write_obj(1u8, at(own)).unwrap();
        let mut history = History::new(Some(tracker), Pagemap::open());
        history.follow(&ram);
        history.look_ahead(&ram).unwrap();
        ram.memory().read_obj::<u8>(at(read)).unwrap();
        ram.memory().write_obj(2u8, at(own)).unwrap();
        let fresh = history.written(&ram).unwrap();
        let file = tempfile::tempfile().unwrap();
        ram.size_file(file.as_fd()).unwrap();
        let plan = plan_changed(fresh.own.ranges().to_vec());
        let written = ram.write_frozen(plan, file.as_fd()).unwrap();
        history.begin_cut();
        for page in [read, own] {
            ram.memory().write_obj(3u8, at(page)).unwrap();
        }
        history.mark_shared(&ram, &fresh);
        written.finish().unwrap();
        ram.memory().write_obj(3u8, at(later)).unwrap();
        history.written(&ram).unwrap();
        let pages: Vec<u64> = history
            .since_image
            .ranges()
            .iter()
            .flat_map(|range| range.first..range.end())
            .collect();
        assert_eq!(pages, [read, own, later]);
    }
}
