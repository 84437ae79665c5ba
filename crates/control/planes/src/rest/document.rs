//! Refusals in the OpenAPI document: every route lists each status it can return and the error codes of that status.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use forkd_api::{ErrorCode, routes};
use utoipa::openapi::path::{Operation, Parameter, ParameterIn};
use utoipa::openapi::schema::{AdditionalProperties, ObjectBuilder, Type};
use utoipa::openapi::{Content, OpenApi, Ref, RefOr, Response, Schema};

use super::sandboxes::{MAX_LABEL_KEY, MAX_LABEL_VALUE, MAX_LABELS};
use forkd_edge::errors::status;
use forkd_edge::extract::MAX_BODY;

use ErrorCode as C;

/// Codes of a request to the agent in a guest.
const AGENT: &[C] = &[
    C::InvalidRequest,
    C::Unsupported,
    C::WrongState,
    C::SandboxGone,
    C::Busy,
    C::Timeout,
    C::AgentUnreachable,
    C::AgentFailed,
];
/// Codes of a request to a sandbox's owner.
const OWNER: &[C] = &[
    C::WrongState,
    C::SandboxGone,
    C::Busy,
    C::ShuttingDown,
    C::Timeout,
    C::NoSpace,
    C::LimitReached,
    C::LaunchFailed,
];
/// Codes of writing a snapshot.
const CUT: &[C] = &[C::AlreadyExists, C::SnapshotBroken, C::InvalidName];
/// Codes of starting VMs.
const LAUNCH: &[C] = &[
    C::ShuttingDown,
    C::LimitReached,
    C::LaunchFailed,
    C::SandboxGone,
    C::AgentUnreachable,
    C::AgentFailed,
    C::Timeout,
    C::NoSpace,
    C::SnapshotIncompatible,
    C::SnapshotBroken,
    C::Unsupported,
];
/// Codes of starting from a tag.
const FROM_TAG: &[C] = &[C::InvalidName, C::SnapshotNotFound, C::SnapshotNotReady];
/// Codes of a request with a network policy.
const NETWORK: &[C] = &[C::PolicyInvalid, C::NetworkUnavailable, C::SecretNotFound];
/// Codes of reading an artifact.
const ARTIFACT: &[C] = &[
    C::InvalidRequest,
    C::InvalidName,
    C::InvalidArtifact,
    C::DigestMismatch,
    C::UntrustedSignature,
    C::SnapshotIncompatible,
    C::NoSpace,
    C::LimitReached,
    C::Busy,
    C::ShuttingDown,
];
/// Codes of beginning to fetch an image. The operation itself can fail with more.
const IMAGE: &[C] = &[C::Busy, C::ShuttingDown];
const IDEMPOTENT: &[C] = &[C::InvalidRequest, C::IdempotencyMismatch, C::Busy];

/// The form of a tag and of every other name.
const NAME: &str = "^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$";
/// The form of a sandbox's id.
const ID: &str = "^sb(-[A-Za-z0-9-]{1,60}|[a-z0-9]{24,61})$";

/// Puts in what the routes have in common.
pub fn complete(document: &mut OpenApi) {
    if let Some(components) = &mut document.components {
        components.schemas.values_mut().for_each(limit_labels);
    }
    for (path, item) in &mut document.paths.paths {
        let operations = [
            ("get", &mut item.get),
            ("put", &mut item.put),
            ("post", &mut item.post),
            ("delete", &mut item.delete),
            ("patch", &mut item.patch),
        ];
        for (method, operation) in operations {
            if let Some(operation) = operation {
                name_operation(path, operation);
                name_items(path, operation);
                name_parameters(operation);
                let mut refusals: BTreeSet<(u16, C)> = codes(method, path, operation)
                    .into_iter()
                    .map(|code| (status(code).as_u16(), code))
                    .collect();
                refusals.extend(unusual(path, operation));
                add_refusals(operation, &refusals);
            }
        }
    }
}

