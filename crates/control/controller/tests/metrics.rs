//! The memory that clients can make the metrics take.

use std::collections::BTreeSet;

use axum::body::Body;
use axum::http::{Method, Request};
use forkd_controller::serve::Front;
use forkd_edge::config::EdgeConfig;
use forkd_edge::metrics;
use forkd_sandboxes::app::App;
use forkd_sandboxes::config::Config;
use tower::ServiceExt;

/// The series in a text: names with labels, without values.
fn series(text: &str) -> BTreeSet<String> {
    text.lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty())
        .filter_map(|line| line.rsplit_once(' '))
        .map(|(series, _)| series.to_owned())
        .collect()
}

#[tokio::test]
async fn made_up_methods_add_no_series() {
    metrics::install();
    let dir = tempfile::tempdir().unwrap();
    let (app, _endings) = App::open(Config::below(dir.path())).unwrap();
    let router = Front::open(&app, &EdgeConfig::closed()).unwrap().router;
    let send = async |method: String| {
        let method = Method::from_bytes(method.as_bytes()).unwrap();
        let request = Request::builder()
            .method(method)
            .uri("/v1/sandboxes")
            .body(Body::empty());
        let answer = router.clone().oneshot(request.unwrap()).await.unwrap();
        answer.status().as_u16()
    };
    assert_eq!(send("BREW".into()).await, 405);
    let before = series(&metrics::render());
    assert!(before.iter().any(|name| name.contains("_OTHER")));
    for number in 0..1000 {
        assert_eq!(send(format!("BREW{number}")).await, 405);
    }
    let after = series(&metrics::render());
    assert_eq!(after.difference(&before).collect::<Vec<_>>(), [""; 0]);
}
