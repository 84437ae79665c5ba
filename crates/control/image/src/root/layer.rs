//! Applies one layer of a container image to a [`Tree`].
//!
//! Names that begin with `.wh.` hide what lower layers have. They are looked at before anything of the layer itself is
//! added, so the order inside a layer does not matter. A folder on the way may be a symbolic link of a lower layer: it
//! is followed inside the tree.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use forkd_oci::limits;
use tar::{Archive, Entry, EntryType};
use thiserror::Error;

use super::tar::{self as plain, Problem};
use super::tree::{Content, Tree, normalise};

/// The prefix of names that hide a name.
const WHITEOUT: &str = ".wh.";
/// The name that hides everything a lower layer has in its folder.
const OPAQUE: &str = ".wh..wh..opq";
/// The prefix of names that other tools keep for themselves.
const RESERVED: &str = ".wh..wh.";
/// Sparse files that Python's and newer GNU tar's form describe in extended headers.
const PAX_SPARSE: &str = "GNU.sparse.";

/// Why a layer cannot be applied.
#[derive(Debug, Error)]
pub enum LayerError {
    #[error("layer {number} is not a layer of a root file system")]
    Entry {
        number: usize,
        #[source]
        source: Problem,
    },
    #[error(
        "layer {number} has an entry too many: an image has at most {} of them",
        limits::ENTRIES
    )]
    Entries { number: usize },
    #[error("layer {number}: the name {name:?}… is too long or too deep")]
    Name { number: usize, name: String },
    #[error("layer {number}: {name} is a sparse file in a form that is not read")]
    Sparse { number: usize, name: String },
}

/// Adds layers to a tree, from the lowest.
pub struct Layers<'a> {
    tree: &'a mut Tree,
    /// Where the content of sparse files is written out.
    work: &'a Path,
    entries: u64,
    number: usize,
}

impl<'a> Layers<'a> {
    pub fn new(tree: &'a mut Tree, work: &'a Path) -> Self {
        Self {
            tree,
            work,
            entries: 0,
            number: 0,
        }
    }

    /// Adds the next layer, a plain archive.
    pub fn add(&mut self, file: File) -> Result<(), LayerError> {
        self.number += 1;
        let file = Arc::new(file);
        self.each(&file, |layers, entry| layers.hide(&entry))?;
        self.each(&file, |layers, entry| layers.put(&file, entry))
    }

