//! `RUN` with its mounts.

use crate::expand::{Variables, expand};
use crate::flags::Flags;
use crate::instruction::Command;
use crate::lines::{Logical, start};
use crate::words;
use crate::{Problem, limits, shortened};

/// A command of a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunStep {
    pub command: Command,
    pub mounts: Vec<Mount>,
    pub network: RunNetwork,
}

/// The network of one command.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RunNetwork {
    /// That of the build.
    #[default]
    Default,
    None,
}

/// Something that is there while a command runs, and not part of the image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Where it is mounted; a secret has a default.
    pub target: Option<String>,
    pub kind: MountKind,
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
}

/// The kind of a [`Mount`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MountKind {
    /// Files of the context, of a stage or of an image. Changes are thrown away.
    Bind {
        from: Option<String>,
        source: String,
        read_only: bool,
    },
    /// A folder that is kept for later builds.
    Cache { id: Option<String>, read_only: bool },
    /// An empty folder in memory.
    Tmpfs { size_mib: Option<u64> },
    /// A file with a secret of the request, or a variable.
    Secret {
        id: String,
        required: bool,
        env: Option<String>,
    },
}

impl RunStep {
    pub(crate) fn parse(logical: &Logical, escape: char) -> Result<Self, Problem> {
        let (mut flags, rest) = Flags::take(&logical.rest, escape);
        let network = match flags.one("network")?.as_deref() {
            None | Some("default") => RunNetwork::Default,
            Some("none") => RunNetwork::None,
            Some(other) => {
                return Err(Problem::unsupported(format!(
                    "RUN --network is default or none, not {}",
                    shortened(other)
                )));
            }
        };
        if !matches!(flags.one("security")?.as_deref(), None | Some("sandbox")) {
            return Err(Problem::unsupported("RUN --security is sandbox"));
        }
        let mounts = flags.many("mount")?;
        if mounts.len() > limits::MOUNTS {
            return Err(Problem::TooLarge {
                what: "the number of mounts",
                limit: limits::MOUNTS,
            });
        }
        let mounts = mounts
            .iter()
            .map(|text| Mount::parse(text))
            .collect::<Result<_, _>>()?;
        flags.end("RUN")?;
        Ok(Self {
            command: command(rest, logical, escape)?,
            mounts,
            network,
        })
    }

    pub(crate) fn expanded(&self, escape: char, variables: Variables<'_>) -> Result<Self, Problem> {
        let mut step = self.clone();
        let one = |text: &mut String| -> Result<(), Problem> {
            *text = expand(text, escape, variables)?;
            Ok(())
        };
        for mount in &mut step.mounts {
            mount.target.as_mut().map(one).transpose()?;
            match &mut mount.kind {
                MountKind::Bind { from, source, .. } => {
                    from.as_mut().map(one).transpose()?;
                    one(source)?;
                }
                MountKind::Cache { id, .. } => {
                    id.as_mut().map(one).transpose()?;
                }
                MountKind::Secret { id, env, .. } => {
                    one(id)?;
                    env.as_mut().map(one).transpose()?;
                }
                MountKind::Tmpfs { .. } => {}
            }
        }
        Ok(step)
    }
}

/// A here-document alone is a script. One behind a command is the shell's own business.
fn command(rest: &str, logical: &Logical, escape: char) -> Result<Command, Problem> {
    if let Some(argv) = words::json(rest) {
        return Command::exec(argv, "RUN");
    }
    if rest.is_empty() {
        return Err(Problem::invalid("RUN needs a command"));
    }
    let mut words = words::split(rest, escape).into_iter();
    let only_heredoc = words.next().is_some_and(|word| start(&word).is_some());
    if let [heredoc] = logical.heredocs.as_slice()
        && only_heredoc
        && words.next().is_none()
    {
        return Ok(match heredoc.content.starts_with("#!") {
            true => Command::Script(heredoc.content.clone()),
            false => Command::Shell(heredoc.content.clone()),
        });
    }
    let mut line = rest.to_owned();
    for heredoc in &logical.heredocs {
        line.push('\n');
        line.push_str(&heredoc.content);
        line.push_str(&heredoc.name);
    }
    Ok(Command::Shell(line))
}

