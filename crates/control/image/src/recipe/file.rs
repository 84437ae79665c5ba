//! `recipe.toml` as written by the user, before the checks. Schema 1 becomes the form of schema 2.

use std::collections::BTreeMap;
use std::path::Path;

use forkd_formats::image::{Interpreter, Variant};
use forkd_formats::prepare::{Check, Command, Ready, Restart, Service, Settle};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::{MAX_TEXT, RecipeError, SCHEMA};

/// A recipe of schema 2.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecipeFile {
    pub schema: u32,
    pub name: String,
    #[serde(default)]
    pub description: String,
    pub base: BaseTable,
    pub python: Option<PythonTable>,
    pub node: Option<NodeTable>,
    pub user: Option<UserTable>,
    #[serde(default)]
    pub machine: MachineTable,
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    #[serde(default)]
    pub files: Vec<FileTable>,
    #[serde(default)]
    pub run: Vec<Command>,
    #[serde(default)]
    pub service: Vec<ServiceTable>,
    #[serde(default)]
    pub warmup: Vec<WarmupTable>,
    pub settle: Option<Settle>,
    #[serde(default)]
    pub on_fork: Vec<HookTable>,
    pub check: Option<Check>,
}

/// One of `debian`, `oci` and `recipe`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BaseTable {
    pub debian: Option<String>,
    pub variant: Option<Variant>,
    #[serde(default)]
    pub packages: Vec<String>,
    pub oci: Option<String>,
    pub recipe: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PythonTable {
    pub lock: String,
    pub version: Option<String>,
    pub path: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeTable {
    pub lock: String,
    pub path: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UserTable {
    pub name: String,
    pub uid: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineTable {
    pub disk_mib: Option<u32>,
    pub memory_mib: Option<u32>,
    pub vcpus: Option<u8>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileTable {
    pub path: String,
    pub content: Option<String>,
    pub source: Option<String>,
    #[serde(default = "default_mode")]
    pub mode: u32,
}

fn default_mode() -> u32 {
    0o644
}

/// A service without readiness is ready when its process runs.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServiceTable {
    pub name: String,
    pub exec: Vec<String>,
    pub user: Option<String>,
    pub cwd: Option<String>,
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    #[serde(default)]
    pub restart: Restart,
    #[serde(default)]
    pub ready: Vec<Ready>,
    pub timeout_secs: Option<u32>,
}

impl ServiceTable {
    pub fn into_service(self, timeout_secs: u32) -> Service {
        Service {
            name: self.name,
            exec: self.exec,
            user: self.user,
            cwd: self.cwd,
            env: self.env,
            restart: self.restart,
            ready: self.ready,
            timeout_secs,
        }
    }
}

/// Either an interpreter or a command.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WarmupTable {
    pub interpreter: Option<Interpreter>,
    #[serde(default)]
    pub imports: Vec<String>,
    #[serde(default)]
    pub code: String,
    pub exec: Option<Vec<String>>,
    pub user: Option<String>,
    pub cwd: Option<String>,
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    pub timeout_secs: Option<u32>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HookTable {
    pub name: String,
    pub script: String,
}

/// A recipe of schema 1.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FirstFile {
    schema: u32,
    name: String,
    #[serde(default)]
    description: String,
    base: FirstBase,
    #[serde(default)]
    packages: Vec<String>,
    #[serde(default)]
    files: Vec<FileTable>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    disk_mib: u32,
    memory_mib: u32,
    vcpus: u8,
    warmup: Option<FirstWarmup>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FirstBase {
    debian: String,
    variant: Option<Variant>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FirstWarmup {
    interpreter: Interpreter,
    #[serde(default)]
    imports: Vec<String>,
    #[serde(default)]
    code: String,
}

impl From<FirstFile> for RecipeFile {
    fn from(file: FirstFile) -> Self {
        let warmup = file.warmup.map(|table| WarmupTable {
            interpreter: Some(table.interpreter),
            imports: table.imports,
            code: table.code,
            ..WarmupTable::default()
        });
        Self {
            schema: file.schema,
            name: file.name,
            description: file.description,
            base: BaseTable {
                debian: Some(file.base.debian),
                variant: file.base.variant,
                packages: file.packages,
                ..BaseTable::default()
            },
            python: None,
            node: None,
            user: None,
            machine: MachineTable {
                disk_mib: Some(file.disk_mib),
                memory_mib: Some(file.memory_mib),
                vcpus: Some(file.vcpus),
            },
            env: file.env,
            files: file.files,
            run: Vec::new(),
            service: Vec::new(),
            warmup: warmup.into_iter().collect(),
            settle: None,
            on_fork: Vec::new(),
            check: None,
        }
    }
}

impl RecipeFile {
    /// Reads the text. The schema is looked at before anything else.
    pub fn parse(text: &str, path: &Path) -> Result<Self, RecipeError> {
        #[derive(Deserialize)]
        struct Version {
            schema: u32,
        }
        if text.len() > MAX_TEXT {
            return Err(RecipeError::TooLong {
                path: path.to_owned(),
            });
        }
        let version: Version = read(text, path)?;
        match version.schema {
            1 => Ok(read::<FirstFile>(text, path)?.into()),
            SCHEMA => read(text, path),
            found => Err(RecipeError::Schema {
                path: path.to_owned(),
                found,
            }),
        }
    }
}

fn read<T: DeserializeOwned>(text: &str, path: &Path) -> Result<T, RecipeError> {
    toml::from_str(text).map_err(|source| RecipeError::Syntax {
        path: path.to_owned(),
        source: Box::new(source),
    })
}
