//! `forkd parent build`: writes the disk of an image to a file, with `forkd-image` on this host.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, anyhow};

use super::beside::beside;
use crate::args::{ParentArgs, ParentCommand};
use crate::error::{CliError, CliResult, Exit};
use crate::ui::Ui;

/// Runs `forkd parent`.
pub fn run(args: &ParentArgs, ui: &Ui) -> CliResult {
    let ParentCommand::Build {
        image,
        output,
        size_mib,
        extra,
        json,
    } = &args.command;
    let this = std::env::current_exe().context("this program does not know its own path")?;
    let program = beside(&this, "forkd-image")?;
    let output = output
        .clone()
        .unwrap_or_else(|| PathBuf::from(format!("{}.ext4", slug(image))));
    // The folder of a recipe that adds packages. It exists as long as the build.
    let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
    let what = if extra.is_empty() {
        image.clone()
    } else {
        let recipe = with_packages(image, extra)?;
        let path = folder.path().join("recipe.toml");
        std::fs::write(&path, recipe)
            .with_context(|| format!("cannot write {}", path.display()))?;
        folder.path().display().to_string()
    };
    let mut command = Command::new(&program);
    command.args(["build", &what, "--out"]).arg(&output);
    if let Some(size) = size_mib {
        command.args(["--disk-mib", &size.to_string()]);
    }
    if *json {
        command.arg("--json");
    }
    let made = command
        .stdin(Stdio::inherit())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {}", program.display()))?;
    if !made.status.success() {
        return Err(CliError::from(anyhow!("the disk of {image} was not built")));
    }
    ui.line(String::from_utf8_lossy(&made.stdout).trim_end())?;
    if !json {
        ui.aside(format_args!(
            "boot it with `forkd snapshot --tag NAME --rootfs {}`",
            output.display()
        ));
    }
    Ok(Exit::OK)
}

/// A file name from the name of an image.
fn slug(image: &str) -> String {
    let last = image.trim_end_matches('/');
    let last = Path::new(last)
        .file_name()
        .map_or(last.into(), |name| name.to_string_lossy());
    last.chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() || "._-".contains(c) {
                c
            } else {
                '-'
            }
        })
        .collect()
}

/// A recipe that adds packages to another one.
fn with_packages(image: &str, extra: &[String]) -> Result<String, CliError> {
    let plain = image
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
    if !plain {
        return Err(
            CliError::from(anyhow!("--extra adds packages to a recipe, and {image} is not the name of one"))
                .with_hint("add packages to a container image with a Dockerfile: FROM IMAGE, RUN apt-get install …"),
        );
    }
    let packages: Vec<String> = extra.iter().map(|name| format!("{name:?}")).collect();
    Ok(format!(
        "schema = 2\nname = \"{image}\"\n[base]\nrecipe = \"{image}\"\npackages = [{}]\n",
        packages.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_named_after_its_image() {
        assert_eq!(slug("registry.example/team/python:3-slim"), "python-3-slim");
        assert_eq!(slug("recipes/postgres/"), "postgres");
        assert_eq!(slug("tar:x.tar"), "tar-x.tar");
    }

    #[test]
    fn packages_are_added_to_recipes_only() {
        let text = with_packages("python-numpy", &["jq".into()]).unwrap();
        assert!(text.contains("recipe = \"python-numpy\"\npackages = [\"jq\"]"));
        assert!(with_packages("python:3", &["jq".into()]).is_err());
        // A quote stays inside its string: the name is refused as a package later.
        assert!(
            with_packages("a", &["x\"]".into()])
                .unwrap()
                .contains("[\"x\\\"]\"]")
        );
    }
}
