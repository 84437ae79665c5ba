//! Every instruction of a Dockerfile.

use crate::copy::Copy;
use crate::expand::{Variables, expand};
use crate::flags::Flags;
use crate::lines::Logical;
use crate::run::RunStep;
use crate::words;
use crate::{ParseError, Problem, shortened};

/// An instruction and where it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instruction {
    /// Its first line, from 1.
    pub line: u32,
    /// The instruction on one line, for people.
    pub text: String,
    pub kind: Kind,
}

/// The parts of an instruction. `FROM` begins a stage and is no instruction of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    Run(RunStep),
    Copy(Copy),
    Env(Vec<(String, String)>),
    /// Names with their defaults.
    Arg(Vec<(String, Option<String>)>),
    Label(Vec<(String, String)>),
    Cmd(Command),
    Entrypoint(Command),
    Shell(Vec<String>),
    User(String),
    Workdir(String),
    /// `PORT`, `FROM-TO`, each with `/tcp` or `/udp` or without.
    Expose(Vec<String>),
    Volume(Vec<String>),
    StopSignal(String),
    Healthcheck(Healthcheck),
    Maintainer(String),
}

/// A command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// A line for the shell of the image.
    Shell(String),
    /// A program and its arguments.
    Exec(Vec<String>),
    /// A file with its own interpreter; only of `RUN`.
    Script(String),
}

/// The parts of a `HEALTHCHECK`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Healthcheck {
    None,
    Command {
        command: Command,
        interval_ns: Option<u64>,
        timeout_ns: Option<u64>,
        start_period_ns: Option<u64>,
        start_interval_ns: Option<u64>,
        retries: Option<u32>,
    },
}

impl Command {
    pub(crate) fn exec(argv: Vec<String>, instruction: &str) -> Result<Self, Problem> {
        match argv.is_empty() && instruction == "RUN" {
            true => Err(Problem::invalid("RUN needs a command")),
            false => Ok(Self::Exec(argv)),
        }
    }

    fn parse(rest: &str, instruction: &str) -> Result<Self, Problem> {
        match words::json(rest) {
            Some(argv) => Self::exec(argv, instruction),
            None if rest.is_empty() => Err(missing(instruction)),
            None => Ok(Self::Shell(rest.to_owned())),
        }
    }
}

fn missing(instruction: &str) -> Problem {
    Problem::invalid(format!("{instruction} needs an argument"))
}

impl Instruction {
    pub(crate) fn parse(logical: &Logical, escape: char) -> Result<Self, ParseError> {
        let kind = kind(logical, escape).map_err(|problem| problem.at(logical.line))?;
        Ok(Self {
            line: logical.line,
            text: format!("{} {}", logical.name, logical.rest),
            kind,
        })
    }

    /// The instruction with the values of variables in it. `CMD`, `ENTRYPOINT`, `SHELL`, `HEALTHCHECK` and the command
    /// of `RUN` are left to the shell.
    pub fn expanded(&self, escape: char, variables: Variables<'_>) -> Result<Self, ParseError> {
        let kind =
            expanded(&self.kind, escape, variables).map_err(|problem| problem.at(self.line))?;
        Ok(Self {
            line: self.line,
            text: self.text.clone(),
            kind,
        })
    }
}

fn kind(logical: &Logical, escape: char) -> Result<Kind, Problem> {
    let (name, rest) = (logical.name.as_str(), logical.rest.as_str());
    let needed = || match rest.is_empty() {
        true => Err(missing(name)),
        false => Ok(rest.to_owned()),
    };
    Ok(match name {
        "RUN" => Kind::Run(RunStep::parse(logical, escape)?),
        "COPY" | "ADD" => Kind::Copy(Copy::parse(logical, escape)?),
        "ENV" => Kind::Env(named_pairs(rest, escape, "ENV")?),
        "LABEL" => Kind::Label(words::pairs(rest, escape)?),
        "ARG" => Kind::Arg(arguments(rest, escape)?),
        "CMD" => Kind::Cmd(Command::parse(rest, name)?),
        "ENTRYPOINT" => Kind::Entrypoint(Command::parse(rest, name)?),
        "SHELL" => match words::json(rest) {
            Some(argv) if !argv.is_empty() => Kind::Shell(argv),
            _ => return Err(Problem::invalid("SHELL takes a JSON array of strings")),
        },
        "USER" => Kind::User(needed()?),
        "WORKDIR" => Kind::Workdir(needed()?),
        "EXPOSE" => {
            needed()?;
            Kind::Expose(words::split(rest, escape))
        }
        "VOLUME" => {
            needed()?;
            let json = words::json(rest);
            Kind::Volume(json.unwrap_or_else(|| words::split(rest, escape)))
        }
        "STOPSIGNAL" => Kind::StopSignal(needed()?),
        "HEALTHCHECK" => Kind::Healthcheck(healthcheck(rest, escape)?),
        "MAINTAINER" => Kind::Maintainer(needed()?),
        "ONBUILD" => {
            return Err(Problem::unsupported(
                "ONBUILD is not carried out: write the instruction into the Dockerfiles that build on this image",
            ));
        }
        other => {
            return Err(Problem::invalid(format!(
                "{} is not an instruction",
                shortened(other)
            )));
        }
    })
}

