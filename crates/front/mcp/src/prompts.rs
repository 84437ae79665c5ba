//! Prompts: instructions that a user picks from a menu of the client, with arguments filled in.
//!
//! A prompt describes a way of work that forkd makes cheap. It is offered if every tool that it names is offered.

use rmcp::ErrorData;
use rmcp::model::{GetPromptResult, JsonObject, Prompt, PromptArgument, PromptMessage, Role};

/// Characters of an argument.
const MAX_ARGUMENT: usize = 32 << 10;

/// An argument of a prompt.
#[derive(Debug)]
struct Argument {
    name: &'static str,
    description: &'static str,
    required: bool,
}

/// A prompt with its text. `{name}` in the text stands for an argument.
#[derive(Debug)]
pub struct Spec {
    pub name: &'static str,
    title: &'static str,
    description: &'static str,
    arguments: &'static [Argument],
    /// The tools that the text names.
    pub tools: &'static [&'static str],
    text: &'static str,
}

const TASK: Argument = Argument {
    name: "task",
    description: "The task to carry out",
    required: true,
};
const SNAPSHOT: Argument = Argument {
    name: "snapshot",
    description: "The tag of the snapshot to start from; without it, the model chooses one",
    required: false,
};

pub const ALL: &[Spec] = &[
    Spec {
        name: "try_in_sandbox",
        title: "Try it in a sandbox",
        description: "Carry out a task in a machine of its own, and report the outcome",
        arguments: &[TASK, SNAPSHOT],
        tools: &[
            "list_snapshots",
            "spawn_sandboxes",
            "exec_command",
            "kill_sandbox",
        ],
        text: "Carry out this task in a forkd sandbox, not on this computer:\n\n{task}\n\n\
            1. Start one sandbox with spawn_sandboxes. Snapshot: {snapshot}. If none is given, choose one from \
            list_snapshots.\n\
            2. Work with exec_command and look at the results before you go on.\n\
            3. Report the outcome with the commands that show it, and delete the sandbox with kill_sandbox.",
    },
    Spec {
        name: "explore_ways",
        title: "Explore several ways",
        description: "Prepare one machine, fork it for each way, compare, and keep the best",
        arguments: &[
            TASK,
            Argument {
                name: "ways",
                description: "The number of ways, or a list of them; 3 if it is left out",
                required: false,
            },
            SNAPSHOT,
        ],
        tools: &[
            "list_snapshots",
            "spawn_sandboxes",
            "exec_command",
            "fork_sandbox",
            "kill_sandbox",
        ],
        text: "Solve this task by comparing several ways in forkd sandboxes:\n\n{task}\n\nWays: {ways}.\n\n\
            1. Start one sandbox with spawn_sandboxes (snapshot: {snapshot}; if none is given, choose one from \
            list_snapshots) and prepare everything that all ways share.\n\
            2. Call fork_sandbox with the number of ways. Each copy goes on from this very state.\n\
            3. Try one way in each copy with exec_command, and measure all of them with the same command.\n\
            4. Keep the copy with the best result, delete the others with kill_sandbox, and report the comparison.",
    },
    Spec {
        name: "undo_on_failure",
        title: "Work with undo",
        description: "Take a checkpoint before each risky step, and roll back if the step fails",
        arguments: &[
            TASK,
            Argument {
                name: "sandbox_id",
                description: "The sandbox to work in",
                required: true,
            },
        ],
        tools: &["checkpoint", "rollback", "exec_command"],
        text: "Carry out this task in the forkd sandbox {sandbox_id}:\n\n{task}\n\n\
            Work with exec_command. Before each step that may break something, call checkpoint. If the step fails, \
            call rollback: memory, processes and files are then as they were. Do not repair a broken state by hand. \
            Report which steps you rolled back, and why.",
    },
];

/// The prompt of a name.
pub fn find(name: &str) -> Option<&'static Spec> {
    ALL.iter().find(|prompt| prompt.name == name)
}

