//! A load that detects if memory and disk are not from the same moment.
//!
//! The load counts. The number stands in two pages of memory and in a file, as a chain of checksums. Every
//! round compares both pages and the end of the file.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use anyhow::{Context, ensure};
use sha2::{Digest, Sha256};

use crate::guest_half::GuestHalf;

pub const GUEST_HALF: GuestHalf = GuestHalf { name: "load", run };

const PAGE: usize = 4096;

/// The guest part. Runs until a check fails.
pub fn run(args: &[String]) -> anyhow::Result<()> {
    let path = args.first().context("a path is wanted")?;
    let mut file = OpenOptions::new()
        .create(true)
        .truncate(true)
        .read(true)
        .write(true)
        .open(path)?;
    let mut pages = vec![0u64; 2 * PAGE / 8];
    let mut link = String::new();
    let mut length = 0;
    loop {
        let (left, right) = (pages[0], pages[PAGE / 8]);
        ensure!(left == right, "the pages say {left} and {right}");
        check_end(&file, length, left, &link)?;
        let number = left + 1;
        link = next_link(&link, number);
        let line = format!("{number} {link}\n");
        file.write_all(line.as_bytes())?;
        file.sync_data()?;
        length += line.len() as u64;
        pages[0] = std::hint::black_box(number);
        pages[PAGE / 8] = std::hint::black_box(number);
        // Leave CPU time to others. A cut can still come at any point of a round.
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The file ends with exactly the number in memory.
fn check_end(file: &File, length: u64, number: u64, link: &str) -> anyhow::Result<()> {
    let found = file.metadata()?.len();
    ensure!(found == length, "the file has {found} bytes, not {length}");
    if number == 0 {
        return Ok(());
    }
    let wanted = format!("{number} {link}\n");
    let mut last = vec![0; wanted.len()];
    file.read_exact_at(&mut last, length - wanted.len() as u64)?;
    ensure!(
        last == wanted.as_bytes(),
        "the file ends with {:?}, not with {wanted:?}",
        String::from_utf8_lossy(&last)
    );
    Ok(())
}

fn next_link(link: &str, number: u64) -> String {
    let digest = Sha256::digest(format!("{link} {number}"));
    hex::encode(&digest[..8])
}

/// Checks a whole chain and returns its last number.
pub fn check_chain(text: &str) -> anyhow::Result<u64> {
    let mut link = String::new();
    let mut last = 0;
    // The last line may be incomplete at a cut.
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    for line in whole.lines() {
        let (number, found) = line.split_once(' ').context("a line without a link")?;
        last += 1;
        ensure!(number == last.to_string(), "{number} follows {}", last - 1);
        link = next_link(&link, last);
        ensure!(found == link, "the chain breaks at {number}");
    }
    Ok(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_chain_is_noticed() {
        let first = next_link("", 1);
        let second = next_link(&first, 2);
        let good = format!("1 {first}\n2 {second}\n3 ab");
        assert_eq!(check_chain(&good).unwrap(), 2);
        assert!(check_chain(&format!("1 {first}\n2 {first}\n")).is_err());
        assert!(check_chain(&format!("1 {first}\n3 {second}\n")).is_err());
    }
}
