//! `COPY` and `ADD`.

use crate::expand::{Variables, expand, expand_text};
use crate::flags::Flags;
use crate::lines::{Logical, start};
use crate::words;
use crate::{Problem, limits, shortened};

/// Files that are put into a stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copy {
    /// A stage or an image; without one the files come from the context.
    pub from: Option<String>,
    /// `USER[:GROUP]`, names or numbers.
    pub chown: Option<String>,
    /// Permissions in octal digits.
    pub chmod: Option<String>,
    /// Patterns of files that are left out.
    pub exclude: Vec<String>,
    /// Local archives are unpacked: `ADD`.
    pub unpack: bool,
    pub sources: Vec<CopySource>,
    pub to: String,
}

/// One source of a [`Copy`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CopySource {
    /// A path or pattern.
    Path(String),
    /// The text of a here-document.
    Inline {
        name: String,
        content: String,
        /// Whether variables in the content are expanded.
        expand: bool,
    },
}

impl Copy {
    pub(crate) fn parse(logical: &Logical, escape: char) -> Result<Self, Problem> {
        let unpack = logical.name == "ADD";
        let (mut flags, rest) = Flags::take(&logical.rest, escape);
        let from = match unpack {
            true => None,
            false => flags.one("from")?,
        };
        let chown = flags.one("chown")?;
        let chmod = flags.one("chmod")?;
        let exclude = flags.many("exclude")?;
        // Every step is a cut of its own: `--link` has nothing to make faster.
        flags.switch("link")?;
        flags.end(&logical.name)?;
        let mut words = words::json(rest).unwrap_or_else(|| {
            // Quotes are removed when the words are expanded.
            words::split(rest, escape)
        });
        if words.len() < 2 {
            return Err(Problem::invalid(format!(
                "{} needs a source and a destination",
                logical.name
            )));
        }
        if words.len() > limits::SOURCES {
            return Err(Problem::TooLarge {
                what: "the number of sources",
                limit: limits::SOURCES,
            });
        }
        let to = words.pop().unwrap_or_default();
        let mut heredocs = logical.heredocs.iter();
        let sources = words
            .into_iter()
            .map(|word| match start(&word).and_then(|_| heredocs.next()) {
                Some(found) => Ok(CopySource::Inline {
                    name: found.name.clone(),
                    content: found.content.clone(),
                    expand: found.expand,
                }),
                None if unpack && is_remote(&word) => Err(Problem::unsupported(format!(
                    "ADD does not fetch {}: fetch it with RUN, or put it into the context",
                    shortened(&word)
                ))),
                None => Ok(CopySource::Path(word)),
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            from,
            chown,
            chmod,
            exclude,
            unpack,
            sources,
            to,
        })
    }

    pub(crate) fn expanded(&self, escape: char, variables: Variables<'_>) -> Result<Self, Problem> {
        let one = |text: &String| expand(text, escape, variables);
        let maybe = |text: &Option<String>| text.as_ref().map(one).transpose();
        let source = |source: &CopySource| -> Result<CopySource, Problem> {
            Ok(match source {
                CopySource::Path(path) => {
                    let path = one(path)?;
                    // The variable may hold an address.
                    if self.unpack && is_remote(&path) {
                        return Err(Problem::unsupported(format!(
                            "ADD does not fetch {}",
                            shortened(&path)
                        )));
                    }
                    CopySource::Path(path)
                }
                CopySource::Inline {
                    name,
                    content,
                    expand,
                } => CopySource::Inline {
                    name: name.clone(),
                    content: match expand {
                        true => expand_text(content, escape, variables)?,
                        false => content.clone(),
                    },
                    expand: false,
                },
            })
        };
        Ok(Self {
            from: maybe(&self.from)?,
            chown: maybe(&self.chown)?,
            chmod: maybe(&self.chmod)?,
            exclude: self.exclude.iter().map(one).collect::<Result<_, _>>()?,
            unpack: self.unpack,
            sources: self.sources.iter().map(source).collect::<Result<_, _>>()?,
            to: one(&self.to)?,
        })
    }

    /// The permissions that `--chmod` sets.
    pub fn mode(&self) -> Result<Option<u32>, Problem> {
        let Some(text) = &self.chmod else {
            return Ok(None);
        };
        match u32::from_str_radix(text, 8) {
            Ok(mode) if mode <= 0o7777 => Ok(Some(mode)),
            _ => Err(Problem::unsupported(format!(
                "--chmod takes octal digits such as 755, not {}",
                shortened(text)
            ))),
        }
    }
}

/// Whether a source of `ADD` names another host.
fn is_remote(source: &str) -> bool {
    let source = source.trim_start_matches(['"', '\'']);
    ["http://", "https://", "git://", "git@", "ssh://", "ftp://"]
        .iter()
        .any(|prefix| source.starts_with(prefix))
}
