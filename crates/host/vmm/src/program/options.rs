//! The command line.
//!
//! Written by hand: two descriptors and a switch need no parser, and a VMM stays small.

use std::os::fd::RawFd;

use thiserror::Error;

/// Output of `--help`.
pub const USAGE: &str = "\
forkd-vmm: runs one microVM

Usage: forkd-vmm --control-fd FD [--no-seccomp]

It is started by forkd-spawn and takes its orders over the control socket. It opens no path: every
file, /dev/kvm included, comes as a descriptor over that socket.

Options:
  --control-fd FD   the connected SOCK_SEQPACKET socket that orders come over
  --no-seccomp      do not restrict system calls
  --self-test-jail  try to leave the jail of this host; print one line per attempt
  --help            print this
  --version         print the version

Exit status: 0 stopped or powered off, 10 reset, 11 guest panic, 12 vCPU failure,
20 control socket lost, 21 bad start, 70 internal error. A forbidden system call ends
the process with SIGSYS; in a debug build with status 148
";

/// A parsed command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Options {
    /// Print the usage.
    Help,
    /// Print the version.
    Version,
    /// Try the jail: from outside, or inside with a control socket.
    SelfTestJail { control_fd: Option<RawFd> },
    Run {
        /// The control socket.
        control_fd: RawFd,
        /// Restrict system calls.
        seccomp: bool,
    },
}

/// Why the command line is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum OptionsError {
    /// Not an option.
    #[error("{0:?} is not an option")]
    Unknown(String),
    /// An option without its descriptor.
    #[error("{0} needs the number of a descriptor")]
    NeedsFd(&'static str),
    /// Nothing to take orders from.
    #[error("--control-fd is missing")]
    NoControl,
}

impl Options {
    /// Reads the arguments after the program's name.
    pub fn parse(args: impl IntoIterator<Item = String>) -> Result<Self, OptionsError> {
        let (mut control_fd, mut seccomp, mut self_test) = (None, true, false);
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            let mut fd = |name| {
                args.next()
                    .and_then(|text| text.parse().ok())
                    .filter(|fd| *fd == 0 || *fd > 2)
                    .ok_or(OptionsError::NeedsFd(name))
            };
            match arg.as_str() {
                "--help" | "-h" => return Ok(Self::Help),
                "--version" | "-V" => return Ok(Self::Version),
                "--control-fd" => control_fd = Some(fd("--control-fd")?),
                "--no-seccomp" => seccomp = false,
                "--self-test-jail" => self_test = true,
                _ => return Err(OptionsError::Unknown(arg)),
            }
        }
        if self_test {
            return Ok(Self::SelfTestJail { control_fd });
        }
        Ok(Self::Run {
            control_fd: control_fd.ok_or(OptionsError::NoControl)?,
            seccomp,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, OptionsError> {
        Options::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn descriptors_are_numbers() {
        assert_eq!(
            parse("--control-fd 3"),
            Ok(Options::Run {
                control_fd: 3,
                seccomp: true
            })
        );
        for bad in [
            "",
            "--control-fd",
            "--control-fd x",
            "--control-fd 1",
            "--control-fd 3 --kvm-fd 4",
            "run",
        ] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }
}
