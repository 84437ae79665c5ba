//! Wrong, missing and oversized input to every route: what people read. `tests/golden/refusals.txt` holds all of it;
//! with `FORKD_UPDATE_GOLDEN=1` it is written anew, to be read before it is committed.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use forkd_controller::serve::Front;
use forkd_edge::config::EdgeConfig;
use forkd_planes::rest::openapi;
use forkd_sandboxes::app::App;
use forkd_sandboxes::config::Config;
use serde_json::Value;
use tower::ServiceExt;

const MISSING: &str = "sb-00000001-0000000000000001";

fn app(root: &Path) -> Arc<App> {
    let config = Config {
        max_lifetime: Some(Duration::from_secs(3600)),
        ..Config::below(root)
    };
    App::open(config).unwrap().0
}

/// Bodies that are wrong in a way of their own, with a name.
fn bodies() -> Vec<(&'static str, Option<&'static str>, String)> {
    let json = Some("application/json");
    vec![
        ("no body", None, String::new()),
        ("empty JSON body", json, String::new()),
        ("not JSON", json, "{".into()),
        ("another type", Some("text/plain"), "{}".into()),
        ("nothing in it", json, "{}".into()),
        ("a list", json, "[]".into()),
        (
            "too large",
            json,
            format!("{{\"x\": \"{}\"}}", "y".repeat(5 << 20)),
        ),
    ]
}

