//! Messages for invalid and missing input to every command and flag. `tests/golden/usage.txt` holds all of it; with
//! `FORKD_UPDATE_GOLDEN=1` it is written anew, to be read before it is committed.

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

/// Ends every command line, so that one with an acceptable value is refused, too, and nothing runs.
const UNKNOWN: &str = "--no-such-flag";

fn forkd(args: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_forkd"))
        .args(args)
        .env_clear()
        .env("HOME", "/nonexistent")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (
        output.status.code().expect("it ended by itself"),
        text(output.stdout),
        text(output.stderr),
    )
}

fn help(command: &[&str]) -> String {
    let mut args = command.to_vec();
    args.push("--help");
    let (code, stdout, stderr) = forkd(&args);
    assert_eq!((code, stderr.as_str()), (0, ""), "{command:?} --help");
    stdout
}

/// The first words of the lines below a heading of a help text.
fn listed<'a>(help: &'a str, heading: &str) -> Vec<&'a str> {
    help.lines()
        .skip_while(|line| *line != heading)
        .skip(1)
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.strip_prefix("  ")?.split_whitespace().next())
        .filter(|word| *word != "help" && !word.starts_with('-'))
        .collect()
}

/// All commands that have none below them.
fn commands() -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let mut open = vec![Vec::<String>::new()];
    while let Some(command) = open.pop() {
        let words: Vec<&str> = command.iter().map(String::as_str).collect();
        // Other programs parse what follows, and may not be built.
        if matches!(words.first(), Some(&("bench" | "gateway"))) {
            continue;
        }
        let text = help(&words);
        let below = listed(&text, "Commands:");
        if below.is_empty() {
            found.push(command);
            continue;
        }
        for name in below.into_iter().rev() {
            let mut next = command.clone();
            next.push(name.to_owned());
            open.push(next);
        }
    }
    found
}

/// The flags of a help text that take a value.
fn flags(help: &str) -> Vec<&str> {
    help.lines()
        .filter_map(|line| line.trim_start().strip_prefix('-'))
        .filter_map(|line| {
            line.find("--")
                .map_or_else(|| line.strip_prefix('-'), |at| line.get(at + 2..))
        })
        .filter_map(|line| line.split_once(" <").map(|(name, _)| name))
        .filter(|name| name.chars().all(|c| c.is_ascii_lowercase() || c == '-'))
        .collect()
}

#[test]
fn everything_wrong_is_answered_so_that_a_person_can_act_on_it() {
    let long = "x".repeat(5_000);
    let wrong = [
        ("empty", ""),
        ("spaces", "a b"),
        ("below", "-1"),
        ("above", "99999999999999999999"),
        ("long", &long),
    ];
    let mut found = String::new();
    let mut note = |args: &[&str], shown: &str| {
        let (code, _, stderr) = forkd(args);
        // `exec` takes everything after it for a command, and has nowhere to run it.
        assert!(
            code == 2 || code == 125 && shown.contains("exec"),
            "{shown}: {stderr}"
        );
        assert!(!stderr.contains("panicked"), "{shown}: {stderr}");
        // Another flag than the last one was at fault, or nothing was.
        let about_last = stderr.contains(UNKNOWN);
        if args.last() != Some(&UNKNOWN) || args.len() < 3 || !about_last {
            let text = stderr.replace(&long, "[5,000 x]");
            assert!(text.len() < 1_500, "{shown}: too long an answer: {text}");
            writeln!(found, "$ forkd {shown}\n{}\n", text.trim_end()).unwrap();
        }
    };
    note(&["no-such-command"], "no-such-command");
    for command in commands() {
        let words: Vec<&str> = command.iter().map(String::as_str).collect();
        let name = words.join(" ");
        note(
            &[&words[..], &[UNKNOWN]].concat(),
            &format!("{name} {UNKNOWN}"),
        );
        for flag in flags(&help(&words)) {
            let flag = format!("--{flag}");
            note(&[&words[..], &[&flag]].concat(), &format!("{name} {flag}"));
            for (kind, value) in wrong {
                let with = format!("{flag}={value}");
                note(
                    &[&words[..], &[&with, UNKNOWN]].concat(),
                    &format!("{name} {flag}=[{kind}]"),
                );
            }
        }
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/usage.txt");
    if std::env::var_os("FORKD_UPDATE_GOLDEN").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &found).unwrap();
    }
    let golden = std::fs::read_to_string(&path).unwrap();
    assert!(
        found == golden,
        "differs from {}: FORKD_UPDATE_GOLDEN=1 writes it anew",
        path.display()
    );
}