impl Mount {
    fn parse(text: &str) -> Result<Self, Problem> {
        let mut fields = Fields::parse(text)?;
        let kind = fields.take(&["type"]).unwrap_or_else(|| "bind".to_owned());
        let target = fields.take(&["target", "dst", "destination"]);
        let mode = fields.number("mode", 8)?;
        let (uid, gid) = (fields.number("uid", 10)?, fields.number("gid", 10)?);
        let kind = match kind.as_str() {
            "bind" => MountKind::Bind {
                from: fields.take(&["from"]),
                source: fields
                    .take(&["source", "src"])
                    .unwrap_or_else(|| "/".to_owned()),
                read_only: !fields.switch(&["rw", "readwrite"])?,
            },
            "cache" => {
                if let Some(sharing) = fields.take(&["sharing"])
                    && !["shared", "private", "locked"].contains(&sharing.as_str())
                {
                    return Err(Problem::invalid("sharing is shared, private or locked"));
                }
                MountKind::Cache {
                    id: fields.take(&["id"]),
                    read_only: fields.switch(&["ro", "readonly"])?,
                }
            }
            "tmpfs" => MountKind::Tmpfs {
                size_mib: fields
                    .number("size", 10)?
                    .map(|bytes: u64| bytes.div_ceil(1 << 20)),
            },
            "secret" => {
                let env = fields.take(&["env"]);
                let id = fields.take(&["id"]);
                let id = id.or_else(|| {
                    let path = target.as_ref()?;
                    path.rsplit('/').next().map(str::to_owned)
                });
                MountKind::Secret {
                    id: id.ok_or_else(|| Problem::invalid("a secret mount needs an id"))?,
                    required: fields.switch(&["required"])?,
                    env,
                }
            }
            other => {
                return Err(Problem::unsupported(format!(
                    "RUN --mount=type={} is not carried out: use bind, cache, tmpfs or secret",
                    shortened(other)
                )));
            }
        };
        fields.end()?;
        if target.is_none() && !matches!(kind, MountKind::Secret { .. }) {
            return Err(Problem::invalid("a mount needs a target"));
        }
        Ok(Self {
            target,
            kind,
            mode,
            uid,
            gid,
        })
    }
}

/// `key=value,key,…` of a mount.
struct Fields(Vec<(String, Option<String>)>);

impl Fields {
    fn parse(text: &str) -> Result<Self, Problem> {
        let mut all: Vec<(String, Option<String>)> = Vec::new();
        for field in text.split(',') {
            let (key, value) = match field.split_once('=') {
                Some((key, value)) => (key.trim(), Some(value.trim().to_owned())),
                None => (field.trim(), None),
            };
            let key = key.to_ascii_lowercase();
            if key.is_empty() || all.iter().any(|(found, _)| *found == key) {
                return Err(Problem::invalid(format!(
                    "{} is not a mount",
                    shortened(text)
                )));
            }
            all.push((key, value));
        }
        Ok(Self(all))
    }

    fn remove(&mut self, names: &[&str]) -> Option<Option<String>> {
        let at = self
            .0
            .iter()
            .position(|(key, _)| names.contains(&key.as_str()))?;
        Some(self.0.remove(at).1)
    }

    fn take(&mut self, names: &[&str]) -> Option<String> {
        self.remove(names).flatten()
    }

    fn switch(&mut self, names: &[&str]) -> Result<bool, Problem> {
        match self.remove(names) {
            None => Ok(false),
            Some(None) => Ok(true),
            Some(Some(value)) => match value.as_str() {
                "true" | "1" => Ok(true),
                "false" | "0" => Ok(false),
                _ => Err(Problem::invalid(format!(
                    "{} of a mount is true or false",
                    names.first().unwrap_or(&"")
                ))),
            },
        }
    }

    fn number<T: TryFrom<u64>>(&mut self, name: &str, radix: u32) -> Result<Option<T>, Problem> {
        let Some(text) = self.take(&[name]) else {
            return Ok(None);
        };
        let number = u64::from_str_radix(&text, radix).ok();
        match number.and_then(|number| T::try_from(number).ok()) {
            Some(number) => Ok(Some(number)),
            None => Err(Problem::invalid(format!("{name} of a mount is a number"))),
        }
    }

    fn end(self) -> Result<(), Problem> {
        match self.0.first() {
            None => Ok(()),
            Some((name, _)) => Err(Problem::unsupported(format!(
                "RUN --mount does not take {} here",
                shortened(name)
            ))),
        }
    }
}
