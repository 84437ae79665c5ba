use super::*;
use proptest::prelude::*;

const SIZE: u64 = 40 * BLOCK - 512 * 3;
const BASE: u64 = 30 * BLOCK + 512;

fn base() -> (File, Vec<u8>) {
    use std::os::unix::fs::FileExt;
    let file = tempfile::tempfile().unwrap();
    let mut content: Vec<u8> = (0..BASE).map(|n| (n / 512 % 250 + 1) as u8).collect();
    file.write_all_at(&content, 0).unwrap();
    content.resize(SIZE as usize, 0);
    (file, content)
}

fn layer() -> (File, Layer) {
    let file = tempfile::tempfile().unwrap();
    let layer = Layer::create(file.try_clone().unwrap(), SIZE, 0).unwrap();
    (file, layer)
}

fn content(disk: &mut LayeredDisk) -> Vec<u8> {
    let mut data = vec![0xaa; SIZE as usize];
    disk.read(0, &mut data).unwrap();
    data
}

#[derive(Debug, Clone)]
enum Step {
    Write(u64, u64, u8),
    Zero(u64, u64),
    Discard(u64, u64),
    Read(u64, u64),
    Push,
    Flush,
    Reopen,
}

fn range() -> impl Strategy<Value = (u64, u64)> {
    let sectors = SIZE / 512;
    (0..sectors).prop_flat_map(move |first| {
        (1..=(sectors - first).min(60)).prop_map(move |count| (first * 512, count * 512))
    })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (range(), any::<u8>()).prop_map(|((o, l), b)| Step::Write(o, l, b)),
        2 => range().prop_map(|(o, l)| Step::Zero(o, l)),
        2 => range().prop_map(|(o, l)| Step::Discard(o, l)),
        3 => range().prop_map(|(o, l)| Step::Read(o, l)),
        1 => Just(Step::Push),
        1 => Just(Step::Flush),
        1 => Just(Step::Reopen),
    ]
}

/// A disk beside the plain bytes it must hold.
struct Checked {
    base: File,
    files: Vec<File>,
    disk: LayeredDisk,
    plain: Vec<u8>,
}

impl Checked {
    fn new() -> Self {
        let (base, plain) = base();
        let (file, layer) = layer();
        let disk = LayeredDisk::new(base.try_clone().unwrap(), vec![layer], false).unwrap();
        Self {
            base,
            files: vec![file],
            disk,
            plain,
        }
    }

    fn open(&self) -> LayeredDisk {
        let layers = self
            .files
            .iter()
            .enumerate()
            .map(|(n, file)| {
                Layer::open(file.try_clone().unwrap(), n + 1 == self.files.len()).unwrap()
            })
            .collect();
        LayeredDisk::new(self.base.try_clone().unwrap(), layers, false).unwrap()
    }

