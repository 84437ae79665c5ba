//! The stages of a Dockerfile.

use crate::flags::Flags;
use crate::instruction::{Instruction, Kind, arguments};
use crate::lines::{self, Logical};
use crate::words;
use crate::{ParseError, Problem, limits, shortened};

/// A parsed Dockerfile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dockerfile {
    /// The escape character, `\` or `` ` ``.
    pub escape: char,
    /// `ARG` above the first `FROM`, with the line of each.
    pub arguments: Vec<(u32, String, Option<String>)>,
    pub stages: Vec<Stage>,
}

/// One `FROM` and the instructions below it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stage {
    /// The line of `FROM`.
    pub line: u32,
    /// An image, an earlier stage or `scratch`, before its expansion.
    pub from: String,
    pub platform: Option<String>,
    /// `AS name`, in small letters.
    pub name: Option<String>,
    pub instructions: Vec<Instruction>,
}

/// Parses a Dockerfile.
pub fn parse(text: &str) -> Result<Dockerfile, ParseError> {
    let (lines, escape) = lines::split(text)?;
    let mut file = Dockerfile {
        escape,
        arguments: Vec::new(),
        stages: Vec::new(),
    };
    for logical in &lines {
        if logical.name == "FROM" {
            let stage = from(logical, escape).map_err(|problem| problem.at(logical.line))?;
            file.add(stage)?;
            continue;
        }
        match file.stages.last_mut() {
            Some(stage) => stage
                .instructions
                .push(Instruction::parse(logical, escape)?),
            None if logical.name == "ARG" => {
                let all =
                    arguments(&logical.rest, escape).map_err(|problem| problem.at(logical.line))?;
                let line = logical.line;
                file.arguments
                    .extend(all.into_iter().map(|(name, value)| (line, name, value)));
            }
            None => {
                return Err(
                    Problem::invalid("FROM or ARG is the first instruction").at(logical.line)
                );
            }
        }
    }
    if file.stages.is_empty() {
        return Err(Problem::invalid("there is no FROM").at(1));
    }
    Ok(file)
}

fn from(logical: &Logical, escape: char) -> Result<Stage, Problem> {
    let (mut flags, rest) = Flags::take(&logical.rest, escape);
    let platform = flags.one("platform")?;
    flags.end("FROM")?;
    let words = words::split(rest, escape);
    let (from, name) = match words.as_slice() {
        [from] => (from, None),
        [from, r#as, name] if r#as.eq_ignore_ascii_case("as") => (from, Some(name)),
        _ => return Err(Problem::invalid("write FROM IMAGE or FROM IMAGE AS NAME")),
    };
    let name = name.map(|name| name.to_ascii_lowercase());
    let fits = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
    if let Some(name) = &name
        && !(name.starts_with(|c: char| c.is_ascii_alphabetic()) && name.chars().all(fits))
    {
        return Err(Problem::invalid(format!(
            "{} cannot be the name of a stage",
            shortened(name)
        )));
    }
    Ok(Stage {
        line: logical.line,
        from: from.clone(),
        platform,
        name,
        instructions: Vec::new(),
    })
}

impl Dockerfile {
    fn add(&mut self, stage: Stage) -> Result<(), ParseError> {
        if self.stages.len() >= limits::STAGES {
            return Err(Problem::TooLarge {
                what: "the number of stages",
                limit: limits::STAGES,
            }
            .at(stage.line));
        }
        if let Some(name) = &stage.name
            && self
                .stages
                .iter()
                .any(|one| one.name.as_ref() == Some(name))
        {
            return Err(Problem::invalid(format!("there are two stages {name}")).at(stage.line));
        }
        self.stages.push(stage);
        Ok(())
    }

    /// The stage that a name or number stands for, among those above the stage `below`.
    pub fn stage(&self, name: &str, below: usize) -> Option<usize> {
        let name = name.to_ascii_lowercase();
        let above = self.stages.get(..below.min(self.stages.len()))?;
        let named = above
            .iter()
            .rposition(|stage| stage.name.as_ref() == Some(&name));
        named.or_else(|| {
            let number: usize = name.parse().ok()?;
            (number < above.len()).then_some(number)
        })
    }

    /// Whether a stage copies, mounts or begins with files of the context.
    pub fn uses_context(&self) -> bool {
        let mut all = self.stages.iter().flat_map(|stage| &stage.instructions);
        all.any(|one| match &one.kind {
            Kind::Copy(copy) => copy.from.is_none(),
            Kind::Run(step) => step
                .mounts
                .iter()
                .any(|mount| matches!(mount.kind, crate::MountKind::Bind { from: None, .. })),
            _ => false,
        })
    }
}
