//! `forkd mcp install`: finds the configuration file of a client and changes the entry of forkd in it.
//!
//! The file is replaced by an atomic rename, and its former content stays beside it as `FILE.forkd-backup`. A file that
//! cannot be parsed is not touched.

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};

use super::config::{self, Entry, Format};
use crate::args::{DaemonArgs, McpClient, McpInstallArgs, ToolArgs};
use crate::daemon::variable;
use crate::error::{CliError, CliResult, Exit};
use crate::ui::Ui;

/// The largest configuration file that is read, in bytes.
const MAX_FILE: u64 = 64 << 20;

/// Runs `forkd mcp install`.
pub fn run(args: &McpInstallArgs, tools: &ToolArgs, daemon: &DaemonArgs, ui: &Ui) -> CliResult {
    let file = match &args.config {
        Some(file) => file.clone(),
        None => default_file(args.client)?,
    };
    // A symbolic link stays one: its target is replaced.
    let file = std::fs::canonicalize(&file).unwrap_or(file);
    let format = format(args.client);
    let old = read(&file)?;
    let text = old.as_deref().unwrap_or_default();
    let shown = file.display();
    let new = if args.remove {
        config::without(format, text, &args.name)
    } else {
        config::with(format, text, &args.name, &entry(tools, daemon)?)
    };
    let new = new.map_err(|error| {
        CliError::from(anyhow!(error).context(format!("{shown} is not changed")))
            .with_hint("correct the file, or name another one with --config")
    })?;
    let Some(new) = new else {
        ui.line(format_args!("{shown} needs no change"))?;
        return Ok(Exit::OK);
    };
    if args.dry_run {
        ui.talk(format_args!("{shown} would be:"));
        ui.raw(new.as_bytes())?;
        return Ok(Exit::OK);
    }
    replace(&file, old.as_deref(), &new)
        .with_context(|| format!("{shown} cannot be written"))
        .map_err(CliError::from)?;
    let done = if args.remove {
        "removed from"
    } else {
        "added to"
    };
    ui.line(format_args!("{} {done} {shown}", args.name))?;
    if daemon.daemon_token.is_some() && !args.remove {
        ui.aside("the token is in the file: keep it private");
    }
    ui.aside("restart the client to make it read the file");
    Ok(Exit::OK)
}

/// The entry: this program, with the same flags.
fn entry(tools: &ToolArgs, daemon: &DaemonArgs) -> anyhow::Result<Entry> {
    let program = std::env::current_exe().context("the path of this program is unknown")?;
    let program = program
        .to_str()
        .context("the path of this program is not UTF-8")?;
    let mut args = vec!["mcp".to_owned()];
    let chosen = match &tools.tools {
        forkd_mcp::Selection::Set(set) => set.as_str().to_owned(),
        forkd_mcp::Selection::Names(names) => names.join(","),
    };
    args.extend(["--tools".to_owned(), chosen]);
    if tools.read_only {
        args.push("--read-only".to_owned());
    }
    args.extend([
        "--max-sandboxes".to_owned(),
        tools.max_sandboxes.to_string(),
    ]);
    args.extend(["--ttl".to_owned(), tools.ttl.to_string()]);
    let mut env = Vec::new();
    // Clients do not start servers from this shell, so the entry carries the variables.
    let cacert = daemon.daemon_cacert.as_ref().map(|path| path.display());
    for (name, value) in [
        ("FORKD_URL", daemon.daemon_url.clone()),
        ("FORKD_TOKEN", daemon.daemon_token.clone()),
        ("FORKD_CACERT", cacert.map(|path| path.to_string())),
        ("FORKD_MACHINE", variable("FORKD_MACHINE")),
    ] {
        if let Some(value) = value {
            env.push((name.to_owned(), value));
        }
    }
    Ok(Entry {
        command: program.to_owned(),
        args,
        env,
    })
}

fn format(client: McpClient) -> Format {
    match client {
        McpClient::Claude | McpClient::Cursor | McpClient::Cline => Format::Json {
            key: "mcpServers",
            kind: None,
        },
        McpClient::ClaudeCode => Format::Json {
            key: "mcpServers",
            kind: Some("stdio"),
        },
        McpClient::Vscode => Format::Json {
            key: "servers",
            kind: Some("stdio"),
        },
        McpClient::Codex => Format::Toml { key: "mcp_servers" },
    }
}

/// The file that a client reads.
fn default_file(client: McpClient) -> Result<PathBuf, CliError> {
    let home = variable("HOME").map(PathBuf::from).ok_or_else(|| {
        CliError::from(anyhow!("HOME is not set")).with_hint("name the file with --config")
    })?;
    let settings = variable("XDG_CONFIG_HOME").map_or_else(|| home.join(".config"), PathBuf::from);
    Ok(match client {
        McpClient::Claude => settings.join("Claude/claude_desktop_config.json"),
        McpClient::ClaudeCode => home.join(".claude.json"),
        McpClient::Cursor => home.join(".cursor/mcp.json"),
        McpClient::Vscode => settings.join("Code/User/mcp.json"),
        McpClient::Codex => variable("CODEX_HOME")
            .map_or_else(|| home.join(".codex"), PathBuf::from)
            .join("config.toml"),
        McpClient::Cline => settings.join(
            "Code/User/globalStorage/saoudrizwan.claude-dev/settings/cline_mcp_settings.json",
        ),
    })
}

/// The content of a file; none if it does not exist.
fn read(file: &Path) -> anyhow::Result<Option<String>> {
    let found = match std::fs::metadata(file) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        found => found.with_context(|| format!("cannot read {}", file.display()))?,
    };
    if !found.is_file() || found.len() > MAX_FILE {
        return Err(anyhow!("{} is not a configuration file", file.display()));
    }
    let text = std::fs::read_to_string(file);
    Ok(Some(text.with_context(|| {
        format!("cannot read {}", file.display())
    })?))
}

/// Writes the backup, then puts the new content in the place of the old one.
fn replace(file: &Path, old: Option<&str>, new: &str) -> anyhow::Result<()> {
    let folder = file.parent().context("the file has no folder")?;
    std::fs::create_dir_all(folder)?;
    if let Some(old) = old {
        let mut name = file.file_name().unwrap_or_default().to_owned();
        name.push(".forkd-backup");
        write(&file.with_file_name(name), old, file)?;
    }
    write(file, new, file)
}

/// Writes a file as a whole or not at all. It gets the permissions of `like`; a new one is for this user alone.
fn write(file: &Path, content: &str, like: &Path) -> anyhow::Result<()> {
    let folder = file.parent().context("the file has no folder")?;
    let mut temporary = tempfile::NamedTempFile::new_in(folder)?;
    temporary.write_all(content.as_bytes())?;
    if let Ok(found) = std::fs::metadata(like) {
        temporary.as_file().set_permissions(found.permissions())?;
    }
    temporary.as_file().sync_all()?;
    temporary.persist(file)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_changed_file_keeps_its_permissions_and_leaves_a_backup() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("new/config.json");
        replace(&file, None, "one").unwrap();
        let mode = |file: &Path| std::fs::metadata(file).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&file), 0o600);
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o640)).unwrap();
        replace(&file, Some("one"), "two").unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "two");
        let backup = folder.path().join("new/config.json.forkd-backup");
        assert_eq!(std::fs::read_to_string(&backup).unwrap(), "one");
        assert_eq!((mode(&file), mode(&backup)), (0o640, 0o640));
    }
}
