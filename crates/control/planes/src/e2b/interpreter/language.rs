//! The languages of the code interpreter: their names in the SDKs and in the agent.

use crate::e2b::error::{Answer, Refusal};

/// A language of an execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    Python,
    Node,
    /// JavaScript with types, which the agent removes.
    TypeScript,
    /// A shell for each execution.
    Bash,
    /// A process for each execution.
    R,
}

impl Language {
    pub fn parse(text: &str) -> Answer<Self> {
        match text.to_ascii_lowercase().as_str() {
            "python" | "python3" => Ok(Self::Python),
            "javascript" | "js" | "node" => Ok(Self::Node),
            "typescript" | "ts" => Ok(Self::TypeScript),
            "bash" | "sh" => Ok(Self::Bash),
            "r" => Ok(Self::R),
            _ => {
                let shown: String = text.chars().take(40).collect();
                Err(Refusal::bad(format!(
                    "{shown:?} is not a language of this sandbox: python, javascript, typescript, bash or r"
                )))
            }
        }
    }

    /// The name that the SDKs use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Python => "python",
            Self::Node => "javascript",
            Self::TypeScript => "typescript",
            Self::Bash => "bash",
            Self::R => "r",
        }
    }

    /// The language has an interpreter that keeps its state between executions.
    pub fn stays(self) -> bool {
        !matches!(self, Self::Bash | Self::R)
    }

    /// The name that the agent uses.
    pub fn of_agent(self) -> &'static str {
        match self {
            Self::Python => "python",
            Self::Node | Self::TypeScript => "node",
            Self::Bash => "bash",
            Self::R => "r",
        }
    }

    pub fn from_agent(name: &str) -> Option<Self> {
        match name {
            "python" => Some(Self::Python),
            "node" => Some(Self::Node),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn languages_have_the_names_of_the_sdks() {
        assert_eq!(Language::parse("JS").unwrap(), Language::Node);
        assert_eq!(Language::parse("python").unwrap().name(), "python");
        assert!(Language::parse("java").is_err());
    }
}
