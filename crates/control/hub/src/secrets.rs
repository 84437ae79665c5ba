//! Keys and tokens in pages, found before they are shared.
//!
//! The patterns are those of widely used services and of PEM files. A pattern counts only with a body of the right
//! length and alphabet: the words alone are in every copy of a cryptographic library.

use std::collections::BTreeMap;

use aho_corasick::AhoCorasick;

use crate::limits::PAGE;
use crate::manifest::Role;

/// Bytes of one chunk that are looked at again with the next: the longest match.
const OVERLAP: usize = 256;

/// A kind of secret, where it lies, and how often.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    pub kind: &'static str,
    pub role: Role,
    pub count: u64,
    /// Number of the first page in its file.
    pub first_page: u64,
}

/// A prefix, and the body that must follow.
struct Pattern {
    kind: &'static str,
    prefix: &'static str,
    /// Fewest bytes of the body.
    least: usize,
    body: fn(u8) -> bool,
}

fn word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
}

fn upper(byte: u8) -> bool {
    byte.is_ascii_uppercase() || byte.is_ascii_digit()
}

fn url(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_'
}

fn base64(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'=' | b'\n' | b'\r')
}

const PATTERNS: &[Pattern] = &[
    Pattern {
        kind: "private key",
        prefix: "-----BEGIN PRIVATE KEY-----\n",
        least: 64,
        body: base64,
    },
    Pattern {
        kind: "private key",
        prefix: "-----BEGIN RSA PRIVATE KEY-----\n",
        least: 64,
        body: base64,
    },
    Pattern {
        kind: "private key",
        prefix: "-----BEGIN EC PRIVATE KEY-----\n",
        least: 64,
        body: base64,
    },
    Pattern {
        kind: "OpenSSH private key",
        prefix: "-----BEGIN OPENSSH PRIVATE KEY-----\n",
        least: 64,
        body: base64,
    },
    Pattern {
        kind: "AWS access key",
        prefix: "AKIA",
        least: 16,
        body: upper,
    },
    Pattern {
        kind: "GitHub token",
        prefix: "ghp_",
        least: 36,
        body: word,
    },
    Pattern {
        kind: "GitHub token",
        prefix: "gho_",
        least: 36,
        body: word,
    },
    Pattern {
        kind: "GitHub token",
        prefix: "ghs_",
        least: 36,
        body: word,
    },
    Pattern {
        kind: "GitHub token",
        prefix: "github_pat_",
        least: 60,
        body: url,
    },
    Pattern {
        kind: "GitLab token",
        prefix: "glpat-",
        least: 20,
        body: url,
    },
    Pattern {
        kind: "Slack token",
        prefix: "xoxb-",
        least: 24,
        body: url,
    },
    Pattern {
        kind: "Slack token",
        prefix: "xoxp-",
        least: 24,
        body: url,
    },
    Pattern {
        kind: "API key (sk-)",
        prefix: "sk-proj-",
        least: 40,
        body: url,
    },
    Pattern {
        kind: "API key (sk-)",
        prefix: "sk-ant-",
        least: 40,
        body: url,
    },
    Pattern {
        kind: "Google API key",
        prefix: "AIzaSy",
        least: 33,
        body: url,
    },
    Pattern {
        kind: "Stripe key",
        prefix: "sk_live_",
        least: 24,
        body: word,
    },
];

/// Looks at the chunks of files in order.
pub struct Scanner {
    prefixes: Option<AhoCorasick>,
    role: Role,
    /// The end of the previous chunk, and the page behind it.
    tail: Vec<u8>,
    next_page: u64,
    found: BTreeMap<(&'static str, &'static str), Found>,
}

impl Default for Scanner {
    fn default() -> Self {
        Self {
            prefixes: AhoCorasick::new(PATTERNS.iter().map(|pattern| pattern.prefix)).ok(),
            role: Role::Disk,
            tail: Vec::new(),
            next_page: 0,
            found: BTreeMap::new(),
        }
    }
}

impl Scanner {
    /// The chunks of another file follow.
    pub fn begin(&mut self, role: Role) {
        self.role = role;
        self.tail.clear();
        self.next_page = u64::MAX;
    }

