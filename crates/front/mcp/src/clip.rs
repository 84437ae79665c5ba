//! Output that is too long for a model: its beginning and its end are kept.

use std::collections::VecDeque;

/// The most of one output that an answer holds, in bytes.
pub const LIMIT: usize = 32 << 10;
/// The part of it that is the beginning.
const HEAD: usize = 8 << 10;
/// The part of it that is the end.
const TAIL: usize = LIMIT - HEAD;

/// Collects an output of any length in bounded memory.
#[derive(Debug, Default)]
pub struct Clip {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    total: u64,
}

impl Clip {
    /// Takes the next bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        let room = HEAD.saturating_sub(self.head.len()).min(bytes.len());
        let (first, rest) = bytes.split_at(room);
        self.head.extend_from_slice(first);
        let skipped = rest.len().saturating_sub(TAIL);
        self.tail.extend(&rest[skipped..]);
        let surplus = self.tail.len().saturating_sub(TAIL);
        self.tail.drain(..surplus);
    }

    /// Whether bytes in the middle were left out.
    pub fn is_clipped(&self) -> bool {
        self.total > (self.head.len() + self.tail.len()) as u64
    }

    /// The text, with a line that counts the bytes left out. Bytes that are not UTF-8 are replaced.
    pub fn text(mut self) -> String {
        let kept = (self.head.len() + self.tail.len()) as u64;
        if self.total > kept {
            let note = format!("\n[… {} bytes left out …]\n", self.total - kept);
            let head = String::from_utf8_lossy(&self.head).into_owned();
            return head + &note + &String::from_utf8_lossy(self.tail.make_contiguous());
        }
        // In one piece, so that a character on the border stays whole.
        self.head.extend(self.tail);
        String::from_utf8_lossy(&self.head).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_output_is_kept_whole() {
        let mut clip = Clip::default();
        let text = "é".repeat(LIMIT / 2);
        for chunk in text.as_bytes().chunks(7) {
            clip.push(chunk);
        }
        assert!(!clip.is_clipped());
        assert_eq!(clip.text(), text);
    }

    #[test]
    fn long_output_keeps_its_beginning_and_its_end() {
        for chunk in [1, 1000, 1 << 20] {
            let mut clip = Clip::default();
            let bytes: Vec<u8> = (0..200_000).map(|at| b'a' + (at % 26) as u8).collect();
            for part in bytes.chunks(chunk) {
                clip.push(part);
            }
            assert!(clip.is_clipped());
            let text = clip.text();
            assert!(text.len() < LIMIT + 64, "{}", text.len());
            assert!(text.contains(&format!("{} bytes left out", 200_000 - LIMIT)));
            assert_eq!(&text.as_bytes()[..HEAD], &bytes[..HEAD]);
            assert_eq!(
                &text.as_bytes()[text.len() - TAIL..],
                &bytes[bytes.len() - TAIL..]
            );
        }
    }
}