/// Pairs whose names can be those of variables.
fn named_pairs(
    rest: &str,
    escape: char,
    instruction: &str,
) -> Result<Vec<(String, String)>, Problem> {
    let pairs = words::pairs(rest, escape)?;
    for (name, _) in &pairs {
        if name.contains(|c: char| c.is_control() || c.is_whitespace()) {
            return Err(Problem::invalid(format!(
                "{} cannot be a variable of {instruction}",
                shortened(name)
            )));
        }
    }
    Ok(pairs)
}

pub(crate) fn arguments(
    rest: &str,
    escape: char,
) -> Result<Vec<(String, Option<String>)>, Problem> {
    let words = words::split(rest, escape);
    if words.is_empty() {
        return Err(missing("ARG"));
    }
    words
        .iter()
        .map(|word| {
            let (name, value) = match word.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (word.as_str(), None),
            };
            match words::is_name(name) {
                true => Ok((name.to_owned(), value)),
                false => Err(Problem::invalid(format!(
                    "{} cannot be the name of an argument",
                    shortened(name)
                ))),
            }
        })
        .collect()
}

fn healthcheck(rest: &str, escape: char) -> Result<Healthcheck, Problem> {
    let (mut flags, rest) = Flags::take(rest, escape);
    let mut duration = |name: &str| flags.one(name)?.map(|text| nanoseconds(&text)).transpose();
    let interval_ns = duration("interval")?;
    let timeout_ns = duration("timeout")?;
    let start_period_ns = duration("start-period")?;
    let start_interval_ns = duration("start-interval")?;
    let retries = match flags.one("retries")? {
        None => None,
        Some(text) => Some(
            text.parse()
                .map_err(|_| Problem::invalid("--retries is a number"))?,
        ),
    };
    flags.end("HEALTHCHECK")?;
    let (kind, rest) = rest
        .split_once(|c: char| c.is_whitespace())
        .unwrap_or((rest, ""));
    match kind.to_ascii_uppercase().as_str() {
        "NONE" if rest.trim().is_empty() => Ok(Healthcheck::None),
        "CMD" => Ok(Healthcheck::Command {
            command: Command::parse(rest.trim(), "HEALTHCHECK CMD")?,
            interval_ns,
            timeout_ns,
            start_period_ns,
            start_interval_ns,
            retries,
        }),
        _ => Err(Problem::invalid(
            "HEALTHCHECK is NONE or CMD with a command",
        )),
    }
}

/// Durations such as `1m30s` or `500ms`.
fn nanoseconds(text: &str) -> Result<u64, Problem> {
    let bad = || Problem::invalid(format!("{} is not a duration such as 30s", shortened(text)));
    let mut rest = text;
    let mut total = 0u64;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(bad)?;
        let number: u64 = rest
            .get(..digits)
            .and_then(|n| n.parse().ok())
            .ok_or_else(bad)?;
        rest = rest.get(digits..).unwrap_or_default();
        let end = rest
            .find(|c: char| c.is_ascii_digit())
            .unwrap_or(rest.len());
        let (unit, after) = rest.split_at(end);
        let scale = match unit {
            "h" => 3_600_000_000_000,
            "m" => 60_000_000_000,
            "s" => 1_000_000_000,
            "ms" => 1_000_000,
            "us" | "µs" => 1_000,
            "ns" => 1,
            _ => return Err(bad()),
        };
        total = number
            .checked_mul(scale)
            .and_then(|part| total.checked_add(part))
            .ok_or_else(bad)?;
        rest = after;
    }
    match text.is_empty() {
        true => Err(bad()),
        false => Ok(total),
    }
}

fn expanded(kind: &Kind, escape: char, variables: Variables<'_>) -> Result<Kind, Problem> {
    let one = |text: &String| expand(text, escape, variables).map_err(Problem::from);
    let list = |all: &[String]| all.iter().map(one).collect::<Result<Vec<_>, _>>();
    let pairs = |all: &[(String, String)]| {
        all.iter()
            .map(|(name, value)| Ok((one(name)?, one(value)?)))
            .collect::<Result<Vec<_>, Problem>>()
    };
    Ok(match kind {
        Kind::Run(step) => Kind::Run(step.expanded(escape, variables)?),
        Kind::Copy(copy) => Kind::Copy(copy.expanded(escape, variables)?),
        Kind::Env(all) => Kind::Env(pairs(all)?),
        Kind::Label(all) => Kind::Label(pairs(all)?),
        Kind::Arg(all) => Kind::Arg(
            all.iter()
                .map(|(name, value)| Ok((name.clone(), value.as_ref().map(one).transpose()?)))
                .collect::<Result<_, Problem>>()?,
        ),
        Kind::User(text) => Kind::User(one(text)?),
        Kind::Workdir(text) => Kind::Workdir(one(text)?),
        Kind::Expose(all) => Kind::Expose(list(all)?),
        Kind::Volume(all) => Kind::Volume(list(all)?),
        Kind::StopSignal(text) => Kind::StopSignal(one(text)?),
        Kind::Cmd(_)
        | Kind::Entrypoint(_)
        | Kind::Shell(_)
        | Kind::Healthcheck(_)
        | Kind::Maintainer(_) => kind.clone(),
    })
}