    fn apply(&mut self, step: &Step) {
        match *step {
            Step::Write(offset, len, byte) => {
                let data: Vec<u8> = (0..len).map(|n| byte ^ (n / 512) as u8).collect();
                self.disk.write(offset, &data).unwrap();
                self.plain[offset as usize..(offset + len) as usize].copy_from_slice(&data);
            }
            Step::Zero(offset, len) => {
                self.disk.write_zeroes(offset, len).unwrap();
                self.plain[offset as usize..(offset + len) as usize].fill(0);
            }
            Step::Discard(offset, len) => {
                self.disk.discard(offset, len).unwrap();
                let (start, stop) = LayeredDisk::split(offset, len);
                self.plain[start as usize..stop as usize].fill(0);
            }
            Step::Read(offset, len) => {
                let mut data = vec![0xaa; len as usize];
                self.disk.read(offset, &mut data).unwrap();
                assert_eq!(data, self.plain[offset as usize..(offset + len) as usize]);
            }
            Step::Push => {
                let (file, new) = layer();
                drop(new);
                self.disk.push_layer(file.try_clone().unwrap()).unwrap();
                self.files.push(file);
            }
            Step::Flush => self.disk.flush().unwrap(),
            Step::Reopen => {
                // The old one writes its map when it is dropped, before the new one looks.
                let (file, other) = layer();
                drop((file, other));
                let old = std::mem::replace(&mut self.disk, Self::new().disk);
                drop(old);
                self.disk = self.open();
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn a_layered_disk_behaves_like_plain_bytes(steps in proptest::collection::vec(step(), 1..40)) {
        let mut checked = Checked::new();
        let (_, untouched) = base();
        for step in &steps {
            checked.apply(step);
        }
        prop_assert_eq!(content(&mut checked.disk), checked.plain);
        let mut raw = vec![0; SIZE as usize];
        read_padded(&checked.base, 0, &mut raw).unwrap();
        prop_assert_eq!(raw, untouched);
    }

    #[test]
    fn children_of_one_stack_never_see_each_other(
        common in proptest::collection::vec(step(), 0..15),
        steps in proptest::collection::vec((0usize..3, step()), 1..40),
    ) {
        let mut parent = Checked::new();
        for step in &common {
            parent.apply(step);
        }
        parent.apply(&Step::Push);
        let frozen = parent.files.len() - 1;
        let mut children: Vec<Checked> = (0..3)
            .map(|_| {
                let (file, new) = layer();
                drop(new);
                let mut files: Vec<File> =
                    parent.files[..frozen].iter().map(|f| f.try_clone().unwrap()).collect();
                files.push(file);
                let mut child = Checked::new();
                child.files = files;
                child.base = parent.base.try_clone().unwrap();
                child.plain = parent.plain.clone();
                child.disk = child.open();
                child
            })
            .collect();
        for (child, step) in &steps {
            children[*child].apply(step);
        }
        for child in &mut children {
            prop_assert_eq!(content(&mut child.disk), child.plain.clone());
        }
        prop_assert_eq!(content(&mut parent.disk), parent.plain);
    }
}

#[test]
fn a_full_layer_refuses_new_blocks_and_takes_old_ones() {
    let (base, _) = base();
    let file = tempfile::tempfile().unwrap();
    let layer = Layer::create(file, SIZE, 4 * BLOCK).unwrap();
    let mut disk = LayeredDisk::new(base, vec![layer], false).unwrap();
    disk.write(0, &[1; 4 * 4096]).unwrap();
    let error = disk.write(4 * BLOCK, &[1; 512]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    disk.write(512, &[2; 4096]).unwrap();
    assert_eq!(disk.stats().refused, 1);
    disk.discard(0, BLOCK).unwrap();
    disk.write(4 * BLOCK, &[1; 512]).unwrap();
    assert_eq!(disk.stats().top_bytes, 4 * BLOCK);
}

#[test]
fn merged_layers_take_the_place_of_the_frozen_ones() {
    let (base_file, _) = base();
    let frozen = (0..3).map(|n| {
        let (_, mut layer) = layer();
        layer.write(n * BLOCK, &[n as u8 + 1; 4096]).unwrap();
        layer
    });
    let layers = frozen.chain([layer().1]).collect();
    let mut disk = LayeredDisk::new(base_file, layers, false).unwrap();
    disk.write(5 * BLOCK, &[9; 512]).unwrap();
    let before = content(&mut disk);
    let kept = disk.stack().unwrap();

    let (file, mut merged) = layer();
    for n in 0..3 {
        merged.write(n * BLOCK, &[n as u8 + 1; 4096]).unwrap();
    }
    drop(merged);
    disk.take_merged(file).unwrap();
    assert_eq!(disk.stats().layers, 2);
    assert!(content(&mut disk) == before);

    let other = tempfile::tempfile().unwrap();
    drop(Layer::create(other.try_clone().unwrap(), SIZE + 512, 0).unwrap());
    assert!(matches!(
        disk.take_merged(other),
        Err(DiskError::Mismatch { .. })
    ));
    // A checkpoint holds on to what it was made of.
    disk.rewind(&kept, layer().0).unwrap();
    assert_eq!(disk.stats().layers, 4);
}

#[test]
fn parts_that_do_not_belong_together_are_refused() {
    let (base_file, _) = base();
    let other = Layer::create(tempfile::tempfile().unwrap(), SIZE + 512, 0).unwrap();
    let small = Layer::create(tempfile::tempfile().unwrap(), 512, 0).unwrap();
    let base_copy = || base_file.try_clone().unwrap();
    assert!(matches!(
        LayeredDisk::new(base_copy(), vec![other, layer().1], false),
        Err(DiskError::Mismatch { .. })
    ));
    assert!(matches!(
        LayeredDisk::new(base_copy(), vec![small], false),
        Err(DiskError::Mismatch { .. })
    ));
    assert!(LayeredDisk::new(base_copy(), vec![], false).is_err());

    let mut disk = LayeredDisk::new(base_copy(), vec![layer().1], false).unwrap();
    let (used, mut with_data) = layer();
    with_data.write(0, &[1; 4096]).unwrap();
    drop(with_data);
    assert!(matches!(disk.push_layer(used), Err(DiskError::NotEmpty)));
    let mut read_only = LayeredDisk::new(base_copy(), vec![layer().1], true).unwrap();
    assert!(read_only.write(0, &[1; 512]).is_err());
    assert!(read_only.push_layer(layer().0).is_err());
}
