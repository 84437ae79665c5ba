//! Whole Dockerfiles: those of the fixtures, and any text.

use forkd_dockerfile::{Command, CopySource, Kind, MountKind, Problem, RunNetwork, parse};
use proptest::prelude::*;

fn fixture(name: &str) -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/");
    std::fs::read_to_string(format!("{path}{name}")).unwrap()
}

#[test]
fn fixtures_with_supported_instructions_parse() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/supported");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let file = parse(&std::fs::read_to_string(&path).unwrap());
        assert!(file.is_ok(), "{}: {}", path.display(), file.unwrap_err());
        count += 1;
    }
    assert!(count >= 6, "{count}");
}

#[test]
fn fixtures_with_other_instructions_are_refused_by_line() {
    // Each case is a Dockerfile behind a line `=== LINE TEXT`: where it is refused, and a part of the reason.
    let all = fixture("refused.txt");
    let mut count = 0;
    for case in all.split("=== ").skip(1) {
        let (head, text) = case.split_once('\n').unwrap();
        let (line, reason) = head.split_once(' ').unwrap();
        let error = parse(text).expect_err(text);
        assert_eq!(error.line.to_string(), line, "{error}\n{text}");
        assert!(error.to_string().contains(reason), "{error}\n{text}");
        count += 1;
    }
    assert!(count >= 15, "{count}");
}

#[test]
fn stages_are_found_by_name_and_number() {
    let file = parse(&fixture("supported/stages")).unwrap();
    assert_eq!(file.stage("build", 2), Some(0));
    assert_eq!(file.stage("BUILD", 2), Some(0));
    assert_eq!(file.stage("1", 2), Some(1));
    assert_eq!(file.stage("2", 2), None);
    assert_eq!(file.stage("build", 0), None);
    assert_eq!(file.arguments[0].1, "BASE");
    assert!(file.uses_context());
}

#[test]
fn mounts_and_here_documents_are_read() {
    let file = parse(&fixture("supported/mounts")).unwrap();
    let kinds = || file.stages[0].instructions.iter().map(|one| &one.kind);
    let runs: Vec<_> = kinds()
        .filter_map(|kind| match kind {
            Kind::Run(step) => Some(step),
            _ => None,
        })
        .collect();
    assert!(matches!(
        &runs[0].mounts[0].kind,
        MountKind::Cache {
            id: None,
            read_only: false
        }
    ));
    assert!(matches!(
        &runs[0].mounts[1].kind,
        MountKind::Secret { id, required: true, env: None } if id == "token"
    ));
    assert_eq!(runs[1].network, RunNetwork::None);
    assert!(matches!(&runs[2].command, Command::Script(text) if text.starts_with("#!/bin/sh\n")));
    assert!(matches!(&runs[3].command, Command::Shell(text) if text == "echo one\necho two\n"));
    assert!(
        matches!(&runs[4].command, Command::Shell(text) if text == "cat <<A >/a\none $HOME\nA"),
        "{:?}",
        runs[4]
    );
    let copy = kinds().find_map(|kind| match kind {
        Kind::Copy(copy) => Some(copy),
        _ => None,
    });
    let CopySource::Inline { name, content, .. } = &copy.unwrap().sources[0] else {
        panic!("{copy:?}")
    };
    assert_eq!((name.as_str(), content.as_str()), ("conf", "a = 1\n"));
}

#[test]
fn variables_are_expanded_where_docker_does() {
    let text = "FROM a\nENV A=\"$X y\" B=$X\nWORKDIR /$X\nRUN echo $X\nCOPY $X ${X}s/\nCMD $X";
    let file = parse(text).unwrap();
    let value = |name: &str| (name == "X").then(|| "v".to_owned());
    let all: Vec<_> = file.stages[0]
        .instructions
        .iter()
        .map(|one| one.expanded('\\', &value).unwrap().kind)
        .collect();
    let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    assert_eq!(all[0], Kind::Env(vec![pair("A", "v y"), pair("B", "v")]));
    assert_eq!(all[1], Kind::Workdir("/v".into()));
    assert!(matches!(&all[2], Kind::Run(step) if step.command == Command::Shell("echo $X".into())));
    assert!(matches!(&all[3], Kind::Copy(copy) if copy.to == "vs/"));
    assert_eq!(all[4], Kind::Cmd(Command::Shell("$X".into())));
    let bad = parse("FROM a\n\nUSER ${X:?no}").unwrap();
    let error = bad.stages[0].instructions[0].expanded('\\', &|_| None);
    let error = error.unwrap_err();
    assert!(error.line == 3 && matches!(error.problem, Problem::Expand(_)));
}

fn instruction() -> impl Strategy<Value = String> {
    let names = "(?i)(from|run|copy|add|env|arg|label|cmd|entrypoint|shell|user|workdir|expose|volume|healthcheck|onbuild|#)";
    let rests = r#"([a-z$/.=\[\]"',<{}\\-]|--mount=type=|--from=|<<E|\n|  ?){0,30}"#;
    (names, rests).prop_map(|(name, rest)| format!("{name} {rest}"))
}

proptest! {
    #[test]
    fn any_text_is_parsed_or_refused_by_line(text in any::<String>()) {
        if let Err(error) = parse(&text) {
            prop_assert!((1..=text.lines().count().max(1)).contains(&(error.line as usize)));
        }
    }

    #[test]
    fn texts_that_look_like_dockerfiles_are_parsed_or_refused_by_line(
        lines in prop::collection::vec(instruction(), 0..12)
    ) {
        let text = format!("FROM a\n{}\n", lines.join("\n"));
        match parse(&text) {
            Ok(file) => {
                for one in file.stages.iter().flat_map(|stage| &stage.instructions) {
                    let _ = one.expanded('\\', &|_| Some("x".to_owned()));
                }
            }
            Err(error) => prop_assert!(
                (1..=text.lines().count()).contains(&(error.line as usize)),
                "{} {}", error, text
            ),
        }
    }

    #[test]
    fn an_instruction_keeps_its_line(above in 0usize..20, comments in 0usize..5) {
        let text = format!("FROM a\n{}{}RUN \\\n{}  true\n", "\n".repeat(above), "# x\n".repeat(comments), "# y\n".repeat(comments));
        let file = parse(&text).unwrap();
        let one = &file.stages[0].instructions[0];
        prop_assert_eq!(one.line as usize, 2 + above + comments);
        prop_assert!(matches!(&one.kind, Kind::Run(step) if step.command == Command::Shell("true".into())));
    }
}
