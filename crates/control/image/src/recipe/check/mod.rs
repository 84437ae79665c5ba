//! From the text of a recipe to a [`Recipe`]: every value is checked, and everything is bounded.

mod prepare;

use std::collections::BTreeMap;
use std::path::Path;

use forkd_formats::image::Variant;
use forkd_types::{MiB, Tag};

use super::file::{BaseTable, FileTable, HookTable, NodeTable, PythonTable, RecipeFile, UserTable};
use super::folder::Folder;
use super::{AddedFile, AddedUser, Base, Lock, LockKind, Recipe, RecipeError, line};
use crate::debian::SUITE;

/// Entries of a list in a recipe.
const MAX_ENTRIES: usize = 1024;
const MAX_HOOKS: usize = 32;
/// The release of Python in [`SUITE`].
const PYTHON: &str = "3.13";
const NODE_MODULES: &str = "/usr/local/lib/node_modules";
/// Programs in this folder run in every child before it is ready.
const HOOKS: &str = "etc/forkd/on-fork.d";

/// Turns a file into a recipe. `text` is for the lines in messages.
pub struct Checker<'a> {
    pub text: &'a str,
    pub path: &'a Path,
    pub folder: &'a Folder<'a>,
}

type Checked<T> = Result<T, RecipeError>;

