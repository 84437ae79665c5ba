//! The server: answers the requests of one client.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use forkd_rest_client::Client;
use http::request::Parts;
use rmcp::model::{
    CacheScope, CallToolRequestParams, CallToolResponse, CallToolResult, CompleteRequestParams,
    CompleteResult, GetPromptRequestParams, GetPromptResponse, Implementation, ListPromptsResult,
    ListResourceTemplatesResult, ListResourcesResult, ListToolsResult, PaginatedRequestParams,
    ProgressNotificationParam, ReadResourceRequestParams, ReadResourceResponse, ServerCapabilities,
    ServerConfig, Tool,
};
use rmcp::service::{RequestContext, RoleServer};
use rmcp::{ErrorData, ServerHandler};
use tokio::time::{Instant, MissedTickBehavior};

use crate::call::Call;
use crate::options::Options;
use crate::refusal::Refusal;
use crate::tool::Spec;
use crate::{completion, prompts, resources, tools};

/// Time between two progress messages of one call.
const TICK: Duration = Duration::from_secs(1);
/// How long a client may keep the list of tools, in milliseconds: it changes with the program only.
const LIST_TTL: u64 = 3_600_000;

const INSTRUCTIONS: &str = "forkd runs code in isolated Linux microVMs (sandboxes) that start in milliseconds from a \
frozen machine (snapshot). Begin with list_snapshots and spawn_sandboxes. Before a risky step use checkpoint, and \
rollback if it went wrong. To try several ways from one state use fork_sandbox. Delete sandboxes with kill_sandbox \
when they are no longer needed; they are deleted by themselves after their time.";

/// The daemon of a call.
#[derive(Clone)]
enum Daemon {
    /// The same client for all calls.
    One(Client),
    /// A client made from the HTTP request that carried the call: it acts for the sender of that request.
    OfRequest(Arc<dyn Fn(&Parts) -> Client + Send + Sync>),
}

impl fmt::Debug for Daemon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::One(_) => "One",
            Self::OfRequest(_) => "OfRequest",
        })
    }
}

/// The tools of forkd as an MCP server.
#[derive(Debug, Clone)]
pub struct Tools {
    daemon: Daemon,
    options: Arc<Options>,
}

impl Tools {
    /// A server whose calls all use one client.
    pub fn new(client: Client, options: Options) -> Self {
        Self {
            daemon: Daemon::One(client),
            options: Arc::new(options),
        }
    }

    /// A server whose calls act for the sender of their HTTP request.
    pub(crate) fn of_requests(
        client: Arc<dyn Fn(&Parts) -> Client + Send + Sync>,
        options: Arc<Options>,
    ) -> Self {
        Self {
            daemon: Daemon::OfRequest(client),
            options,
        }
    }

    fn client(&self, context: &RequestContext<RoleServer>) -> Result<Client, ErrorData> {
        match &self.daemon {
            Daemon::One(client) => Ok(client.clone()),
            Daemon::OfRequest(make) => match context.extensions.get::<Parts>() {
                Some(parts) => Ok(make(parts)),
                None => Err(ErrorData::internal_error("the request has no sender", None)),
            },
        }
    }

    fn tool(&self, name: &str) -> Option<&'static Spec> {
        tools::find(name).filter(|tool| self.options.offers(tool))
    }

    /// Every tool that the prompt names is offered.
    fn offers(&self, prompt: &prompts::Spec) -> bool {
        prompt.tools.iter().all(|name| self.tool(name).is_some())
    }
}

/// Sends progress messages until the call ends, if the client asked for them.
async fn progress(call: &Call<'_>, context: &RequestContext<RoleServer>) {
    let Some(token) = context.meta.get_progress_token() else {
        return std::future::pending().await;
    };
    let begin = Instant::now();
    let mut ticks = tokio::time::interval_at(begin + TICK, TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let mut message =
            ProgressNotificationParam::new(token.clone(), begin.elapsed().as_secs_f64());
        let note = call.newest_note();
        message.message = (!note.is_empty()).then_some(note);
        // A client that went away ends the call by other means.
        let _ = context.peer.notify_progress(message).await;
    }
}

