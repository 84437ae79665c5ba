//! The configuration of an image while it is built.

use std::collections::{BTreeMap, BTreeSet};

use forkd_dockerfile::{Command, Healthcheck};
use forkd_formats::image::ImageRecord;
use serde_json::{Map, Value, json};

/// How the programs of the image run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Config {
    /// In the order in which the variables were set.
    pub env: Vec<(String, String)>,
    pub user: Option<String>,
    pub workdir: Option<String>,
    pub entrypoint: Vec<String>,
    pub cmd: Vec<String>,
    /// Ports as `PORT/PROTOCOL`.
    pub ports: BTreeSet<String>,
    pub volumes: BTreeSet<String>,
    pub labels: BTreeMap<String, String>,
    pub stop_signal: Option<String>,
    pub healthcheck: Option<Value>,
    /// The program of the shell form.
    pub shell: Vec<String>,
}

impl Config {
    /// That of an installed image.
    pub fn of_image(record: &ImageRecord) -> Self {
        let run = &record.run;
        Self {
            env: record.env.clone().into_iter().collect(),
            user: run.user.clone(),
            workdir: run.working_dir.clone(),
            entrypoint: run.entrypoint.clone(),
            cmd: run.cmd.clone(),
            ports: run.ports.iter().map(|port| format!("{port}/tcp")).collect(),
            stop_signal: run.stop_signal.clone(),
            healthcheck: match run.healthcheck.is_empty() {
                true => None,
                false => Some(json!({ "Test": run.healthcheck })),
            },
            ..Self::default()
        }
    }

    pub fn set_env(&mut self, name: &str, value: &str) {
        match self.env.iter_mut().find(|(found, _)| found == name) {
            Some((_, old)) => value.clone_into(old),
            None => self.env.push((name.to_owned(), value.to_owned())),
        }
    }

    pub fn env(&self, name: &str) -> Option<String> {
        let found = self.env.iter().find(|(found, _)| found == name);
        found.map(|(_, value)| value.clone())
    }

    pub fn shell(&self) -> Vec<String> {
        match self.shell.is_empty() {
            true => vec!["/bin/sh".to_owned(), "-c".to_owned()],
            false => self.shell.clone(),
        }
    }

    /// The arguments that a command stands for.
    pub fn argv(&self, command: &Command) -> Vec<String> {
        match command {
            Command::Exec(argv) => argv.clone(),
            Command::Shell(line) | Command::Script(line) => {
                let mut argv = self.shell();
                argv.push(line.clone());
                argv
            }
        }
    }

    /// The folder of programs.
    pub fn folder(&self) -> &str {
        self.workdir.as_deref().unwrap_or("/")
    }

    /// A path seen from the folder of programs.
    pub fn absolute(&self, path: &str) -> String {
        match path.starts_with('/') {
            true => clean(path),
            false => clean(&format!("{}/{path}", self.folder())),
        }
    }

    pub fn set_healthcheck(&mut self, health: &Healthcheck) {
        let Healthcheck::Command {
            command,
            interval_ns,
            timeout_ns,
            start_period_ns,
            start_interval_ns,
            retries,
        } = health
        else {
            self.healthcheck = Some(json!({ "Test": ["NONE"] }));
            return;
        };
        let test = match command {
            Command::Exec(argv) => {
                let mut test = vec!["CMD".to_owned()];
                test.extend(argv.clone());
                test
            }
            Command::Shell(line) | Command::Script(line) => {
                vec!["CMD-SHELL".to_owned(), line.clone()]
            }
        };
        let mut all = Map::new();
        all.insert("Test".into(), json!(test));
        for (name, value) in [
            ("Interval", interval_ns),
            ("Timeout", timeout_ns),
            ("StartPeriod", start_period_ns),
            ("StartInterval", start_interval_ns),
        ] {
            if let Some(value) = value {
                all.insert(name.into(), json!(value));
            }
        }
        if let Some(retries) = retries {
            all.insert("Retries".into(), json!(retries));
        }
        self.healthcheck = Some(Value::Object(all));
    }

    /// The configuration document of an OCI image with one layer.
    pub fn to_oci(&self, diff_id: &str) -> Value {
        let set = |all: &BTreeSet<String>| -> Value {
            all.iter().map(|one| (one.clone(), json!({}))).collect()
        };
        let env: Vec<String> = self
            .env
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        let mut config = Map::new();
        let mut put = |name: &str, value: Value, is_set: bool| {
            if is_set {
                config.insert(name.to_owned(), value);
            }
        };
        put("Env", json!(env), !env.is_empty());
        put("User", json!(self.user), self.user.is_some());
        put("WorkingDir", json!(self.workdir), self.workdir.is_some());
        put(
            "Entrypoint",
            json!(self.entrypoint),
            !self.entrypoint.is_empty(),
        );
        put("Cmd", json!(self.cmd), !self.cmd.is_empty());
        put("ExposedPorts", set(&self.ports), !self.ports.is_empty());
        put("Volumes", set(&self.volumes), !self.volumes.is_empty());
        put("Labels", json!(self.labels), !self.labels.is_empty());
        put(
            "StopSignal",
            json!(self.stop_signal),
            self.stop_signal.is_some(),
        );
        put(
            "Healthcheck",
            json!(self.healthcheck),
            self.healthcheck.is_some(),
        );
        put("Shell", json!(self.shell), !self.shell.is_empty());
        json!({
            "architecture": "amd64",
            "os": "linux",
            "config": config,
            "rootfs": { "type": "layers", "diff_ids": [diff_id] },
        })
    }

    /// Everything of it, for keys of the cache.
    pub fn to_key(&self) -> Value {
        self.to_oci("")
    }
}

/// An absolute path without `.`, `..` and doubled slashes.
pub fn clean(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    format!("/{}", parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_seen_from_the_folder_of_programs() {
        let mut config = Config::default();
        assert_eq!(config.absolute("a/../b"), "/b");
        config.workdir = Some("/srv".into());
        assert_eq!(config.absolute("./x"), "/srv/x");
        assert_eq!(config.absolute("/x//y/"), "/x/y");
        assert_eq!(config.absolute("../../.."), "/");
    }

    #[test]
    fn only_settings_that_were_made_are_in_the_document() {
        let mut config = Config::default();
        config.set_env("A", "1");
        config.set_env("A", "2");
        config.set_healthcheck(&Healthcheck::Command {
            command: Command::Shell("true".into()),
            interval_ns: Some(5),
            timeout_ns: None,
            start_period_ns: None,
            start_interval_ns: None,
            retries: Some(2),
        });
        let document = config.to_oci("sha256:x");
        assert_eq!(
            document["config"],
            json!({
                "Env": ["A=2"],
                "Healthcheck": { "Test": ["CMD-SHELL", "true"], "Interval": 5, "Retries": 2 },
            })
        );
        assert_eq!(document["rootfs"]["diff_ids"], json!(["sha256:x"]));
    }
}
