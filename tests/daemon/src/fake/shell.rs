//! The programs of a fake guest: enough of a shell for scenarios that must read the same on a real one.

use std::net::Ipv4Addr;
use std::time::Duration;

use forkd_guest_proto::ExecRequest;

use super::guest::Guest;
use super::net::Knock;

/// A program that a fake guest can run.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Program {
    /// Prints, and ends with this code.
    Print(String, i32),
    /// Prints a file.
    Cat(String),
    /// Writes text to a file.
    Write(String, String),
    Sleep(Duration),
    /// Sends a TCP segment and prints the answer of the network.
    Knock(Knock, Ipv4Addr, u16),
    /// Powers the guest off.
    PowerOff,
}

/// The program a request names. One that a fake guest does not have ends with 127, as in a shell.
pub(super) fn program(request: &ExecRequest) -> Program {
    let words: Vec<&str> = match &request.shell {
        Some(line) => line.split_whitespace().collect(),
        None => match request.argv.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            [shell, "-c", line] if shell.ends_with("sh") => line.split_whitespace().collect(),
            ref argv => argv.to_vec(),
        },
    };
    let Some((name, args)) = words.split_first() else {
        return Program::Print(String::new(), 0);
    };
    match (name.rsplit('/').next().unwrap_or(name), args) {
        ("true" | "sync", _) => Program::Print(String::new(), 0),
        ("false", _) => Program::Print(String::new(), 1),
        ("cat", [path]) => Program::Cat((*path).to_owned()),
        ("sleep", [seconds]) => {
            Program::Sleep(Duration::from_secs_f64(seconds.parse().unwrap_or(0.0)))
        }
        ("poweroff", _) => Program::PowerOff,
        ("knock", [to, port]) => knock(Knock::Open, to, port),
        ("resume", [to, port]) => knock(Knock::Resume, to, port),
        ("echo", [text @ .., ">", path]) => {
            Program::Write((*path).to_owned(), format!("{}\n", text.join(" ")))
        }
        ("printenv", [name]) => {
            let mut variables = request.env.iter();
            let found = variables.find(|(key, _)| key == name);
            match found.and_then(|(_, value)| value.clone()) {
                Some(value) => Program::Print(value, 0),
                None => Program::Print(String::new(), 1),
            }
        }
        ("echo", text) => Program::Print(format!("{}\n", text.join(" ")), 0),
        (other, _) => Program::Print(format!("{other}: not found\n"), 127),
    }
}

/// A segment for an address and a port.
fn knock(knock: Knock, to: &str, port: &str) -> Program {
    match (to.parse(), port.parse()) {
        (Ok(to), Ok(port)) => Program::Knock(knock, to, port),
        _ => Program::Print("no address\n".to_owned(), 2),
    }
}

/// Runs a program that only looks at the guest. Returns output and exit code.
pub(super) fn run(guest: &mut Guest, program: Program) -> (Vec<u8>, i32) {
    match program {
        Program::Print(text, code) => (text.into_bytes(), code),
        Program::Cat(path) => match guest.files.get(&path) {
            Some(content) => (content.clone(), 0),
            None => (Vec::new(), 1),
        },
        Program::Write(path, text) => {
            guest.files.insert(path, text.into_bytes());
            (Vec::new(), 0)
        }
        Program::Sleep(_) | Program::Knock(..) | Program::PowerOff => (Vec::new(), 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_line(guest: &mut Guest, argv: &[&str]) -> (String, i32) {
        let request = ExecRequest {
            argv: argv.iter().map(ToString::to_string).collect(),
            ..ExecRequest::default()
        };
        let (output, code) = run(guest, program(&request));
        (String::from_utf8(output).unwrap(), code)
    }

    #[test]
    fn text_that_is_written_is_read_back() {
        let mut guest = Guest::default();
        assert_eq!(
            run_line(&mut guest, &["sh", "-c", "echo one two > /a"]),
            (String::new(), 0)
        );
        assert_eq!(
            run_line(&mut guest, &["/bin/cat", "/a"]),
            ("one two\n".to_owned(), 0)
        );
        assert_eq!(run_line(&mut guest, &["cat", "/b"]).1, 1);
        assert_eq!(run_line(&mut guest, &["gcc"]).1, 127);
    }
}
