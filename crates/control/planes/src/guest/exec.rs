//! Programs: how a request becomes one, and how its end is shown.

use std::collections::BTreeMap;

use forkd_api::ErrorCode;
use forkd_guest_proto as guest;
use forkd_sandboxes::error::Error;

/// The most arguments.
pub const MAX_ARGS: usize = 4096;

/// A program that a client wants to run.
#[derive(Debug, Clone)]
pub struct Program<'a> {
    pub args: &'a [String],
    pub env: &'a BTreeMap<String, String>,
    pub cwd: Option<&'a str>,
    pub user: Option<&'a str>,
}

const NO_ENV: &BTreeMap<String, String> = &BTreeMap::new();

impl Program<'_> {
    /// A program with these arguments and nothing else.
    pub fn of(args: &[String]) -> Program<'_> {
        Program {
            args,
            env: NO_ENV,
            cwd: None,
            user: None,
        }
    }
}

/// The program as the agent takes it, with the environment of its sandbox below its own.
pub fn wish(
    program: &Program<'_>,
    of_sandbox: &BTreeMap<String, String>,
) -> Result<guest::ExecRequest, Error> {
    let bad = |message: String| Error::refused(ErrorCode::InvalidRequest, message);
    if program.args.is_empty() || program.args.len() > MAX_ARGS {
        return Err(bad(format!(
            "args has 1 to {MAX_ARGS} entries: a program and its arguments"
        )));
    }
    let words = program.args.iter().map(String::as_str);
    let names = program.env.iter().flat_map(|(k, v)| [k.as_str(), v]);
    let rest = [program.cwd, program.user].into_iter().flatten();
    if words
        .chain(names)
        .chain(rest)
        .any(|text| text.contains('\0'))
    {
        return Err(bad("an argument holds a zero byte".into()));
    }
    Ok(guest::ExecRequest {
        argv: program.args.to_vec(),
        env: environment(of_sandbox, program.env),
        cwd: program.cwd.map(str::to_owned),
        user: program.user.map(str::to_owned),
        ..guest::ExecRequest::default()
    })
}

/// Variables as the agent takes them; those that come last win.
pub fn environment(
    of_sandbox: &BTreeMap<String, String>,
    own: &BTreeMap<String, String>,
) -> Vec<(String, Option<String>)> {
    let mut all: BTreeMap<&String, &String> = of_sandbox.iter().collect();
    all.extend(own);
    all.into_iter()
        .map(|(key, value)| (key.clone(), Some(value.clone())))
        .collect()
}

/// A command's status in the one number clients expect: negative is a signal.
pub fn exit_code(status: guest::ExitStatus) -> i64 {
    match status {
        guest::ExitStatus::Code(code) => i64::from(code),
        guest::ExitStatus::Signal(signal) => -i64::from(signal),
    }
}

/// A program that cannot be run is an answer, not a failure of the daemon: the exit code that a shell gives, and
/// the reason as what was written to stderr.
pub fn not_started(
    error: forkd_agent_client::Error,
    args: &[String],
) -> Result<(i64, String), Error> {
    let program = args.first().map_or("", String::as_str);
    match error {
        forkd_agent_client::Error::Agent(refused)
            if refused.code == guest::ErrorCode::ExecFailed =>
        {
            let missing = refused.errno == Some(rustix::io::Errno::NOENT.raw_os_error());
            let code = if missing { 127 } else { 126 };
            Ok((code, format!("{}\n", refused.message)))
        }
        error => Err(Error::agent(format!("{program:?} could not be run"))(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_of_the_request_wins_over_one_of_the_sandbox() {
        let of_sandbox = BTreeMap::from([("A".into(), "1".into()), ("B".into(), "1".into())]);
        let own = BTreeMap::from([("B".into(), "2".into())]);
        let args = ["true".to_owned()];
        let program = Program {
            env: &own,
            ..Program::of(&args)
        };
        let found = wish(&program, &of_sandbox).unwrap().env;
        let expected = [
            ("A".to_owned(), Some("1".to_owned())),
            ("B".into(), Some("2".into())),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_zero_byte_is_refused() {
        let args = ["echo".to_owned(), "a\0b".to_owned()];
        assert!(wish(&Program::of(&args), &BTreeMap::new()).is_err());
        assert!(wish(&Program::of(&[]), &BTreeMap::new()).is_err());
    }
}
