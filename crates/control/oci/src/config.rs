//! The configuration of an image: the layers it stands for, and how its programs expect to run.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::digest::Digest;
use crate::error::OciError;
use crate::limits;

/// The longest value of a variable or of a name.
const MAX_TEXT: usize = 32 << 10;
const MAX_VARIABLES: usize = 1000;
const MAX_ARGUMENTS: usize = 1000;

/// A checked configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Config {
    /// The digest of each layer, unpacked, from the lowest.
    pub diff_ids: Vec<Digest>,
    pub env: BTreeMap<String, String>,
    /// `USER`, `USER:GROUP`, or numbers.
    pub user: Option<String>,
    pub working_dir: Option<String>,
    pub entrypoint: Vec<String>,
    pub cmd: Vec<String>,
    /// TCP ports that the image says it listens on.
    pub ports: Vec<u16>,
    pub stop_signal: Option<String>,
    /// `CMD` and arguments, or `CMD-SHELL` and a line: how Docker finds out whether the image's program is well.
    pub healthcheck: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Wire {
    #[serde(default)]
    config: Option<WireRun>,
    rootfs: WireRoot,
}

#[derive(Debug, Deserialize)]
struct WireRoot {
    #[serde(default)]
    diff_ids: Vec<Digest>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct WireRun {
    env: Option<Vec<String>>,
    user: Option<String>,
    working_dir: Option<String>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    exposed_ports: Option<BTreeMap<String, serde::de::IgnoredAny>>,
    stop_signal: Option<String>,
    healthcheck: Option<WireHealthcheck>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct WireHealthcheck {
    test: Option<Vec<String>>,
}

impl Config {
    /// Parses and checks a configuration.
    pub fn parse(bytes: &[u8]) -> Result<Self, OciError> {
        let wire: Wire = serde_json::from_slice(bytes).map_err(|source| OciError::Syntax {
            what: "the configuration of the image".into(),
            source,
        })?;
        let diff_ids = wire.rootfs.diff_ids;
        check("rootfs.diff_ids", diff_ids.len() <= limits::LAYERS, || {
            format!(
                "it names {} layers, at most {} are allowed",
                diff_ids.len(),
                limits::LAYERS
            )
        })?;
        let run = wire.config.unwrap_or_default();
        let working_dir = some_text("WorkingDir", run.working_dir)?;
        if let Some(folder) = &working_dir {
            check("WorkingDir", folder.starts_with('/'), || {
                format!("{folder:?} does not begin with a slash")
            })?;
        }
        Ok(Self {
            diff_ids,
            env: variables(run.env.unwrap_or_default())?,
            user: some_text("User", run.user)?,
            working_dir,
            entrypoint: arguments("Entrypoint", run.entrypoint.unwrap_or_default())?,
            cmd: arguments("Cmd", run.cmd.unwrap_or_default())?,
            ports: tcp_ports(run.exposed_ports.unwrap_or_default().keys()),
            stop_signal: some_text("StopSignal", run.stop_signal)?,
            healthcheck: healthcheck(run.healthcheck.unwrap_or_default())?,
        })
    }
}

fn check(
    field: &'static str,
    holds: bool,
    problem: impl FnOnce() -> String,
) -> Result<(), OciError> {
    if holds {
        return Ok(());
    }
    Err(OciError::Config {
        field,
        problem: problem(),
    })
}

/// Text for the guest: no end of a C string in it, and no new line, since it stands in files of lines.
fn text(field: &'static str, text: &str) -> Result<(), OciError> {
    check(field, text.len() <= MAX_TEXT, || {
        format!(
            "a value has {} bytes, at most {MAX_TEXT} are allowed",
            text.len()
        )
    })?;
    check(field, !text.contains(['\0', '\n']), || {
        "a value has a zero byte or a new line in it".into()
    })
}

fn some_text(field: &'static str, value: Option<String>) -> Result<Option<String>, OciError> {
    let value = value.filter(|value| !value.is_empty());
    if let Some(value) = &value {
        text(field, value)?;
    }
    Ok(value)
}

fn variables(list: Vec<String>) -> Result<BTreeMap<String, String>, OciError> {
    check("Env", list.len() <= MAX_VARIABLES, || {
        format!(
            "there are {} variables, at most {MAX_VARIABLES} are allowed",
            list.len()
        )
    })?;
    let mut env = BTreeMap::new();
    for line in list {
        text("Env", &line)?;
        // A variable without a value is one that the image unsets.
        let Some((name, value)) = line.split_once('=') else {
            continue;
        };
        check("Env", !name.is_empty(), || format!("{line:?} has no name"))?;
        env.insert(name.to_owned(), value.to_owned());
    }
    Ok(env)
}

fn arguments(field: &'static str, list: Vec<String>) -> Result<Vec<String>, OciError> {
    check(field, list.len() <= MAX_ARGUMENTS, || {
        format!(
            "there are {} arguments, at most {MAX_ARGUMENTS} are allowed",
            list.len()
        )
    })?;
    for argument in &list {
        check(
            field,
            argument.len() <= MAX_TEXT && !argument.contains('\0'),
            || "an argument is too long or has a zero byte in it".into(),
        )?;
    }
    Ok(list)
}

/// The command of a health check. `NONE` switches off that of a lower image.
fn healthcheck(wire: WireHealthcheck) -> Result<Vec<String>, OciError> {
    let test = arguments("Healthcheck", wire.test.unwrap_or_default())?;
    match test.first().map(String::as_str) {
        Some("CMD" | "CMD-SHELL") if test.len() > 1 => Ok(test),
        _ => Ok(Vec::new()),
    }
}

/// `80/tcp`, `80` and `53/udp`: the TCP ones.
fn tcp_ports<'a>(names: impl Iterator<Item = &'a String>) -> Vec<u16> {
    names
        .filter_map(|name| name.strip_suffix("/tcp").unwrap_or(name).parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_docker_writes_is_read() {
        let digest = Digest::of(b"x");
        let text = format!(
            r#"{{"architecture":"amd64","os":"linux","config":{{"User":"app:app","Env":["PATH=/bin","A=b=c","UNSET"],
            "WorkingDir":"/srv","Entrypoint":["/run"],"Cmd":null,"ExposedPorts":{{"80/tcp":{{}},"53/udp":{{}}}},
            "StopSignal":"","Labels":null,"Healthcheck":{{"Test":["CMD","true"]}}}},
            "rootfs":{{"type":"layers","diff_ids":["{digest}"]}},"history":[]}}"#
        );
        let config = Config::parse(text.as_bytes()).unwrap();
        assert_eq!(config.diff_ids, [digest]);
        assert_eq!(config.env["A"], "b=c");
        assert!(!config.env.contains_key("UNSET"));
        assert_eq!(config.user.as_deref(), Some("app:app"));
        assert_eq!(config.working_dir.as_deref(), Some("/srv"));
        assert_eq!(config.ports, [80]);
        assert_eq!((config.cmd, config.stop_signal), (vec![], None));
        assert_eq!(config.healthcheck, ["CMD", "true"]);
    }

    #[test]
    fn what_could_reach_a_file_of_lines_is_refused() {
        for (field, value) in [
            ("Env", r#"["A=b\nROOT=1"]"#),
            ("WorkingDir", r#""relative""#),
        ] {
            let text = format!(r#"{{"config":{{"{field}":{value}}},"rootfs":{{"diff_ids":[]}}}}"#);
            let error = Config::parse(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        }
    }
}