impl Spec {
    /// The prompt as lists show it.
    pub fn listed(&self) -> Prompt {
        let arguments = self.arguments.iter().map(|argument| {
            PromptArgument::new(argument.name)
                .with_description(argument.description)
                .with_required(argument.required)
        });
        Prompt::new(self.name, Some(self.description), Some(arguments.collect()))
            .with_title(self.title)
    }

    /// The message of the prompt with its arguments. Arguments are replaced once: a value that looks like the name of
    /// an argument stays as it is.
    pub fn fill(&self, given: Option<&JsonObject>) -> Result<GetPromptResult, ErrorData> {
        let refuse = |name: &str, why: &str| {
            let message = format!("the argument {name} of the prompt {} {why}", self.name);
            Err(ErrorData::invalid_params(message, None))
        };
        for name in given.into_iter().flat_map(|given| given.keys()) {
            if !self.arguments.iter().any(|argument| argument.name == name) {
                let name: String = name.chars().take(64).collect();
                return refuse(&name, "does not exist");
            }
        }
        let mut text = String::new();
        let mut rest = self.text;
        while let Some((before, after)) = rest.split_once('{') {
            let (name, after) = after.split_once('}').unwrap_or((after, ""));
            let argument = self.arguments.iter().find(|argument| argument.name == name);
            let value = match given.and_then(|given| given.get(name)) {
                Some(value) => match value.as_str() {
                    Some(value) if value.chars().count() <= MAX_ARGUMENT => value,
                    Some(_) => return refuse(name, "is longer than 32,768 characters"),
                    None => return refuse(name, "is not a text"),
                },
                None if argument.is_some_and(|argument| argument.required) => {
                    return refuse(name, "is missing");
                }
                None if name == "ways" => "3",
                None => "none given",
            };
            text.push_str(before);
            text.push_str(value);
            rest = after;
        }
        text.push_str(rest);
        let message = PromptMessage::new_text(Role::User, text);
        Ok(GetPromptResult::new(vec![message]).with_description(self.description))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn filled(name: &str, arguments: Value) -> Result<String, ErrorData> {
        let prompt = find(name).unwrap().fill(arguments.as_object())?;
        let value = serde_json::to_value(prompt).unwrap();
        Ok(value["messages"][0]["content"]["text"]
            .as_str()
            .unwrap()
            .to_owned())
    }

    #[test]
    fn every_argument_is_in_the_text_and_every_tool_exists() {
        for prompt in ALL {
            for argument in prompt.arguments {
                let name = format!("{{{}}}", argument.name);
                assert!(prompt.text.contains(&name), "{}: {name}", prompt.name);
            }
            let holes = prompt.text.matches('{').count();
            assert_eq!(holes, prompt.arguments.len(), "{}", prompt.name);
            for tool in prompt.tools {
                assert!(crate::tools::find(tool).is_some(), "{tool}");
                assert!(prompt.text.contains(tool), "{tool}");
            }
        }
    }

    #[test]
    fn arguments_are_filled_in_once() {
        let text = filled("explore_ways", json!({"task": "sort {ways}"})).unwrap();
        assert!(text.contains("sort {ways}") && text.contains("Ways: 3."));
        let given = json!({"task": "t", "sandbox_id": "sb-1"});
        assert!(
            filled("undo_on_failure", given)
                .unwrap()
                .contains("sandbox sb-1")
        );
    }

    #[test]
    fn wrong_arguments_are_refused_by_name() {
        for (arguments, why) in [
            (json!({}), "task of the prompt try_in_sandbox is missing"),
            (json!({"task": 1}), "is not a text"),
            (json!({"task": "t", "x": "y"}), "x of the prompt"),
            (json!({"task": "t".repeat(MAX_ARGUMENT + 1)}), "longer"),
        ] {
            let error = filled("try_in_sandbox", arguments).unwrap_err();
            assert!(error.message.contains(why), "{}", error.message);
        }
    }
}
