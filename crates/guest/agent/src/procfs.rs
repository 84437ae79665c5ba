//! Numbers from the kernel's text files.

use std::fs;

use forkd_guest_proto::MemoryMetrics;

/// The one number in a file.
pub fn number<T: std::str::FromStr>(path: &str) -> Option<T> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Reads the memory of the guest.
pub fn memory() -> MemoryMetrics {
    parse_memory(&fs::read_to_string("/proc/meminfo").unwrap_or_default())
}

fn parse_memory(text: &str) -> MemoryMetrics {
    let mut memory = MemoryMetrics::default();
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        let (Some(name), Some(value)) = (words.next(), words.next()) else {
            continue;
        };
        let Ok(value) = value.parse() else { continue };
        match name {
            "MemTotal:" => memory.total_kib = value,
            "MemFree:" => memory.free_kib = value,
            "MemAvailable:" => memory.available_kib = value,
            "Cached:" => memory.cached_kib = value,
            "SwapTotal:" => memory.swap_total_kib = value,
            "SwapFree:" => memory.swap_free_kib = value,
            _ => {}
        }
    }
    memory
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read() {
        let text = "MemTotal:  100 kB\nMemFree: 50 kB\nMemAvailable: 70 kB\nJunk\nSwapFree: x kB\n";
        let memory = parse_memory(text);
        assert_eq!(
            (memory.total_kib, memory.free_kib, memory.available_kib),
            (100, 50, 70)
        );
        assert!(super::memory().total_kib > 0);
    }
}