    fn each(
        &mut self,
        file: &File,
        mut visit: impl FnMut(&mut Self, Entry<'_, &File>) -> Result<(), LayerError>,
    ) -> Result<(), LayerError> {
        let number = self.number;
        let failed = move |source: io::Error| LayerError::Entry {
            number,
            source: source.into(),
        };
        io::Seek::rewind(&mut &*file).map_err(failed)?;
        let mut archive = Archive::new(file);
        for entry in archive.entries_with_seek().map_err(failed)? {
            visit(self, entry.map_err(failed)?)?;
        }
        Ok(())
    }

    fn problem(&self) -> impl FnOnce(Problem) -> LayerError + use<> {
        let number = self.number;
        move |source| LayerError::Entry { number, source }
    }

    /// The name of an entry, as a path in the tree.
    fn name(&self, entry: &Entry<'_, &File>) -> Result<String, LayerError> {
        let bytes = entry.path_bytes();
        let name = plain::text(&bytes).map_err(self.problem())?;
        if name.len() > limits::PATH || name.split('/').count() > limits::DEPTH {
            return Err(LayerError::Name {
                number: self.number,
                name: name.chars().take(100).collect(),
            });
        }
        // `normalise` refuses `..`, also where it would stay inside.
        let name = normalise(&name).map_err(|error| self.problem()(error.into()))?;
        self.tree
            .through_links(&name)
            .map_err(|error| self.problem()(error.into()))
    }

    /// Removes what the entry hides, if it is a whiteout.
    fn hide(&mut self, entry: &Entry<'_, &File>) -> Result<(), LayerError> {
        self.entries += 1;
        if self.entries > limits::ENTRIES {
            return Err(LayerError::Entries {
                number: self.number,
            });
        }
        let path = self.name(entry)?;
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", &path));
        if name == OPAQUE {
            self.tree.clear(folder);
        } else if let Some(hidden) = name.strip_prefix(WHITEOUT)
            && !name.starts_with(RESERVED)
            && !hidden.is_empty()
        {
            let hidden = if folder.is_empty() {
                hidden.to_owned()
            } else {
                format!("{folder}/{hidden}")
            };
            self.tree.remove(&hidden);
        }
        Ok(())
    }

    fn put(&mut self, file: &Arc<File>, mut entry: Entry<'_, &File>) -> Result<(), LayerError> {
        let path = self.name(&entry)?;
        if path.split('/').any(|part| part.starts_with(WHITEOUT)) {
            return Ok(());
        }
        if is_pax_sparse(&mut entry).map_err(|error| self.problem()(error.into()))? {
            return Err(LayerError::Sparse {
                number: self.number,
                name: path,
            });
        }
        let content = if entry.header().entry_type() == EntryType::GNUSparse {
            let content = self.written_out(&mut entry);
            Some(content.map_err(|error| self.problem()(error.into()))?)
        } else {
            None
        };
        plain::put(self.tree, file, &path, entry, content).map_err(self.problem())
    }

    /// The content of a sparse file, in a file of its own whose holes are holes.
    fn written_out(&self, entry: &mut Entry<'_, &File>) -> io::Result<Content> {
        let length = entry
            .header()
            .as_gnu()
            .map_or(Ok(0), |gnu| gnu.real_size())?;
        if length > limits::UNPACKED {
            return Err(io::Error::new(
                io::ErrorKind::FileTooLarge,
                format!(
                    "a sparse file has {length} bytes, at most {} are allowed",
                    limits::UNPACKED
                ),
            ));
        }
        let out = tempfile::tempfile_in(self.work)?;
        out.set_len(length)?;
        let mut buffer = vec![0; 64 << 10];
        let mut at = 0;
        loop {
            let read = entry.read(&mut buffer)?;
            let Some(bytes) = buffer.get(..read).filter(|bytes| !bytes.is_empty()) else {
                break;
            };
            if bytes.iter().any(|byte| *byte != 0) {
                std::os::unix::fs::FileExt::write_all_at(&out, bytes, at)?;
            }
            at += read as u64;
        }
        Ok(Content::Part {
            file: Arc::new(out),
            offset: 0,
            length,
        })
    }
}

fn is_pax_sparse(entry: &mut Entry<'_, &File>) -> io::Result<bool> {
    let Some(extensions) = entry.pax_extensions()? else {
        return Ok(false);
    };
    for extension in extensions {
        let extension = extension?;
        if extension.key().is_ok_and(|key| key.starts_with(PAX_SPARSE)) {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::root::tree::{Node, TreeError};
    use ::tar::{Builder, Header};
    use std::io::Write;

    enum Put<'a> {
        Folder(&'a str),
        File(&'a str, &'a str),
        Symlink(&'a str, &'a str),
        Link(&'a str, &'a str),
    }
    use Put::{File as F, Folder as D, Link as H, Symlink as S};

    fn layer(entries: &[Put<'_>]) -> File {
        let mut tar = Builder::new(Vec::new());
        let header = |kind, size| {
            let mut header = Header::new_gnu();
            header.set_entry_type(kind);
            header.set_size(size);
            header.set_mode(0o644);
            header.set_mtime(1);
            header.set_uid(0);
            header.set_gid(0);
            header
        };
        for entry in entries {
            match entry {
                D(path) => tar.append_data(&mut header(EntryType::Directory, 0), path, &b""[..]),
                F(path, text) => {
                    let mut header = header(EntryType::Regular, text.len() as u64);
                    tar.append_data(&mut header, path, text.as_bytes())
                }
                S(path, to) => tar.append_link(&mut header(EntryType::Symlink, 0), path, to),
                H(path, to) => tar.append_link(&mut header(EntryType::Link, 0), path, to),
            }
            .unwrap();
        }
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&tar.into_inner().unwrap()).unwrap();
        file
    }

    fn apply(layers: &[&[Put<'_>]]) -> Result<Tree, LayerError> {
        let work = tempfile::tempdir().unwrap();
        let mut tree = Tree::default();
        let mut adding = Layers::new(&mut tree, work.path());
        for entries in layers {
            adding.add(layer(entries))?;
        }
        Ok(tree)
    }

    fn names(tree: &Tree) -> Vec<&str> {
        tree.iter().map(|(path, _)| path).skip(1).collect()
    }

    #[test]
    fn a_whiteout_hides_the_lower_file_only_whatever_the_order() {
        let lower: &[Put<'_>] = &[F("a/x", "old"), F("a/y", "old"), F("b", "b")];
        for upper in [
            [F("a/x", "new"), F("a/.wh.x", "")],
            [F("a/.wh.x", ""), F("a/x", "new")],
        ] {
            let tree = apply(&[lower, &upper]).unwrap();
            assert_eq!(tree.read("a/x").unwrap(), b"new");
            assert_eq!(names(&tree), ["a", "a/x", "a/y", "b"]);
        }
        let tree = apply(&[lower, &[F(".wh.a", ""), F(".wh.gone", "")]]).unwrap();
        assert_eq!(names(&tree), ["b"]);
    }

    #[test]
    fn an_opaque_folder_keeps_what_its_own_layer_has() {
        let tree = apply(&[
            &[F("a/x", "old"), F("a/d/z", "old")],
            &[
                F("a/new", "n"),
                F("a/.wh..wh..opq", ""),
                F("a/.wh..wh.plnk", ""),
            ],
        ])
        .unwrap();
        assert_eq!(names(&tree), ["a", "a/new"]);
    }

    #[test]
    fn a_folder_that_is_a_link_of_a_lower_layer_is_followed_inside() {
        let tree = apply(&[
            &[
                D("usr/lib"),
                S("lib", "usr/lib"),
                S("abs", "/usr/./lib"),
                S("up", "../../usr"),
            ],
            &[F("lib/x", "1"), F("abs/y", "2"), F("up/z", "3")],
        ])
        .unwrap();
        assert_eq!(tree.read("usr/lib/x").unwrap(), b"1");
        assert_eq!(tree.read("usr/lib/y").unwrap(), b"2");
        assert_eq!(tree.read("usr/z").unwrap(), b"3");
        assert!(matches!(tree.get("lib"), Some(Node::Symlink(..))));
    }

    #[test]
    fn links_in_a_circle_and_files_on_the_way_are_errors() {
        let circle = apply(&[&[S("a", "b"), S("b", "a")], &[F("a/x", "")]]);
        assert!(matches!(
            circle,
            Err(LayerError::Entry {
                number: 2,
                source: Problem::Tree(TreeError::LinkLoop { .. })
            })
        ));
        let file = apply(&[&[F("a", "")], &[F("a/x", "")]]);
        assert!(matches!(
            file,
            Err(LayerError::Entry {
                number: 2,
                source: Problem::Tree(TreeError::NotAFolder { .. })
            })
        ));
    }

    #[test]
    fn a_folder_over_a_link_replaces_it() {
        let tree = apply(&[&[D("usr"), S("lib", "usr")], &[D("lib"), F("lib/x", "1")]]).unwrap();
        assert!(matches!(tree.get("lib"), Some(Node::Directory(_))));
        assert_eq!(names(&tree), ["lib", "lib/x", "usr"]);
    }

    #[test]
    fn a_hard_link_of_a_lower_layer_is_shared_until_one_side_is_replaced() {
        let tree = apply(&[&[F("a", "1")], &[H("b", "a")], &[F("a", "2")]]).unwrap();
        assert_eq!(tree.read("a").unwrap(), b"2");
        assert_eq!(tree.read("b").unwrap(), b"1");
    }

    #[test]
    fn names_that_are_too_deep_are_refused() {
        let deep = "d/".repeat(limits::DEPTH) + "x";
        assert!(matches!(
            apply(&[&[F(&deep, "")]]),
            Err(LayerError::Name { .. })
        ));
    }
}
