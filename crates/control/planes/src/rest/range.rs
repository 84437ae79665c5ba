//! The `Range` header of a read.

use axum::http::HeaderValue;

/// One range of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteRange {
    pub first: u64,
    /// The last byte, if the range has an end.
    pub last: Option<u64>,
}

/// Reads `bytes=FIRST-LAST` and `bytes=FIRST-`. Any other form is ignored, as HTTP allows.
pub fn parse(header: &str) -> Option<ByteRange> {
    let (first, last) = header.strip_prefix("bytes=")?.split_once('-')?;
    let first = first.parse().ok()?;
    let last = match last {
        "" => None,
        last => Some(last.parse().ok().filter(|last| *last >= first)?),
    };
    Some(ByteRange { first, last })
}

impl ByteRange {
    /// How many bytes it covers, if it has an end.
    pub fn len(self) -> Option<u64> {
        self.last.map(|last| (last - self.first).saturating_add(1))
    }

    /// The `Content-Range` of the answer; none if the file ends before the range begins.
    pub fn describe(self, size: u64) -> Option<HeaderValue> {
        let end = size.checked_sub(1).filter(|end| self.first <= *end)?;
        let last = self.last.map_or(end, |last| last.min(end));
        format!("bytes {}-{last}/{size}", self.first).parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_or_ignored() {
        let range = parse("bytes=2-5").unwrap();
        assert_eq!(
            (range.len(), range.describe(4).unwrap().to_str().unwrap()),
            (Some(4), "bytes 2-3/4")
        );
        assert_eq!(parse("bytes=7-").unwrap().len(), None);
        assert_eq!(range.describe(2), None);
        for ignored in ["bytes=-5", "bytes=5-2", "bytes=1-2,4-5", "lines=1-2", ""] {
            assert_eq!(parse(ignored), None, "{ignored}");
        }
    }
}
