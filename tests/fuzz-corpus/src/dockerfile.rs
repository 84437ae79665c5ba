//! Dockerfiles and `.dockerignore` files of strangers.

use forkd_dockerfile::{Ignore, limits, parse};

/// Parses text as both kinds of files. A Dockerfile that is refused names one of its lines, and an expansion has a limit.
pub fn file(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Ok(ignore) = Ignore::parse(&text) {
        for line in text.lines().take(8) {
            let _ = ignore.ignores(line);
        }
    }
    let lines = text.lines().count().max(1);
    let file = match parse(&text) {
        Ok(file) => file,
        Err(error) => {
            assert!((1..=lines).contains(&(error.line as usize)), "{error}");
            return;
        }
    };
    assert!(file.stages.len() <= limits::STAGES);
    let value = |name: &str| {
        name.len()
            .is_multiple_of(2)
            .then(|| format!("{name}.{name}"))
    };
    for stage in &file.stages {
        for instruction in &stage.instructions {
            if let Err(error) = instruction.expanded(file.escape, &value) {
                assert_eq!(error.line, instruction.line);
            }
        }
    }
}
