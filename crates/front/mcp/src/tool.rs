//! The description of a tool, and the table entry that is made of it.

use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use rmcp::handler::server::common::{schema_for_input, schema_for_output};
use rmcp::model::{JsonObject, Tool as Listed, ToolAnnotations};
use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::call::Call;
use crate::refusal::Refusal;

/// A set of tools. Each set includes the ones before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Set {
    /// The names and arguments of the published `forkd-mcp` package.
    Compat,
    /// Also files, background processes, live forks, checkpoints.
    Core,
    /// Every tool there is.
    All,
}

impl Set {
    /// The name of the set.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Compat => "compat",
            Self::Core => "core",
            Self::All => "all",
        }
    }
}

/// The effect of a tool, as clients are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// The tool changes nothing.
    Reads,
    /// The tool makes something new.
    Adds,
    /// Runs code in a sandbox, which may change anything there and reach its network.
    Runs,
    /// Replaces or deletes something; a second call has no further effect.
    Replaces,
}

impl Effect {
    /// Whether the tool changes nothing.
    pub fn is_read(self) -> bool {
        self == Self::Reads
    }

    fn annotations(self, title: &str) -> ToolAnnotations {
        ToolAnnotations::with_title(title)
            .read_only(self == Self::Reads)
            .destructive(matches!(self, Self::Runs | Self::Replaces))
            .idempotent(matches!(self, Self::Reads | Self::Replaces))
            .open_world(self == Self::Runs)
    }
}

/// A tool: texts, types, and the function that runs it.
pub trait Tool {
    /// Name by which clients call the tool.
    const NAME: &'static str;
    /// A short title for people.
    const TITLE: &'static str;
    /// When and how a model uses the tool.
    const ABOUT: &'static str;
    /// The smallest set with the tool.
    const SET: Set;
    /// The effect of the tool.
    const EFFECT: Effect;
    /// The arguments; their doc comments are the descriptions that a model reads.
    type Input: DeserializeOwned + JsonSchema + Send + 'static;
    /// The structured result of a call.
    type Output: Serialize + JsonSchema + 'static;

    /// Runs the tool. Dropping the future cancels the call and kills its command.
    fn run(
        call: &Call<'_>,
        input: Self::Input,
    ) -> impl Future<Output = Result<Self::Output, Refusal>> + Send;
}

type Run = for<'a> fn(&'a Call<'a>, JsonObject) -> BoxFuture<'a, Result<Value, Refusal>>;

/// An entry of the table of tools.
#[derive(Debug)]
pub struct Spec {
    /// Name by which clients call the tool.
    pub name: &'static str,
    /// The smallest set with the tool.
    pub set: Set,
    /// The effect of the tool.
    pub effect: Effect,
    /// The tool as `tools/list` shows it.
    pub listed: Listed,
    /// Parses the arguments and runs the tool.
    pub run: Run,
}

/// The table entry of a tool.
pub fn spec<T: Tool>() -> Spec {
    let listed = Listed::new(
        T::NAME,
        T::ABOUT,
        schema_for_input::<T::Input>().unwrap_or_else(|_| Arc::new(JsonObject::new())),
    )
    .with_title(T::TITLE)
    .with_raw_output_schema(schema_for_output::<T::Output>())
    .with_annotations(T::EFFECT.annotations(T::TITLE));
    Spec {
        name: T::NAME,
        set: T::SET,
        effect: T::EFFECT,
        listed,
        run: run::<T>,
    }
}

fn run<'a, T: Tool>(
    call: &'a Call<'a>,
    arguments: JsonObject,
) -> BoxFuture<'a, Result<Value, Refusal>> {
    async move {
        let input = serde_json::from_value(Value::Object(arguments)).map_err(|error| {
            Refusal::invalid(format!("the arguments of {} are invalid: {error}", T::NAME))
        })?;
        let output = T::run(call, input).await?;
        serde_json::to_value(output).map_err(|error| {
            Refusal::new(
                forkd_api::ErrorCode::Internal,
                format!("the result cannot be written: {error}"),
            )
        })
    }
    .boxed()
}
