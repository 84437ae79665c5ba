//! The table of tools.

mod commands;
mod files;
mod forks;
mod processes;
mod sandboxes;
mod snapshots;
mod texts;
mod workspaces;

pub use files::read as read_file;

use std::sync::LazyLock;

use crate::tool::{Spec, spec};

static TABLE: LazyLock<Vec<Spec>> = LazyLock::new(|| {
    vec![
        spec::<snapshots::ListSnapshots>(),
        spec::<snapshots::CreateSnapshot>(),
        spec::<sandboxes::SpawnSandboxes>(),
        spec::<sandboxes::ListSandboxes>(),
        spec::<sandboxes::GetSandbox>(),
        spec::<sandboxes::KillSandbox>(),
        spec::<sandboxes::PingSandbox>(),
        spec::<commands::ExecCommand>(),
        spec::<commands::EvalCode>(),
        spec::<texts::WaitForText>(),
        spec::<forks::BranchSandbox>(),
        spec::<files::ReadFile>(),
        spec::<files::WriteFile>(),
        spec::<files::ListFiles>(),
        spec::<texts::EditFile>(),
        spec::<processes::StartProcess>(),
        spec::<processes::ReadProcess>(),
        spec::<processes::StopProcess>(),
        spec::<forks::ForkSandbox>(),
        spec::<forks::Checkpoint>(),
        spec::<forks::Rollback>(),
        spec::<forks::Explore>(),
        spec::<sandboxes::SetTimeout>(),
        spec::<sandboxes::PortUrl>(),
        spec::<snapshots::SnapshotInfo>(),
        spec::<snapshots::DeleteSnapshot>(),
        spec::<workspaces::ListWorkspaces>(),
        spec::<workspaces::CreateWorkspace>(),
        spec::<workspaces::SuspendWorkspace>(),
        spec::<workspaces::ResumeWorkspace>(),
        spec::<workspaces::DeleteWorkspace>(),
    ]
});

/// Every tool, in the order in which clients see them.
pub fn all() -> &'static [Spec] {
    &TABLE
}

/// The names of all tools.
pub fn names() -> Vec<&'static str> {
    all().iter().map(|tool| tool.name).collect()
}

/// The tool of a name.
pub fn find(name: &str) -> Option<&'static Spec> {
    all().iter().find(|tool| tool.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tool::Set;
    use serde_json::Value;

    /// Names and arguments of the published package: a client that was written for it must find all of them.
    const PUBLISHED: &[(&str, &[&str])] = &[
        ("list_snapshots", &[]),
        (
            "spawn_sandboxes",
            &[
                "snapshot_tag",
                "n",
                "per_child_netns",
                "memory_limit_mib",
                "prewarm",
                "live_fork",
            ],
        ),
        (
            "branch_sandbox",
            &["sandbox_id", "tag", "diff", "measure_diff", "mode", "wait"],
        ),
        (
            "create_snapshot",
            &["tag", "kernel", "rootfs", "rw", "tap", "boot_wait_secs"],
        ),
        (
            "wait_for_text",
            &[
                "sandbox_id",
                "path",
                "marker",
                "timeout_secs",
                "poll_interval_ms",
            ],
        ),
        ("list_sandboxes", &[]),
        ("get_sandbox", &["sandbox_id"]),
        ("kill_sandbox", &["sandbox_id"]),
        ("exec_command", &["sandbox_id", "args", "timeout_secs"]),
        ("eval_code", &["sandbox_id", "code"]),
        ("ping_sandbox", &["sandbox_id"]),
    ];

    #[test]
    fn the_published_names_and_arguments_exist() {
        let compat = all().iter().filter(|tool| tool.set == Set::Compat);
        assert_eq!(compat.count(), PUBLISHED.len());
        for (name, arguments) in PUBLISHED {
            let tool = find(name).unwrap();
            assert_eq!(tool.set, Set::Compat, "{name}");
            for argument in *arguments {
                let known = &tool.listed.input_schema["properties"][*argument];
                assert!(known.is_object(), "{name} has no argument {argument}");
            }
        }
    }

    /// A schema is shown to a model: every argument must be described, and unknown ones must be refused.
    #[test]
    fn schemas_describe_every_argument() {
        for tool in all() {
            let schema = &tool.listed.input_schema;
            assert_eq!(schema["type"], "object", "{}", tool.name);
            assert_eq!(schema["additionalProperties"], false, "{}", tool.name);
            let none = serde_json::Map::new();
            let arguments = schema
                .get("properties")
                .and_then(Value::as_object)
                .unwrap_or(&none);
            for (argument, about) in arguments {
                let text = about["description"].as_str().unwrap_or_default();
                assert!(text.len() > 8, "{}: {argument} has no text", tool.name);
            }
            let output = tool.listed.output_schema.as_ref().unwrap();
            assert_eq!(output["type"], "object", "{}", tool.name);
        }
    }

    #[test]
    fn names_are_unique() {
        let mut names = names();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all().len());
    }
}