/// The codes that an operation can be refused with.
fn codes(method: &str, path: &str, operation: &Operation) -> BTreeSet<C> {
    let mut codes = BTreeSet::from([C::RateLimited, C::Internal]);
    if path != routes::HEALTHZ {
        codes.extend([C::MissingToken, C::InvalidToken]);
    }
    if path != routes::HEALTHZ {
        // A role that does not suffice, or a web page of another origin.
        codes.insert(C::Forbidden);
    }
    if takes_json(operation) {
        codes.extend([C::InvalidRequest, C::TooLarge, C::UnsupportedMediaType]);
    }
    if method == "post" {
        codes.insert(C::UnsupportedMediaType);
    }
    if takes(operation, &ParameterIn::Query) || takes(operation, &ParameterIn::Path) {
        codes.insert(C::InvalidRequest);
    }
    if path.contains("{id}") {
        codes.insert(C::SandboxNotFound);
    }
    if operation.tags.iter().flatten().any(|tag| tag == "guest") {
        codes.extend(AGENT);
    }
    for part in of_route(method, path) {
        codes.extend(*part);
    }
    codes
}

/// Codes that a route can return besides those that follow from its form.
fn of_route(method: &str, path: &str) -> &'static [&'static [C]] {
    match (method, path) {
        ("post", routes::SNAPSHOTS) => &[
            CUT,
            LAUNCH,
            IDEMPOTENT,
            &[C::Forbidden, C::ImageNotFound, C::WrongState],
        ],
        ("post", routes::IMAGES) => &[IMAGE, &[C::InvalidName]],
        ("post", routes::IMAGES_ARCHIVE) => &[IMAGE, &[C::InvalidName]],
        ("post", routes::BUILDS) => &[
            IMAGE,
            NETWORK,
            &[C::InvalidRequest, C::InvalidName, C::NoSpace, C::TooLarge],
        ],
        ("get", routes::IMAGE_ARCHIVE) => &[
            IMAGE,
            CUT,
            LAUNCH,
            &[
                C::InvalidName,
                C::ImageNotFound,
                C::ImageInvalid,
                C::WrongState,
            ],
        ],
        ("post", routes::IMAGES_PRUNE) => &[&[C::NoSpace]],
        ("get", routes::IMAGE) => &[&[C::InvalidName, C::ImageNotFound]],
        ("delete", routes::IMAGE) => &[&[C::InvalidName, C::ImageNotFound]],
        ("get" | "delete", routes::OPERATION) => &[&[C::OperationNotFound]],
        ("get", routes::STATUS) => &[&[C::Busy]],
        ("post", routes::TOKENS) => &[&[C::InvalidName, C::AlreadyExists]],
        ("put", routes::SECRET) => &[&[
            C::InvalidRequest,
            C::InvalidName,
            C::LimitReached,
            C::NetworkUnavailable,
        ]],
        ("delete", routes::SECRET) => {
            &[&[C::InvalidName, C::SecretNotFound, C::NetworkUnavailable]]
        }
        ("delete", routes::TOKEN) => &[&[C::TokenNotFound, C::WrongState]],
        ("patch", routes::SNAPSHOT) => &[FROM_TAG, &[C::SnapshotBroken, C::WrongState]],
        ("delete", routes::SNAPSHOT) => &[
            FROM_TAG,
            &[C::HasDependents, C::SnapshotBroken, C::WrongState],
        ],
        ("get", routes::SNAPSHOT_INFO) => &[FROM_TAG, &[C::SnapshotBroken]],
        ("post", routes::SNAPSHOT_COMPACT) => &[
            FROM_TAG,
            CUT,
            &[C::ShuttingDown, C::NoSpace, C::LimitReached],
        ],
        ("post", routes::SNAPSHOT_PACK) => {
            &[FROM_TAG, ARTIFACT, &[C::SnapshotBroken, C::ContainsSecrets]]
        }
        ("post", routes::HUB_CHECK) => &[ARTIFACT],
        ("post", routes::HUB_UNPACK) => &[ARTIFACT, CUT, LAUNCH],
        ("post", routes::SANDBOXES) => &[FROM_TAG, LAUNCH, IDEMPOTENT, NETWORK, &[C::PortInUse]],
        ("get", routes::PORT_CONNECT) => &[&[C::PortClosed]],
        ("put" | "delete", routes::PORT) => &[OWNER, &[C::PortInUse]],
        ("delete", routes::SANDBOX) => &[OWNER],
        ("patch", routes::SANDBOX) => &[OWNER, NETWORK, &[C::Unsupported]],
        ("put" | "patch", routes::NETWORK) => &[OWNER, NETWORK],
        (_, routes::NETWORK_FLOWS | routes::NETWORK_LOG | routes::NETWORK_RESET) => {
            &[&[C::NetworkUnavailable]]
        }
        ("post", routes::BRANCH) => &[OWNER, CUT, IDEMPOTENT, &[C::Unsupported]],
        ("post", routes::FORK) => &[OWNER, CUT, LAUNCH, IDEMPOTENT, NETWORK],
        ("post", routes::PAUSE | routes::RESUME) => &[OWNER],
        ("get", routes::LOGS) => &[&[C::FileNotFound]],
        ("post", routes::CHECKPOINTS) | ("delete", routes::CHECKPOINT) => &[
            OWNER,
            &[C::Unsupported],
            &[C::InvalidName, C::CheckpointNotFound, C::AlreadyExists],
        ],
        ("post", routes::ROLLBACK) => &[
            OWNER,
            &[C::Unsupported],
            &[C::InvalidName, C::CheckpointNotFound],
            &[C::AgentUnreachable, C::AgentFailed],
        ],
        (_, path) if path.contains("/interpreters") => &[&[C::FileNotFound]],
        (_, path) if path.contains("/files") => &[&[C::FileNotFound, C::NoSpace]],
        (_, path) if path.contains("/processes") => &[&[C::ProcessNotFound, C::FileNotFound]],
        (_, routes::EXEC | routes::EXEC_STREAM | routes::EVAL | routes::TERMINAL) => {
            &[&[C::FileNotFound]]
        }
        ("get", routes::IMAGES | routes::STORE) | ("post", routes::STORE_FSCK) => {
            &[&[C::SnapshotBroken, C::NoSpace]]
        }
        ("post", routes::WORKSPACES) => &[
            FROM_TAG,
            LAUNCH,
            NETWORK,
            &[C::AlreadyExists, C::WrongState],
        ],
        ("get", routes::WORKSPACE) => &[&[C::InvalidName, C::WorkspaceNotFound]],
        (_, routes::WORKSPACE | routes::WORKSPACE_SUSPEND | routes::WORKSPACE_RESUME) => &[
            OWNER,
            CUT,
            FROM_TAG,
            LAUNCH,
            &[C::WorkspaceNotFound, C::SandboxNotFound],
        ],
        _ => &[],
    }
}

