//! Recipes: declarative descriptions of images.
//!
//! `recipe.toml` is parsed into [`Recipe`] and checked completely; unknown fields are errors.
//! [`Recipe::fingerprint`] covers everything that affects the result, and is part of the cache key.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use forkd_types::{MiB, Tag};
use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use forkd_formats::image::{Interpreter, Variant, Warmup};

use crate::debian::SUITE;

pub const SCHEMA: u32 = 1;
pub const FILE: &str = "recipe.toml";

/// The recipes that are compiled into the program.
const BUILT_IN: [(&str, &str); 2] = [
    (
        "python-numpy",
        include_str!("../../../../recipes/python-numpy/recipe.toml"),
    ),
    (
        "machine",
        include_str!("../../../../recipes/machine/recipe.toml"),
    ),
];

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
    #[error("{} has format {found}; this version reads format {SCHEMA}", path.display())]
    Schema { path: PathBuf, found: u32 },
    #[error("the recipe {name} does not start from Debian's packages")]
    NotDebian { name: String },
    #[error("{}: {field} {problem}", path.display())]
    Value {
        path: PathBuf,
        field: String,
        problem: String,
    },
}

/// `recipe.toml` as written by the user, before the checks.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RecipeFile {
    #[serde(rename = "schema")]
    _schema: u32,
    name: String,
    #[serde(default)]
    description: String,
    base: BaseTable,
    #[serde(default)]
    packages: Vec<String>,
    #[serde(default)]
    files: Vec<FileTable>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    disk_mib: u32,
    memory_mib: u32,
    vcpus: u8,
    warmup: Option<WarmupTable>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct BaseTable {
    debian: String,
    #[serde(default)]
    variant: Variant,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileTable {
    path: String,
    content: Option<String>,
    source: Option<String>,
    #[serde(default = "default_mode")]
    mode: u32,
}

fn default_mode() -> u32 {
    0o644
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WarmupTable {
    interpreter: Interpreter,
    #[serde(default)]
    imports: Vec<String>,
    #[serde(default)]
    code: String,
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

/// The files that an image starts from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Base {
    /// Packages of Debian.
    Debian { suite: String, variant: Variant },
    /// A container image.
    Oci { oci: String },
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
    pub warmup: Option<Warmup>,
}

impl Recipe {
    /// Finds a recipe by the path of its folder or file, or by the name of a built-in recipe.
    pub fn find(name: &str) -> Result<Self, RecipeError> {
        let path = Path::new(name);
        let folder_file = path.join(FILE);
        if folder_file.is_file() {
            return Self::load(&folder_file);
        }
        if path.is_file() {
            return Self::load(path);
        }
        Self::built_in(name)
    }

    /// A built-in recipe by its name.
    pub fn built_in(name: &str) -> Result<Self, RecipeError> {
        let (name, text) = BUILT_IN
            .iter()
            .find(|(known, _)| *known == name)
            .ok_or_else(|| RecipeError::Unknown {
                name: name.to_owned(),
            })?;
        Self::parse(text, &Path::new(name).join(FILE))
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
        Self {
            name,
            description: format!("the container image {image}"),
            base: Base::Oci {
                oci: image.to_owned(),
            },
            packages: Vec::new(),
            files: Vec::new(),
            env: BTreeMap::new(),
            disk,
            memory: MiB(512),
            vcpus: 1,
            warmup: None,
        }
    }

    /// The names of the built-in recipes.
    pub fn built_in_names() -> impl Iterator<Item = &'static str> {
        BUILT_IN.iter().map(|(name, _)| *name)
    }

    fn load(path: &Path) -> Result<Self, RecipeError> {
        let text = std::fs::read_to_string(path).map_err(|source| RecipeError::Read {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(&text, path)
    }

    /// Parses a recipe. `path` is its origin: files that the recipe names lie beside it.
    pub fn parse(text: &str, path: &Path) -> Result<Self, RecipeError> {
        let syntax = |source| RecipeError::Syntax {
            path: path.to_owned(),
            source: Box::new(source),
        };
        #[derive(Deserialize)]
        struct Version {
            schema: u32,
        }
        let version: Version = toml::from_str(text).map_err(syntax)?;
        if version.schema != SCHEMA {
            return Err(RecipeError::Schema {
                path: path.to_owned(),
                found: version.schema,
            });
        }
        let file: RecipeFile = toml::from_str(text).map_err(syntax)?;
        Checker { path }.check(file)
    }

    /// Everything that affects the result, as bytes.
    pub fn fingerprint(&self) -> Vec<u8> {
        serde_json::json!(self).to_string().into_bytes()
    }
}

struct Checker<'a> {
    path: &'a Path,
}

impl Checker<'_> {
    fn wrong(&self, field: impl Into<String>, problem: impl Into<String>) -> RecipeError {
        RecipeError::Value {
            path: self.path.to_owned(),
            field: field.into(),
            problem: problem.into(),
        }
    }

    fn check(&self, file: RecipeFile) -> Result<Recipe, RecipeError> {
        let name = file
            .name
            .parse()
            .map_err(|error| self.wrong("name", format!("is not a name: {error}")))?;
        if file.base.debian != SUITE {
            let problem = format!("is {:?}, and {SUITE:?} is the one known", file.base.debian);
            return Err(self.wrong("base.debian", problem));
        }
        let mut packages = file.packages;
        packages.sort();
        packages.dedup();
        if let Some(bad) = packages.iter().find(|name| !is_package(name)) {
            return Err(self.wrong(
                "packages",
                format!("has {bad:?}, which no package is called"),
            ));
        }
        for (name, value) in &file.env {
            self.check_env(name, value)?;
        }
        let files = file.files.into_iter().map(|file| self.added(file));
        Ok(Recipe {
            name,
            description: file.description,
            base: Base::Debian {
                suite: file.base.debian,
                variant: file.base.variant,
            },
            packages,
            files: files.collect::<Result<_, _>>()?,
            env: file.env,
            disk: MiB(self.between("disk_mib", file.disk_mib, 64, 1 << 22)?),
            memory: MiB(self.between("memory_mib", file.memory_mib, 64, 1 << 22)?),
            vcpus: self.between("vcpus", file.vcpus.into(), 1, 32)? as u8,
            warmup: file.warmup.map(|table| Warmup {
                interpreter: table.interpreter,
                imports: table.imports,
                code: table.code,
            }),
        })
    }

    fn between(&self, field: &str, value: u32, low: u32, high: u32) -> Result<u32, RecipeError> {
        if (low..=high).contains(&value) {
            Ok(value)
        } else {
            Err(self.wrong(field, format!("is {value}, and has to be {low} to {high}")))
        }
    }

    fn check_env(&self, name: &str, value: &str) -> Result<(), RecipeError> {
        let valid = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
        if !valid {
            return Err(self.wrong(
                "env",
                format!("has {name:?}, which is not a variable's name"),
            ));
        }
        if value.contains(['\n', '\0']) {
            return Err(self.wrong(format!("env.{name}"), "has more than one line"));
        }
        Ok(())
    }

    fn added(&self, file: FileTable) -> Result<AddedFile, RecipeError> {
        let field = format!("files: {:?}", file.path);
        let inside = file.path.strip_prefix('/').filter(|path| is_plain(path));
        let Some(inside) = inside else {
            return Err(self.wrong(field, "is not an absolute path without . and .."));
        };
        if file.mode > 0o7777 {
            return Err(self.wrong(field, format!("has mode {:#o}", file.mode)));
        }
        let content = match (file.content, file.source) {
            (Some(content), None) => content.into_bytes(),
            (None, Some(source)) if is_plain(&source) => {
                let path = self.path.parent().unwrap_or(Path::new(".")).join(source);
                std::fs::read(&path).map_err(|source| RecipeError::Read { path, source })?
            }
            (None, Some(_)) => {
                return Err(self.wrong(field, "has a source outside of the recipe's folder"));
            }
            _ => return Err(self.wrong(field, "needs either content or source")),
        };
        Ok(AddedFile {
            path: inside.to_owned(),
            content,
            mode: file.mode as u16,
        })
    }
}

/// Whether a path is relative and consists of ordinary names.
fn is_plain(path: &str) -> bool {
    path.split('/')
        .all(|part| !matches!(part, "" | "." | "..") && !part.contains('\0'))
}

fn is_package(name: &str) -> bool {
    name.len() >= 2
        && name.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
        && name
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"+-.".contains(&b))
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    const SMALL: &str = "schema = 1\nname = \"small\"\ndisk_mib = 256\nmemory_mib = 128\nvcpus = 1\n\
        packages = [\"git\", \"bash\", \"git\"]\n[base]\ndebian = \"trixie\"\n";

    fn parse(text: &str) -> Result<Recipe, RecipeError> {
        Recipe::parse(text, Path::new("small/recipe.toml"))
    }

    fn message(text: &str) -> String {
        let error = parse(text).unwrap_err();
        match error.source() {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        }
    }

    #[test]
    fn the_built_in_recipes_parse() {
        for name in Recipe::built_in_names() {
            assert_eq!(Recipe::built_in(name).unwrap().name.as_str(), name);
        }
        let recipe = Recipe::built_in("python-numpy").unwrap();
        assert!(recipe.packages.contains(&"python3-numpy".to_owned()));
        assert_eq!(recipe.warmup.unwrap().interpreter, Interpreter::Python);
    }

    #[test]
    fn a_small_recipe_has_defaults() {
        let recipe = parse(SMALL).unwrap();
        assert_eq!(recipe.packages, ["bash", "git"]);
        let (suite, variant) = ("trixie".to_owned(), Variant::Minbase);
        assert_eq!(recipe.base, Base::Debian { suite, variant });
        assert_eq!(recipe.warmup, None);
    }

    #[test]
    fn a_misspelt_field_is_named_with_its_line() {
        let text = message(&SMALL.replace("vcpus = 1", "vcpu = 1"));
        assert!(text.contains("small/recipe.toml is not a recipe"), "{text}");
        assert!(text.contains("line 5") && text.contains("vcpu"), "{text}");
    }

    #[test]
    fn other_formats_are_refused_before_anything_else_is_read() {
        let text = message("schema = 9\nsomething = \"new\"\n");
        assert_eq!(
            text,
            "small/recipe.toml has format 9; this version reads format 1"
        );
    }

    #[test]
    fn values_that_make_no_sense_are_named() {
        for (from, to, expected) in [
            ("256", "7", "disk_mib is 7, and has to be 64 to 4194304"),
            ("vcpus = 1", "vcpus = 40", "vcpus is 40"),
            ("\"git\"", "\"git; rm\"", "packages has \"git; rm\""),
            ("trixie", "woody", "base.debian is \"woody\""),
            ("\"small\"", "\"a/b\"", "name is not a name"),
        ] {
            let text = message(&SMALL.replacen(from, to, 1));
            assert!(text.contains(expected), "{text}");
        }
        let text = message(&format!("{SMALL}[env]\n\"A B\" = \"x\"\n"));
        assert!(
            text.contains("\"A B\", which is not a variable's name"),
            "{text}"
        );
        let text = message(&format!("{SMALL}[env]\nA = \"x\\ny\"\n"));
        assert!(text.contains("env.A has more than one line"), "{text}");
    }

    #[test]
    fn files_stay_inside() {
        let with = |table: &str| message(&format!("{SMALL}[[files]]\n{table}\n"));
        for path in ["etc/x", "/", "/../etc/x", "/a//b", "/a/./b"] {
            let text = with(&format!("path = \"{path}\"\ncontent = \"\""));
            assert!(text.contains("is not an absolute path"), "{path}: {text}");
        }
        assert!(with("path = \"/a\"").contains("needs either content or source"));
        assert!(with("path = \"/a\"\nsource = \"../x\"").contains("outside"));
        assert!(with("path = \"/a\"\nsource = \"gone\"").contains("small/gone"));
    }

    #[test]
    fn an_added_file_changes_the_fingerprint() {
        let with = |content: &str| {
            let text = format!("{SMALL}[[files]]\npath = \"/a\"\ncontent = \"{content}\"\n");
            parse(&text).unwrap().fingerprint()
        };
        assert_ne!(with("one"), with("two"));
        assert_eq!(with("one"), with("one"));
    }

    #[test]
    fn an_unknown_name_is_said() {
        assert!(matches!(
            Recipe::find("no-such-recipe"),
            Err(RecipeError::Unknown { .. })
        ));
    }
}
