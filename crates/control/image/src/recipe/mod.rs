//! Recipes: declarative descriptions of images.
//!
//! `recipe.toml` is read in two steps: [`file`] is the text as types, for each schema; [`check`] turns it into a
//! [`Recipe`], in which every value is valid. Unknown fields are errors, and an error names the line and the field.
//! A recipe may come from a stranger: its text and everything in it is bounded, and it names files of its own folder
//! only. [`Recipe::fingerprint`] covers everything that affects the result, and is part of the cache key.

mod built_in;
mod check;
mod file;
mod folder;
mod line;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use forkd_types::{MiB, Tag};
use serde::Serialize;
use thiserror::Error;

pub use forkd_formats::image::{Interpreter, Variant, Warmup};
pub use forkd_formats::prepare::{Preparation, WarmupStep};

use check::Checker;
use file::RecipeFile;
pub use folder::Folder;

/// The schema that new recipes have. Schema 1 is still read.
pub const SCHEMA: u32 = 2;
pub const FILE: &str = "recipe.toml";
/// The largest text of a recipe.
pub const MAX_TEXT: usize = 1 << 20;
/// How many recipes may lie below one another.
const MAX_DEPTH: usize = 8;

/// Why a recipe is rejected.
#[derive(Debug, Error)]
pub enum RecipeError {
    #[error("there is no recipe {name:?}")]
    Unknown { name: String },
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{} is not a recipe", path.display())]
    Syntax {
        path: PathBuf,
        #[source]
        source: Box<toml::de::Error>,
    },
    #[error("{} is longer than {MAX_TEXT} bytes", path.display())]
    TooLong { path: PathBuf },
    #[error("{} has schema {found}; this version reads schemas 1 and {SCHEMA}", path.display())]
    Schema { path: PathBuf, found: u32 },
    #[error("the recipe {name} does not start from Debian's packages")]
    NotDebian { name: String },
    #[error("{}:{line}: {field} {problem}", path.display())]
    Value {
        path: PathBuf,
        line: usize,
        field: String,
        problem: String,
    },
    #[error("{} starts from recipes that are more than {MAX_DEPTH} deep", path.display())]
    TooDeep { path: PathBuf },
}

/// A file that the recipe adds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AddedFile {
    /// Path in the image, without the leading slash.
    pub path: String,
    #[serde(serialize_with = "as_digest")]
    pub content: Vec<u8>,
    pub mode: u16,
}

fn as_digest<S: serde::Serializer>(content: &[u8], out: S) -> Result<S::Ok, S::Error> {
    crate::digest::of_bytes(content).serialize(out)
}

/// The files that an image starts from. A recipe that starts from another recipe has the base of that one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Base {
    /// Packages of Debian.
    Debian { suite: String, variant: Variant },
    /// A container image.
    Oci { oci: String },
}

/// Packages of Python or Node.js that a lock file names, each with its digest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Lock {
    pub kind: LockKind,
    /// The text of the lock file.
    pub text: String,
    /// Version of the language in the guest; Python only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// The folder in the image for the packages, without the leading slash.
    pub path: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LockKind {
    Python,
    Node,
}

/// A user that the recipe adds; programs of the guest run as this user by default.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AddedUser {
    pub name: String,
    pub uid: u32,
}

/// A checked recipe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Recipe {
    pub name: Tag,
    pub description: String,
    /// The files before anything of the recipe is added.
    #[serde(flatten)]
    pub base: Base,
    /// Packages beyond the base, sorted, without duplicates.
    pub packages: Vec<String>,
    /// Files beyond the packages.
    pub files: Vec<AddedFile>,
    /// Environment of every process in the guest.
    pub env: BTreeMap<String, String>,
    pub disk: MiB,
    /// Default guest memory.
    pub memory: MiB,
    /// Default number of vCPUs.
    pub vcpus: u8,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub locks: Vec<Lock>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<AddedUser>,
    #[serde(skip_serializing_if = "Preparation::is_empty")]
    pub prepare: Preparation,
}