/// Gives each operation an ID of its own: the fixed parts of the path and the name of its handler.
fn name_operation(path: &str, operation: &mut Operation) {
    let fixed = path
        .split('/')
        .filter(|part| !part.is_empty() && *part != "v1" && !part.starts_with('{'));
    let mut id = fixed.collect::<Vec<_>>().join("_").replace('.', "_");
    let handler = operation.operation_id.take().unwrap_or_default();
    if !id.ends_with(&handler) {
        id = format!("{id}_{handler}");
    }
    operation.operation_id = Some(id);
}

/// Names the type of the lines of a stream, which OpenAPI 3.1 cannot express.
fn name_items(path: &str, operation: &mut Operation) {
    let item = match path {
        routes::EXEC_STREAM | routes::PROCESS_OUTPUT => "ExecFrame",
        routes::FILES_WATCH => "FileChange",
        routes::EVENTS => "EventInfo",
        routes::NETWORK_LOG => "FlowEntry",
        _ => return,
    };
    operation.extensions = Some(
        utoipa::openapi::extensions::ExtensionsBuilder::new()
            .add("x-ndjson-item", format!("#/components/schemas/{item}"))
            .build(),
    );
}

fn limit_labels(schema: &mut RefOr<Schema>) {
    if let RefOr::T(Schema::Object(object)) = schema
        && let Some(RefOr::T(Schema::Object(labels))) = object.properties.get_mut("labels")
    {
        let key = ObjectBuilder::new()
            .schema_type(Type::String)
            .min_length(Some(1))
            .max_length(Some(MAX_LABEL_KEY));
        let value = ObjectBuilder::new()
            .schema_type(Type::String)
            .max_length(Some(MAX_LABEL_VALUE));
        let value = Schema::Object(value.build());
        labels.max_properties = Some(MAX_LABELS);
        labels.property_names = Some(Box::new(Schema::Object(key.build())));
        labels.additional_properties = Some(Box::new(AdditionalProperties::RefOr(value.into())));
    }
}

