//! The command line of an agent that is an ordinary process.

use std::ffi::OsString;

use crate::transport::Address;

/// The parsed command line.
#[derive(Debug, PartialEq, Eq)]
pub struct Args {
    pub listen: Address,
    pub token: Option<String>,
    /// A group of cgroup v2 that user processes join.
    pub cgroup: Option<std::path::PathBuf>,
}

impl Args {
    /// Reads `--listen ADDRESS`, `--token-file PATH` and `--cgroup DIRECTORY`.
    pub fn parse(arguments: impl Iterator<Item = OsString>) -> Result<Self, String> {
        let mut listen = None;
        let mut token = None;
        let mut cgroup = None;
        let mut arguments = arguments.map(|argument| argument.to_string_lossy().into_owned());
        while let Some(flag) = arguments.next() {
            let mut value = || {
                arguments
                    .next()
                    .ok_or_else(|| format!("{flag} needs a value"))
            };
            match flag.as_str() {
                "--listen" => listen = Some(value()?.parse()?),
                "--token-file" => {
                    let path = value()?;
                    let text = std::fs::read_to_string(&path)
                        .map_err(|error| format!("cannot read {path}: {error}"))?;
                    token = Some(text.trim().to_owned());
                }
                "--cgroup" => cgroup = Some(value()?.into()),
                _ => {
                    return Err(format!(
                        "unknown argument {flag}; usage: forkd-agent --listen ADDRESS [--token-file PATH] [--cgroup DIRECTORY]"
                    ));
                }
            }
        }
        let listen = listen.ok_or("--listen ADDRESS is needed")?;
        Ok(Self {
            listen,
            token,
            cgroup,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &[&str]) -> Result<Args, String> {
        Args::parse(arguments.iter().map(OsString::from))
    }

    #[test]
    fn arguments_are_read() {
        let args = parse(&["--listen", "unix:/x"]).unwrap();
        assert_eq!(
            args,
            Args {
                listen: Address::Unix("/x".into()),
                token: None,
                cgroup: None,
            }
        );
        for wrong in [&[][..], &["--listen"], &["--listen", "x"], &["--port", "1"]] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