impl Recipe {
    /// Finds a recipe by the path of its folder or file, or by the name of a built-in recipe.
    pub fn find(name: &str) -> Result<Self, RecipeError> {
        let path = Path::new(name);
        let folder_file = path.join(FILE);
        if folder_file.is_file() {
            return Self::load(&folder_file, 0);
        }
        if path.is_file() {
            return Self::load(path, 0);
        }
        Self::built_in(name)
    }

    /// A built-in recipe by its name, or by the name that it had in earlier versions.
    pub fn built_in(name: &str) -> Result<Self, RecipeError> {
        Self::built_in_at(name, 0)
    }

    fn built_in_at(name: &str, depth: usize) -> Result<Self, RecipeError> {
        let found = built_in::find(name).ok_or_else(|| RecipeError::Unknown {
            name: name.to_owned(),
        })?;
        let path = Path::new(found.name).join(FILE);
        Self::parse_in(found.text, &path, &Folder::BuiltIn(found.files), depth)
    }

    /// The release and variant of Debian that the recipe starts from.
    pub fn debian(&self) -> Result<(&str, Variant), RecipeError> {
        match &self.base {
            Base::Debian { suite, variant } => Ok((suite, *variant)),
            Base::Oci { .. } => Err(RecipeError::NotDebian {
                name: self.name.to_string(),
            }),
        }
    }

    /// The recipe of a container image: the image as it is.
    pub fn of_image(name: Tag, image: &str, disk: MiB) -> Self {
        let description = format!("the container image {image}");
        let base = Base::Oci {
            oci: image.to_owned(),
        };
        Self::new(name, description, base, disk)
    }

    /// A recipe that adds nothing to its base.
    fn new(name: Tag, description: String, base: Base, disk: MiB) -> Self {
        Self {
            name,
            description,
            base,
            packages: Vec::new(),
            files: Vec::new(),
            env: BTreeMap::new(),
            disk,
            memory: MiB(512),
            vcpus: 1,
            locks: Vec::new(),
            user: None,
            prepare: Preparation::default(),
        }
    }

    /// The names of the built-in recipes.
    pub fn built_in_names() -> impl Iterator<Item = &'static str> {
        built_in::ALL.iter().map(|one| one.name)
    }

    fn load(path: &Path, depth: usize) -> Result<Self, RecipeError> {
        let read = |source| RecipeError::Read {
            path: path.to_owned(),
            source,
        };
        let text = folder::read_file(path, MAX_TEXT as u64 + 1).map_err(read)?;
        let text = String::from_utf8(text)
            .map_err(|error| read(std::io::Error::new(std::io::ErrorKind::InvalidData, error)))?;
        let folder = match path.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        Self::parse_in(&text, path, &Folder::Host(folder), depth)
    }

    /// Parses a recipe whose other files lie in `folder`. `path` is its origin, for messages.
    pub fn parse(text: &str, path: &Path, folder: &Folder<'_>) -> Result<Self, RecipeError> {
        Self::parse_in(text, path, folder, 0)
    }

    fn parse_in(
        text: &str,
        path: &Path,
        folder: &Folder<'_>,
        depth: usize,
    ) -> Result<Self, RecipeError> {
        if depth > MAX_DEPTH {
            return Err(RecipeError::TooDeep {
                path: path.to_owned(),
            });
        }
        let file = RecipeFile::parse(text, path)?;
        let checker = Checker { text, path, folder };
        let below = match checker.below(&file)? {
            Some(name) => Some(Self::find_below(&name, folder, depth + 1)?),
            None => None,
        };
        checker.check(file, below)
    }

    /// The recipe that another one starts from: a folder beside it, or a built-in recipe.
    fn find_below(name: &str, folder: &Folder<'_>, depth: usize) -> Result<Self, RecipeError> {
        if let Folder::Host(folder) = folder {
            let beside = folder.join(name).join(FILE);
            if beside.is_file() {
                return Self::load(&beside, depth);
            }
        }
        Self::built_in_at(name, depth)
    }

    /// Everything that affects the result, as bytes.
    pub fn fingerprint(&self) -> Vec<u8> {
        let mut parts = serde_json::json!(self);
        // Schema 1 had this field: a recipe that has no preparation keeps its image in the cache.
        if let Some(parts) = parts.as_object_mut() {
            parts.insert("warmup".to_owned(), serde_json::Value::Null);
        }
        parts.to_string().into_bytes()
    }
}