impl Checker<'_> {
    fn wrong(&self, field: impl Into<String>, problem: impl Into<String>) -> RecipeError {
        let field = field.into();
        RecipeError::Value {
            path: self.path.to_owned(),
            line: line::of(self.text, &field),
            field,
            problem: problem.into(),
        }
    }

    /// Where a field of schema 2 was in the schema of this file.
    fn field(&self, file: &RecipeFile, name: &'static str) -> &'static str {
        match (file.schema, name) {
            (1, "machine.disk_mib") => "disk_mib",
            (1, "machine.memory_mib") => "memory_mib",
            (1, "machine.vcpus") => "vcpus",
            (1, "base.packages") => "packages",
            _ => name,
        }
    }

    /// The name of the recipe that this one starts from.
    pub fn below(&self, file: &RecipeFile) -> Checked<Option<String>> {
        let Some(name) = &file.base.recipe else {
            return Ok(None);
        };
        if is_plain(name) {
            return Ok(Some(name.clone()));
        }
        Err(self.wrong("base.recipe", "is not the name of a recipe"))
    }

    /// Checks a file. `below` is the recipe that it starts from.
    pub fn check(&self, file: RecipeFile, below: Option<Recipe>) -> Checked<Recipe> {
        let name: Tag = file
            .name
            .parse()
            .map_err(|error| self.wrong("name", format!("is not a name: {error}")))?;
        let packages_field = self.field(&file, "base.packages");
        let packages = self.packages(&file.base.packages, packages_field)?;
        let mut recipe = self.start(&file, below, name)?;
        recipe.description.clone_from(&file.description);
        self.machine(&file, &mut recipe)?;
        recipe.packages.extend(packages);
        recipe.packages.sort();
        recipe.packages.dedup();
        if !recipe.packages.is_empty() && !matches!(recipe.base, Base::Debian { .. }) {
            return Err(self.wrong(
                packages_field,
                "needs base.debian: a container image has no packages of Debian to add",
            ));
        }
        for (name, value) in &file.env {
            self.variable("env", name, value)?;
        }
        recipe.env.extend(file.env);
        self.bounded("files", file.files.len(), MAX_ENTRIES)?;
        for (at, table) in file.files.into_iter().enumerate() {
            recipe
                .files
                .push(self.added(table, &format!("files[{at}]"))?);
        }
        if let Some(table) = file.python {
            recipe.locks.push(self.python(table)?);
        }
        if let Some(table) = file.node {
            recipe.locks.push(self.node(table, &mut recipe.env)?);
        }
        if let Some(table) = file.user {
            recipe.user = Some(self.user(table)?);
        }
        self.bounded("on_fork", file.on_fork.len(), MAX_HOOKS)?;
        for (at, table) in file.on_fork.into_iter().enumerate() {
            let hook = self.hook(table, recipe.files.len(), &format!("on_fork[{at}]"))?;
            recipe.files.push(hook);
        }
        self.prepare(
            &mut recipe.prepare,
            file.run,
            file.service,
            file.warmup,
            file.settle,
            file.check,
        )?;
        Ok(recipe)
    }

    /// The recipe before anything of this file is added.
    fn start(&self, file: &RecipeFile, below: Option<Recipe>, name: Tag) -> Checked<Recipe> {
        if let Some(below) = below {
            self.one_base(&file.base)?;
            return Ok(Recipe { name, ..below });
        }
        let base = self.base(&file.base)?;
        let disk = file.machine.disk_mib;
        let field = self.field(file, "machine.disk_mib");
        let disk = disk.ok_or_else(|| self.wrong(field, "is missing"))?;
        Ok(Recipe::new(name, String::new(), base, MiB(disk)))
    }

    fn one_base(&self, base: &BaseTable) -> Checked<()> {
        let named = [&base.debian, &base.oci, &base.recipe];
        let count = named.iter().filter(|one| one.is_some()).count();
        if count != 1 {
            return Err(self.wrong("base", "needs exactly one of debian, oci and recipe"));
        }
        if base.variant.is_some() && base.debian.is_none() {
            return Err(self.wrong("base.variant", "is a variant of base.debian"));
        }
        Ok(())
    }

    fn base(&self, base: &BaseTable) -> Checked<Base> {
        self.one_base(base)?;
        if let Some(oci) = &base.oci {
            let visible = oci.bytes().all(|byte| byte.is_ascii_graphic());
            if !visible || oci.is_empty() || oci.len() > 1024 || oci == "-" {
                return Err(self.wrong("base.oci", "is not the name of a container image"));
            }
            // A name without a digest means another image tomorrow.
            let local = ["oci:", "oci-archive:", "docker-archive:", "tar:", "dir:"];
            let pinned = oci.contains("@sha256:") || local.iter().any(|kind| oci.starts_with(kind));
            if !pinned {
                return Err(self.wrong("base.oci", "needs a digest: NAME@sha256:…"));
            }
            return Ok(Base::Oci { oci: oci.clone() });
        }
        let suite = base.debian.clone().unwrap_or_default();
        if suite != SUITE {
            let problem = format!("is {suite:?}, and {SUITE:?} is the one known");
            return Err(self.wrong("base.debian", problem));
        }
        let variant: Variant = base.variant.unwrap_or_default();
        Ok(Base::Debian { suite, variant })
    }

    fn machine(&self, file: &RecipeFile, recipe: &mut Recipe) -> Checked<()> {
        let wish = &file.machine;
        let between = |name, value: u32, low, high| {
            let field = self.field(file, name);
            self.between(field, value, low, high)
        };
        if let Some(disk) = wish.disk_mib {
            recipe.disk = MiB(between("machine.disk_mib", disk, 64, 1 << 22)?);
        }
        if let Some(memory) = wish.memory_mib {
            recipe.memory = MiB(between("machine.memory_mib", memory, 64, 1 << 22)?);
        }
        if let Some(vcpus) = wish.vcpus {
            recipe.vcpus = between("machine.vcpus", vcpus.into(), 1, 32)? as u8;
        }
        Ok(())
    }

    fn between(&self, field: &str, value: u32, low: u32, high: u32) -> Checked<u32> {
        if (low..=high).contains(&value) {
            Ok(value)
        } else {
            Err(self.wrong(field, format!("is {value}, and has to be {low} to {high}")))
        }
    }

    fn bounded(&self, field: &str, count: usize, limit: usize) -> Checked<()> {
        if count <= limit {
            return Ok(());
        }
        Err(self.wrong(
            field,
            format!("has {count} entries, and {limit} are allowed"),
        ))
    }

    fn packages(&self, names: &[String], field: &str) -> Checked<Vec<String>> {
        self.bounded(field, names.len(), MAX_ENTRIES)?;
        if let Some(at) = names.iter().position(|name| !is_package(name)) {
            let bad: String = names
                .get(at)
                .into_iter()
                .flat_map(|name| name.chars())
                .take(80)
                .collect();
            return Err(self.wrong(
                format!("{field}[{at}]"),
                format!("is {bad:?}, which no package is called"),
            ));
        }
        Ok(names.to_vec())
    }

    fn variable(&self, field: &str, name: &str, value: &str) -> Checked<()> {
        let valid = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
        if !valid {
            let shown: String = name.chars().take(80).collect();
            return Err(self.wrong(
                field,
                format!("has {shown:?}, which is not a variable's name"),
            ));
        }
        if value.contains(['\n', '\0']) {
            return Err(self.wrong(format!("{field}.{name}"), "has more than one line"));
        }
        Ok(())
    }

    /// A path in the image, without its leading slash.
    fn inside<'p>(&self, path: &'p str, field: &str) -> Checked<&'p str> {
        let inside = path.strip_prefix('/').filter(|path| is_plain(path));
        inside
            .filter(|path| path.len() <= 4096)
            .ok_or_else(|| self.wrong(field, "is not an absolute path without . and .."))
    }

    /// Reads a file beside the recipe.
    fn read(&self, name: &str, field: &str) -> Checked<Vec<u8>> {
        if !is_plain(name) {
            return Err(self.wrong(field, "is not a file in the folder of the recipe"));
        }
        self.folder.read(name).map_err(|source| RecipeError::Read {
            path: self.path.with_file_name(name),
            source,
        })
    }

    fn added(&self, file: FileTable, field: &str) -> Checked<AddedFile> {
        let path = self
            .inside(&file.path, &format!("{field}.path"))?
            .to_owned();
        if file.mode > 0o7777 {
            return Err(self.wrong(format!("{field}.mode"), format!("is {:#o}", file.mode)));
        }
        let content = match (file.content, file.source) {
            (Some(content), None) => content.into_bytes(),
            (None, Some(source)) => self.read(&source, &format!("{field}.source"))?,
            _ => return Err(self.wrong(field, "needs either content or source")),
        };
        Ok(AddedFile {
            path,
            content,
            mode: file.mode as u16,
        })
    }

    fn hook(&self, hook: HookTable, number: usize, field: &str) -> Checked<AddedFile> {
        if !is_name(&hook.name) {
            return Err(self.wrong(format!("{field}.name"), "is not a name"));
        }
        if !hook.script.starts_with("#!") {
            return Err(self.wrong(format!("{field}.script"), "does not begin with #!"));
        }
        Ok(AddedFile {
            // Hooks run in the order of their names.
            path: format!("{HOOKS}/{number:04}-{}", hook.name),
            content: hook.script.into_bytes(),
            mode: 0o755,
        })
    }

    fn lock(&self, name: &str, field: &str) -> Checked<String> {
        String::from_utf8(self.read(name, field)?)
            .map_err(|_| self.wrong(field, "is not a text file"))
    }

    fn python(&self, table: PythonTable) -> Checked<Lock> {
        let text = self.lock(&table.lock, "python.lock")?;
        if let Err(problem) = crate::lock::check_requirements(&text) {
            return Err(self.wrong("python.lock", problem));
        }
        let version = table.version.unwrap_or_else(|| PYTHON.to_owned());
        let two = version.split_once('.').is_some_and(|(major, minor)| {
            let number = |text: &str| text.len() < 4 && text.parse::<u16>().is_ok();
            number(major) && number(minor)
        });
        if !two {
            return Err(self.wrong("python.version", "is not a version such as 3.13"));
        }
        let path = table
            .path
            .unwrap_or_else(|| format!("/usr/local/lib/python{version}/dist-packages"));
        Ok(Lock {
            kind: LockKind::Python,
            text,
            path: self.inside(&path, "python.path")?.to_owned(),
            version: Some(version),
        })
    }

    fn node(&self, table: NodeTable, env: &mut BTreeMap<String, String>) -> Checked<Lock> {
        let text = self.lock(&table.lock, "node.lock")?;
        if let Err(problem) = crate::lock::check_package_lock(&text) {
            return Err(self.wrong("node.lock", problem));
        }
        let path = table.path.unwrap_or_else(|| NODE_MODULES.to_owned());
        let inside = self.inside(&path, "node.path")?.to_owned();
        env.entry("NODE_PATH".to_owned()).or_insert(path);
        Ok(Lock {
            kind: LockKind::Node,
            text,
            version: None,
            path: inside,
        })
    }

    fn user(&self, table: UserTable) -> Checked<AddedUser> {
        if !is_name(&table.name) || table.name.len() > 32 {
            return Err(self.wrong("user.name", "is not the name of a user"));
        }
        let uid = table.uid.unwrap_or(1000);
        Ok(AddedUser {
            uid: self.between("user.uid", uid, 1, 60_000)?,
            name: table.name,
        })
    }
}

/// Whether a path is relative and consists of ordinary names.
fn is_plain(path: &str) -> bool {
    path.split('/')
        .all(|part| !matches!(part, "" | "." | "..") && !part.contains('\0') && part.len() < 256)
}

fn is_name(name: &str) -> bool {
    (1..=64).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_lowercase() || c == '_')
        && name
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-_".contains(&b))
}

fn is_package(name: &str) -> bool {
    (2..=128).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
        && name
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"+-.".contains(&b))
}