impl ServerHandler for Tools {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder()
            .enable_tools()
            .enable_resources()
            .enable_prompts()
            .enable_completions()
            .build();
        ServerConfig::new(capabilities)
            .with_server_info(
                Implementation::new("forkd", env!("CARGO_PKG_VERSION")).with_title("forkd"),
            )
            .with_instructions(INSTRUCTIONS)
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let offered = tools::all().iter().filter(|tool| self.options.offers(tool));
        let offered = offered.map(|tool| tool.listed.clone()).collect();
        Ok(ListToolsResult::with_all_items(offered)
            .with_ttl_ms(LIST_TTL)
            .with_cache_scope(CacheScope::Private))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        self.tool(name).map(|tool| tool.listed.clone())
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let Some(tool) = self.tool(&request.name) else {
            let name: String = request.name.chars().take(64).collect();
            return Err(ErrorData::invalid_params(
                format!("there is no tool {name:?}"),
                None,
            ));
        };
        let client = self.client(&context)?;
        let call = Call::new(&client, &self.options);
        let result = tokio::select! {
            result = (tool.run)(&call, request.arguments.unwrap_or_default()) => result,
            // Dropping the call closes its connection to the daemon, which kills the command.
            () = context.ct.cancelled() => Err(Refusal {
                error: "the call was cancelled".to_owned(),
                code: "cancelled",
                hint: None,
            }),
            () = progress(&call, &context) => Err(Refusal::invalid("progress ended")),
        };
        let result = match result {
            Ok(value) => CallToolResult::structured(value),
            Err(refusal) => {
                CallToolResult::structured_error(serde_json::to_value(&refusal).unwrap_or_default())
            }
        };
        Ok(result.into())
    }

    async fn list_prompts(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        let offered = prompts::ALL.iter().filter(|prompt| self.offers(prompt));
        let offered = offered.map(prompts::Spec::listed).collect();
        Ok(ListPromptsResult::with_all_items(offered)
            .with_ttl_ms(LIST_TTL)
            .with_cache_scope(CacheScope::Private))
    }

    async fn get_prompt(
        &self,
        request: GetPromptRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<GetPromptResponse, ErrorData> {
        let Some(prompt) = prompts::find(&request.name).filter(|prompt| self.offers(prompt)) else {
            let name: String = request.name.chars().take(64).collect();
            return Err(ErrorData::invalid_params(
                format!("there is no prompt {name:?}"),
                None,
            ));
        };
        Ok(prompt.fill(request.arguments.as_ref())?.into())
    }

    async fn complete(
        &self,
        request: CompleteRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CompleteResult, ErrorData> {
        let client = self.client(&context)?;
        let call = Call::new(&client, &self.options);
        let chosen = completion::complete(&call, &request.r#ref, &request.argument).await?;
        Ok(CompleteResult::new(chosen))
    }

    async fn list_resources(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        Ok(ListResourcesResult::with_all_items(resources::fixed())
            .with_ttl_ms(LIST_TTL)
            .with_cache_scope(CacheScope::Private))
    }

    async fn list_resource_templates(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        Ok(
            ListResourceTemplatesResult::with_all_items(resources::templates())
                .with_ttl_ms(LIST_TTL)
                .with_cache_scope(CacheScope::Private),
        )
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let client = self.client(&context)?;
        let call = Call::new(&client, &self.options);
        let read = tokio::select! {
            read = resources::read(&call, &request.uri) => read?,
            () = context.ct.cancelled() => {
                return Err(ErrorData::internal_error("the request was cancelled", None));
            }
        };
        Ok(read
            .with_ttl_ms(0)
            .with_cache_scope(CacheScope::Private)
            .into())
    }
}
