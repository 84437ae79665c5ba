//! Selects files of the context for `COPY`, `ADD` and bind mounts, and digests them.

use forkd_api::ErrorCode;
use forkd_dockerfile::{Copy, CopySource, Ignore, Pattern};
use forkd_sandboxes::error::Error;
use serde_json::{Value, json};

use crate::config::clean;
use crate::context::{Context, Node, NodeKind};
use crate::error::BuildError;

/// Links of the context that are followed.
const MAX_LINKS: usize = 40;

/// A source of the context.
#[derive(Debug, Clone)]
pub enum Source {
    File {
        name: String,
        node: Node,
    },
    /// The content of a folder, with relative names.
    Folder {
        entries: Vec<(String, Node)>,
    },
    Inline {
        name: String,
        content: String,
    },
    /// An archive that is unpacked.
    Archive {
        at: u64,
        size: u64,
        digest: [u8; 32],
    },
}

pub fn missing(line: u32, path: &str, place: &str) -> BuildError {
    let message = format!("there is no {path:.200} in {place}");
    BuildError::at(line, ErrorCode::FileNotFound, message)
}

/// Selects files of the context.
pub fn select(context: &Context, copy: &Copy, line: u32) -> Result<Vec<Source>, BuildError> {
    let exclude = Ignore::parse(&copy.exclude.join("\n"))
        .map_err(|error| BuildError::at(line, ErrorCode::DockerfileInvalid, error.problem))?;
    let mut sources = Vec::new();
    for source in &copy.sources {
        match source {
            CopySource::Inline { name, content, .. } => sources.push(Source::Inline {
                name: name.clone(),
                content: content.clone(),
            }),
            CopySource::Path(path) => {
                let before = sources.len();
                for name in matches(context, path, line)? {
                    if exclude.ignores(&name) {
                        continue;
                    }
                    sources.push(one(context, &name, copy.unpack, &exclude, line)?);
                }
                if sources.len() == before && copy.exclude.is_empty() {
                    return Err(missing(line, path, "the context"));
                }
            }
        }
    }
    Ok(sources)
}

/// Names of the context that a path or pattern stands for.
fn matches(context: &Context, path: &str, line: u32) -> Result<Vec<String>, BuildError> {
    let cleaned = clean(path);
    let cleaned = cleaned.trim_start_matches('/');
    if cleaned.is_empty() || context.get(cleaned).is_some() || !Pattern::is_pattern(cleaned) {
        return Ok(vec![cleaned.to_owned()]);
    }
    let pattern = Pattern::of_paths(cleaned).ok_or_else(|| {
        BuildError::at(
            line,
            ErrorCode::DockerfileInvalid,
            format!("{path:.200} is not a pattern"),
        )
    })?;
    Ok(context
        .names()
        .filter(|name| pattern.matches(name))
        .cloned()
        .collect())
}

fn one(
    context: &Context,
    name: &str,
    unpack: bool,
    exclude: &Ignore,
    line: u32,
) -> Result<Source, BuildError> {
    let folder = |name: &str| Source::Folder {
        entries: context
            .below(name)
            .filter(|(below, _)| !exclude.ignores(below))
            .map(|(below, node)| (below.to_owned(), node.clone()))
            .collect(),
    };
    if name.is_empty() {
        return Ok(folder(""));
    }
    let place = "the context";
    let found = followed(context, name).ok_or_else(|| missing(line, name, place))?;
    if found.is_empty() {
        return Ok(folder(""));
    }
    let node = context
        .get(&found)
        .ok_or_else(|| missing(line, name, place))?;
    Ok(match &node.kind {
        NodeKind::Folder => folder(&found),
        NodeKind::File { at, size, digest } if unpack && is_archive(context, node, line)? => {
            Source::Archive {
                at: *at,
                size: *size,
                digest: *digest,
            }
        }
        _ => Source::File {
            name: name.rsplit('/').next().unwrap_or(name).to_owned(),
            node: node.clone(),
        },
    })
}

/// Where links of the context lead, inside the context.
fn followed(context: &Context, name: &str) -> Option<String> {
    let mut name = name.to_owned();
    for _ in 0..MAX_LINKS {
        match &context.get(&name)?.kind {
            NodeKind::Link(target) => {
                let folder = name.rsplit_once('/').map_or("", |(folder, _)| folder);
                let path = match target.starts_with('/') {
                    true => clean(target),
                    false => clean(&format!("/{folder}/{target}")),
                };
                name = path.trim_start_matches('/').to_owned();
                if name.is_empty() {
                    return Some(name);
                }
            }
            _ => return Some(name),
        }
    }
    None
}

/// Whether `ADD` unpacks a file: a tar archive, plain or gzip.
fn is_archive(context: &Context, node: &Node, line: u32) -> Result<bool, BuildError> {
    let NodeKind::File { at, size, .. } = node.kind else {
        return Ok(false);
    };
    let start = context
        .start(at, size)
        .map_err(Error::io("read", "the context"))?;
    for (magic, kind) in [
        (&b"BZh"[..], "bzip2"),
        (&[0xfd, b'7', b'z', b'X', b'Z'], "xz"),
        (&[0x28, 0xb5, 0x2f, 0xfd], "zstd"),
    ] {
        if start.starts_with(magic) {
            let message = format!("ADD does not unpack {kind}: use COPY, and unpack it with RUN");
            return Err(BuildError::at(
                line,
                ErrorCode::UnsupportedInstruction,
                message,
            ));
        }
    }
    let is_tar = start.get(257..262) == Some(b"ustar");
    Ok(is_tar || start.starts_with(&[0x1f, 0x8b]))
}

/// The content of the sources, for the key. Times are left out.
pub fn digest(sources: &[Source]) -> Value {
    let node = |name: &str, node: &Node| match &node.kind {
        NodeKind::File { digest, .. } => json!([name, node.mode, hex::encode(digest)]),
        NodeKind::Folder => json!([name, node.mode]),
        NodeKind::Link(target) => json!([name, "link", target]),
    };
    sources
        .iter()
        .map(|source| match source {
            Source::File { name, node: found } => node(name, found),
            Source::Folder { entries } => {
                let mut hasher = blake3::Hasher::new();
                for (name, found) in entries {
                    hasher.update(node(name, found).to_string().as_bytes());
                }
                json!(["folder", hasher.finalize().to_hex().as_str()])
            }
            Source::Inline { name, content } => json!(["inline", name, content]),
            Source::Archive { digest, .. } => json!(["archive", hex::encode(digest)]),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::tests::context;

    fn copy(line: &str) -> Copy {
        let file = forkd_dockerfile::parse(&format!("FROM a\n{line}\n")).unwrap();
        match &file.stages[0].instructions[0].kind {
            forkd_dockerfile::Kind::Copy(copy) => copy.clone(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_digest_is_that_of_names_modes_and_contents() {
        let of = |files: &[(&str, &str)], line: &str| {
            digest(&select(&context(files), &copy(line), 1).unwrap())
        };
        let first = of(&[("a", "1"), ("b", "2")], "COPY . /x/");
        assert_eq!(first, of(&[("b", "2"), ("a", "1")], "COPY . /x/"));
        assert_ne!(first, of(&[("a", "1"), ("b", "3")], "COPY . /x/"));
        assert_ne!(first, of(&[("a", "1"), ("c", "2")], "COPY . /x/"));
        let one = of(&[("a", "1"), ("b", "2")], "COPY a /x/");
        assert_eq!(one, of(&[("a", "1"), ("b", "changed")], "COPY a /x/"));
    }
}
