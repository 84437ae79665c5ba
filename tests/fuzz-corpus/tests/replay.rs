//! Runs every saved input of every fuzz target, so that a fixed fault stays fixed.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use forkd_fuzz_targets::{TARGETS, run};

fn fuzz_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz")
}

#[test]
fn saved_inputs_run_through() {
    for (name, _) in TARGETS {
        let dir = fuzz_dir().join("corpus").join(name);
        let mut count = 0;
        for entry in fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display())) {
            let path = entry.unwrap().path();
            println!("{}", path.display());
            assert!(run(name, &fs::read(&path).unwrap()));
            count += 1;
        }
        assert!(count > 0, "{name} has no saved input");
    }
}

#[test]
fn every_target_has_a_program_and_the_other_way_round() {
    let programs: BTreeSet<String> = fs::read_dir(fuzz_dir().join("fuzz_targets"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| path.file_stem().unwrap().to_string_lossy().into_owned())
        .collect();
    let targets: BTreeSet<String> = TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(programs, targets);
}

#[test]
fn bytes_without_meaning_run_through() {
    let mut seed = 1u32;
    let mut noise = move || {
        seed ^= seed << 13;
        seed ^= seed >> 17;
        seed ^= seed << 5;
        seed as u8
    };
    for (_, target) in TARGETS {
        for len in [0, 1, 7, 64, 300, 2000] {
            let data: Vec<u8> = (0..len).map(|_| noise()).collect();
            target(&data);
        }
    }
}