/// Requests with one wrong field each.
const FIELDS: &[(&str, &str, &str)] = &[
    ("POST", "/v1/snapshots", r#"{"tag": "a b", "image": "x"}"#),
    ("POST", "/v1/snapshots", r#"{"tag": "ok"}"#),
    (
        "POST",
        "/v1/snapshots",
        r#"{"tag": "ok", "kernel": "/no", "rootfs": "/no"}"#,
    ),
    (
        "POST",
        "/v1/snapshots",
        r#"{"tag": "ok", "image": "../up"}"#,
    ),
    (
        "POST",
        "/v1/snapshots",
        r#"{"tag": "ok", "image": "x", "boot_wait_secs": 99}"#,
    ),
    (
        "POST",
        "/v1/snapshots",
        r#"{"tag": "ok", "image": "x", "mem_size_mib": 1}"#,
    ),
    (
        "POST",
        "/v1/snapshots",
        r#"{"tag": "ok", "image": "x", "vcpus": 0}"#,
    ),
    ("POST", "/v1/images", r#"{"from": "-"}"#),
    ("POST", "/v1/images", r#"{"from": "a b"}"#),
    ("POST", "/v1/images", r#"{"from": "a:1", "name": "a b"}"#),
    ("POST", "/v1/images", r#"{"from": "a:1", "name": "prune"}"#),
    ("POST", "/v1/images", r#"{"from": "a:1", "disk_mib": 1}"#),
    (
        "POST",
        "/v1/images",
        r#"{"from": "a:1", "credential": {"kind": "bearer", "token": "a\nb"}}"#,
    ),
    ("POST", "/v1/sandboxes", r#"{"snapshot_tag": "no-such"}"#),
    ("POST", "/v1/sandboxes", r#"{"snapshot_tag": "a/b"}"#),
    ("POST", "/v1/sandboxes", r#"{"snapshot_tag": "x", "n": 0}"#),
    (
        "POST",
        "/v1/sandboxes",
        r#"{"snapshot_tag": "x", "n": 1001}"#,
    ),
    ("POST", "/v1/sandboxes", r#"{"snapshot_tag": "x", "n": -1}"#),
    (
        "POST",
        "/v1/sandboxes",
        r#"{"snapshot_tag": "x", "n": "many"}"#,
    ),
    (
        "POST",
        "/v1/sandboxes",
        r#"{"snapshot_tag": "x", "timeout_secs": 9999999}"#,
    ),
    (
        "POST",
        "/v1/sandboxes",
        r#"{"snapshot_tag": "x", "labels": {"": "x"}}"#,
    ),
    (
        "POST",
        "/v1/sandboxes",
        r#"{"snapshot_tag": "x", "limits": {"memory_mib": 1}}"#,
    ),
    (
        "POST",
        "/v1/sandboxes",
        r#"{"snapshot_tag": "x", "memory_limit_mib": 99, "limits": {"memory_mib": 98}}"#,
    ),
    (
        "POST",
        "/v1/sandboxes",
        r#"{"snapshot_tag": "x", "limits": {"cpus": 0}}"#,
    ),
    (
        "POST",
        "/v1/sandboxes",
        r#"{"snapshot_tag": "x", "limits": {"cpus": 1.5}}"#,
    ),
    (
        "POST",
        "/v1/workspaces",
        r#"{"name": "a b", "snapshot_tag": "x"}"#,
    ),
    (
        "POST",
        "/v1/workspaces",
        r#"{"name": "ok", "snapshot_tag": "no-such"}"#,
    ),
    ("GET", "/v1/sandboxes?limit=0", ""),
    ("GET", "/v1/sandboxes?limit=x", ""),
    ("GET", "/v1/sandboxes?state=asleep", ""),
    ("DELETE", "/v1/snapshots/x?cascade=1", ""),
    ("DELETE", "/v1/snapshots/x?cascade=true&force=true", ""),
    ("GET", "/v1/nothing", ""),
    ("PUT", "/v1/sandboxes", ""),
];

/// The operation of a request in the document; none if the route does not exist or does not take the method.
fn operation<'a>(document: &'a Value, method: &str, path: &str) -> Option<&'a Value> {
    let path = path.split('?').next().unwrap();
    let fits = |template: &str| {
        template.split('/').count() == path.split('/').count()
            && template
                .split('/')
                .zip(path.split('/'))
                .all(|(wanted, given)| wanted.starts_with('{') || wanted == given)
    };
    let mut routes = document["paths"].as_object().unwrap().iter();
    let (_, operations) = routes.find(|(template, _)| fits(template))?;
    operations.get(method.to_lowercase())
}

async fn line(app: &Arc<App>, document: &Value, name: &str, request: Request<Body>) -> String {
    let method = request.method().clone();
    let path = request.uri().to_string();
    let front = Front::open(app, &EdgeConfig::closed()).unwrap();
    let response = front.router.oneshot(request).await.unwrap();
    let status = response.status();
    let documented = operation(document, method.as_str(), &path)
        .map(|operation| &operation["responses"][status.as_str()]["description"]);
    assert_ne!(
        documented,
        Some(&Value::Null),
        "{method} {path} {name}: {status} is not in the document"
    );
    let mut text = format!("{method} {path} {name}\n    {}", status.as_u16());
    if status.is_success() {
        // Some go on without end.
        return text + "\n";
    }
    let bytes = axum::body::to_bytes(response.into_body(), 1 << 20)
        .await
        .unwrap();
    let body: Value = serde_json::from_slice(&bytes)
        .unwrap_or_else(|_| panic!("{method} {path} {name}: {status} without JSON"));
    let word = |key: &str| body[key].as_str().unwrap_or_default().to_owned();
    assert!(
        !word("error").is_empty() && !word("code").is_empty(),
        "{text}: {body}"
    );
    if let Some(codes) = documented {
        let codes = codes.as_str().unwrap();
        assert!(codes.contains(&word("code")), "{text}: {codes}: {body}");
    }
    assert!(
        status.as_u16() < 500 || status.as_u16() == 503,
        "{text}: {body}"
    );
    write!(text, " {}: {}", word("code"), word("error")).unwrap();
    if !word("hint").is_empty() {
        write!(text, "\n    hint: {}", word("hint")).unwrap();
    }
    text + "\n"
}

#[tokio::test]
async fn everything_wrong_is_answered_so_that_a_person_can_act_on_it() {
    let dir = tempfile::tempdir().unwrap();
    let app = app(dir.path());
    let document = serde_json::to_value(openapi()).unwrap();
    let mut found = String::new();
    for (path, operations) in document["paths"].as_object().unwrap() {
        // It answers in a shape of its own: what does not work.
        if path == "/healthz" {
            continue;
        }
        let filled = path
            .replace("{id}", MISSING)
            .replace("{tag}", "no-such")
            .replace("{name}", "no-such")
            .replace("{operation}", "no-such")
            .replace("{pid}", "7");
        for (method, operation) in operations.as_object().unwrap() {
            let method = method.to_uppercase();
            let takes_json = operation["requestBody"]["content"]
                .get("application/json")
                .is_some();
            let cases = if takes_json {
                bodies()
            } else {
                vec![("", None, String::new())]
            };
            for (name, kind, body) in cases {
                let mut request = Request::builder().method(method.as_str()).uri(&filled);
                if let Some(kind) = kind {
                    request = request.header("content-type", kind);
                }
                let request = request.body(Body::from(body)).unwrap();
                found += &line(&app, &document, name, request).await;
            }
        }
    }
    for (method, path, body) in FIELDS {
        let mut request = Request::builder().method(*method).uri(*path);
        if !body.is_empty() {
            request = request.header("content-type", "application/json");
        }
        let request = request.body(Body::from(*body)).unwrap();
        found += &line(&app, &document, body, request).await;
    }
    let found = found.replace(&dir.path().display().to_string(), "[DATA]");
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/refusals.txt");
    if std::env::var_os("FORKD_UPDATE_GOLDEN").is_some() {
        std::fs::create_dir_all(golden.parent().unwrap()).unwrap();
        std::fs::write(&golden, &found).unwrap();
    }
    let kept = std::fs::read_to_string(&golden).unwrap_or_default();
    for (number, (now, before)) in found.lines().zip(kept.lines()).enumerate() {
        assert_eq!(now, before, "line {} of {}", number + 1, golden.display());
    }
    assert_eq!(found.lines().count(), kept.lines().count());
}