    /// Looks at a chunk. A secret that crosses into the next chunk is found there.
    pub fn feed(&mut self, first: u64, chunk: &[u8]) {
        if first != self.next_page {
            self.tail.clear();
        }
        let held = self.tail.len();
        if held > 0 {
            let mut joint = std::mem::take(&mut self.tail);
            joint.extend_from_slice(chunk.get(..OVERLAP.min(chunk.len())).unwrap_or_default());
            self.scan(first.saturating_sub(1), &joint, held);
        }
        self.scan(first, chunk, chunk.len().saturating_sub(OVERLAP));
        let kept = chunk.len().saturating_sub(OVERLAP);
        self.tail
            .extend_from_slice(chunk.get(kept..).unwrap_or_default());
        self.next_page = first + (chunk.len() / PAGE) as u64;
    }

    /// The end of the last chunk, and everything that was found.
    pub fn finish(mut self) -> Vec<Found> {
        let tail = std::mem::take(&mut self.tail);
        let page = self.next_page.saturating_sub(1);
        self.scan(page, &tail, tail.len());
        self.found.into_values().collect()
    }

    /// Counts secrets that begin before `end`.
    fn scan(&mut self, page: u64, bytes: &[u8], end: usize) {
        let Some(prefixes) = &self.prefixes else {
            return;
        };
        for hit in prefixes.find_iter(bytes) {
            if hit.start() >= end {
                break;
            }
            let Some(pattern) = PATTERNS.get(hit.pattern().as_usize()) else {
                continue;
            };
            let body = bytes.get(hit.end()..).unwrap_or_default();
            let length = body
                .iter()
                .take_while(|byte| (pattern.body)(**byte))
                .count();
            let before = hit.start().checked_sub(1).and_then(|at| bytes.get(at));
            if length < pattern.least || before.is_some_and(|byte| word(*byte)) {
                continue;
            }
            let key = (pattern.kind, self.role.as_str());
            let found = self.found.entry(key).or_insert(Found {
                kind: pattern.kind,
                role: self.role,
                count: 0,
                first_page: page + (hit.start() / PAGE) as u64,
            });
            found.count += 1;
        }
    }
}

/// The findings in one line, without the secrets themselves.
pub fn describe(found: &[Found]) -> String {
    let text: Vec<String> = found
        .iter()
        .map(|found| {
            format!(
                "{} × {} in the {} (page {})",
                found.count,
                found.kind,
                found.role.as_str(),
                found.first_page
            )
        })
        .collect();
    text.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(chunks: &[&[u8]]) -> Vec<Found> {
        let mut scanner = Scanner::default();
        scanner.begin(Role::Memory);
        let mut page = 0;
        for chunk in chunks {
            scanner.feed(page, chunk);
            page += (chunk.len() / PAGE) as u64;
        }
        scanner.finish()
    }

    fn page_with(at: usize, text: &str) -> Vec<u8> {
        let mut page = vec![b' '; PAGE];
        page[at..at + text.len()].copy_from_slice(text.as_bytes());
        page
    }

    #[test]
    fn keys_and_tokens_are_found_once_wherever_they_lie() {
        let token = format!("ghp_{}", "a1".repeat(18));
        for at in [0, 100, PAGE - 300, PAGE - token.len()] {
            let found = scan(&[&page_with(at, &token), &vec![b' '; PAGE]]);
            assert_eq!(found.len(), 1, "{at}");
            assert_eq!((found[0].kind, found[0].count), ("GitHub token", 1));
        }
        let mut both = vec![b' '; 2 * PAGE];
        both[PAGE - 10..PAGE - 10 + token.len()].copy_from_slice(token.as_bytes());
        let found = scan(&[&both[..PAGE], &both[PAGE..]]);
        assert_eq!(found[0].count, 1);
        let key = format!("-----BEGIN RSA PRIVATE KEY-----\n{}", "A".repeat(80));
        assert_eq!(scan(&[&page_with(7, &key)])[0].kind, "private key");
    }

    #[test]
    fn words_of_a_library_are_not_secrets() {
        for text in [
            "-----BEGIN RSA PRIVATE KEY-----\0-----END RSA PRIVATE KEY-----",
            "AKIA is a prefix",
            "ghp_short",
            "XAKIAABCDEFGHIJKLMNOP",
        ] {
            assert!(scan(&[&page_with(10, text)]).is_empty(), "{text}");
        }
    }
}