fn takes_json(operation: &Operation) -> bool {
    match &operation.request_body {
        Some(RefOr::T(body)) => body.content.contains_key("application/json"),
        Some(RefOr::Ref(_)) => true,
        None => false,
    }
}

fn parameters(operation: &Operation) -> impl Iterator<Item = &Parameter> {
    let all = operation.parameters.iter().flatten();
    all.filter_map(|parameter| match parameter {
        RefOr::T(parameter) => Some(parameter),
        RefOr::Ref(_) => None,
    })
}

fn takes(operation: &Operation, place: &ParameterIn) -> bool {
    parameters(operation).any(|parameter| parameter.parameter_in == *place)
}

/// Says which form the names in a path have.
fn name_parameters(operation: &mut Operation) {
    for parameter in operation.parameters.iter_mut().flatten() {
        let RefOr::T(parameter) = parameter else {
            continue;
        };
        if parameter.parameter_in != ParameterIn::Path {
            continue;
        }
        let pattern = match parameter.name.as_str() {
            "id" => ID,
            "tag" | "name" => NAME,
            _ => continue,
        };
        let object = ObjectBuilder::new()
            .schema_type(Type::String)
            .pattern(Some(pattern));
        parameter.schema = Some(RefOr::T(Schema::Object(object.build())));
    }
}

/// Codes that come with another status than their usual one.
fn unusual(path: &str, operation: &Operation) -> Vec<(u16, C)> {
    let mut unusual = Vec::new();
    if operation.request_body.is_some() {
        // A body that does not arrive in time.
        unusual.push((408, C::InvalidRequest));
    }
    if takes_json(operation) {
        // JSON that is well formed and not what the route takes.
        unusual.push((422, C::InvalidRequest));
        // A longer life than sandboxes may have.
        if matches!(path, routes::SANDBOXES | routes::SANDBOX | routes::FORK) {
            unusual.push((400, C::LimitReached));
        }
        // The same request is still under way.
        if matches!(
            path,
            routes::SANDBOXES | routes::BRANCH | routes::FORK | routes::SNAPSHOTS
        ) {
            unusual.push((409, C::Busy));
        }
    }
    unusual
}

fn add_refusals(operation: &mut Operation, refusals: &BTreeSet<(u16, C)>) {
    let mut by_status: BTreeMap<u16, Vec<&str>> = BTreeMap::new();
    for (status, code) in refusals {
        by_status.entry(*status).or_default().push(code.as_str());
    }
    for (status, codes) in by_status {
        let mut description = format!("`{}`", codes.join("`, `"));
        if status == 413 {
            let _ = write!(description, ": a body has at most {MAX_BODY} bytes");
        }
        let body = Content::new(Some(Ref::from_schema_name("ErrorBody")));
        let response = Response::builder()
            .description(description)
            .content("application/json", body);
        // A route that answers with such a status in its own way says so itself.
        operation
            .responses
            .responses
            .entry(status.to_string())
            .or_insert_with(|| response.build().into());
    }
}
