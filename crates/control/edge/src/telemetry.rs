//! Traces for an OpenTelemetry collector: a span for each request, and below it those of what it set going.
//!
//! Spans wait in a bounded queue that a thread of its own sends on; what finds the queue full is dropped, so a
//! collector that is slow or gone costs the daemon nothing. Without a collector no span is made at all.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use axum::extract::{MatchedPath, Request};
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use forkd_sandboxes::trace::TARGET;
use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::WithExportConfig;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracerProvider, SpanData, SpanExporter};
use tracing::field::Empty;
use tracing::{Span, Subscriber};
use tracing_opentelemetry::OpenTelemetrySpanExt;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{EnvFilter, Layer};

/// How long the last spans may take at a stop.
const FLUSH: Duration = Duration::from_secs(3);
/// The longest state of other tracing systems that is passed on.
const MAX_STATE: usize = 512;

/// Where traces go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Collector {
    /// The URL that takes OTLP over HTTP.
    pub traces: String,
    /// The name of the daemon in its traces.
    pub service: String,
}

impl Collector {
    /// From the URL that all signals have in common.
    pub fn new(base: &str, service: &str) -> anyhow::Result<Self> {
        let url: Uri = base
            .parse()
            .ok()
            .filter(|url: &Uri| url.authority().is_some() && url.query().is_none())
            .with_context(|| {
                format!("{base:?} is no URL of a collector: write http://HOST:4318")
            })?;
        if !matches!(url.scheme_str(), Some("http" | "https")) {
            bail!("{base:?} is neither http:// nor https://: traces are sent as OTLP over HTTP");
        }
        Ok(Self {
            traces: format!("{}/v1/traces", base.trim_end_matches('/')),
            service: service.to_owned(),
        })
    }
}

/// Spans on their way to a collector.
#[derive(Debug)]
pub struct Export(SdkTracerProvider);

impl Export {
    /// Starts the thread that sends. Nothing is sent yet, and the collector need not be there.
    pub fn start(collector: &Collector) -> anyhow::Result<Self> {
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_http()
            .with_endpoint(&collector.traces)
            .build()
            .context("the export of traces cannot be set up")?;
        let resource = Resource::builder()
            .with_service_name(collector.service.clone())
            .with_attribute(opentelemetry::KeyValue::new(
                "service.version",
                env!("CARGO_PKG_VERSION"),
            ))
            .build();
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(Noted {
                exporter,
                failing: AtomicBool::new(false),
            })
            .with_resource(resource)
            .build();
        Ok(Self(provider))
    }

    /// The layer by which a subscriber sends its spans to the collector.
    pub fn layer<S>(&self) -> impl Layer<S> + Send + Sync + use<S>
    where
        S: Subscriber + for<'span> LookupSpan<'span> + Send + Sync,
    {
        tracing_opentelemetry::layer()
            .with_tracer(self.0.tracer("forkd-controller"))
            .with_location(false)
            .with_threads(false)
            .with_target(false)
            .with_level(false)
            .with_tracked_inactivity(false)
            .with_filter(Targets::new().with_target(TARGET, LevelFilter::INFO))
    }

    /// Sends what is left, for a bounded time. Must not be called by a thread that serves requests.
    pub fn stop(self) {
        if let Err(error) = self.0.shutdown_with_timeout(FLUSH) {
            tracing::warn!(%error, "the last traces were not sent");
        }
    }
}

/// A log without what is exported.
pub fn without_traces(filter: EnvFilter) -> EnvFilter {
    match format!("{TARGET}=off").parse() {
        Ok(directive) => filter.add_directive(directive),
        Err(_) => filter,
    }
}

/// Says once when spans cannot be sent, and once when they can again.
#[derive(Debug)]
struct Noted {
    exporter: opentelemetry_otlp::SpanExporter,
    failing: AtomicBool,
}

impl SpanExporter for Noted {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let count = batch.len();
        let result = self.exporter.export(batch).await;
        let failed_before = self.failing.swap(result.is_err(), Ordering::Relaxed);
        match &result {
            Err(error) if !failed_before => {
                tracing::warn!(%error, spans = count, "traces cannot be sent");
            }
            Ok(()) if failed_before => tracing::info!("traces are sent again"),
            _ => {}
        }
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

/// The span of a request, below that of the caller if it names one. It holds the route, never the path or the query.
pub fn request_span(request: &Request, id: &str) -> Span {
    let method = method_label(request.method());
    let route = request
        .extensions()
        .get::<MatchedPath>()
        .map(MatchedPath::as_str);
    let span = tracing::info_span!(
        target: TARGET,
        "request",
        otel.name = Empty,
        otel.kind = "server",
        otel.status_code = Empty,
        http.request.method = method,
        http.route = route,
        http.response.status_code = Empty,
        forkd.request_id = id,
    );
    if !span.is_disabled() {
        let name = route.map_or_else(|| method.to_owned(), |route| format!("{method} {route}"));
        span.record("otel.name", name);
        let caller = TraceContextPropagator::new().extract(&Caller(request.headers()));
        // It fails only where spans are not exported.
        let _ = span.set_parent(caller);
    }
    span
}

/// Notes how a request was answered.
pub fn answered(span: &Span, status: StatusCode) {
    span.record("http.response.status_code", status.as_u16());
    if status.is_server_error() {
        span.record("otel.status_code", "ERROR");
    }
}

/// The method as a label of traces and metrics: a closed set, since a client can send any token as a method.
pub fn method_label(method: &Method) -> &'static str {
    const KNOWN: [&str; 7] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"];
    let known = KNOWN.into_iter().find(|known| *known == method.as_str());
    known.unwrap_or("_OTHER")
}

/// The headers that name the caller's span.
struct Caller<'a>(&'a HeaderMap);

impl Extractor for Caller<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        let value = self.0.get(key)?.to_str().ok()?;
        (value.len() <= MAX_STATE).then_some(value)
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(axum::http::HeaderName::as_str).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collector_is_a_plain_url() {
        for base in ["http://127.0.0.1:4318", "http://127.0.0.1:4318/"] {
            let collector = Collector::new(base, "s").unwrap();
            assert_eq!(collector.traces, "http://127.0.0.1:4318/v1/traces");
        }
        for base in [
            "",
            "localhost:4318",
            "/v1",
            "grpc://h:4317",
            "http://h/?k=v",
        ] {
            assert!(Collector::new(base, "s").is_err(), "{base}");
        }
    }

    #[test]
    fn unknown_methods_share_one_label() {
        assert_eq!(method_label(&Method::PATCH), "PATCH");
        assert_eq!(
            method_label(&Method::from_bytes(b"BREW").unwrap()),
            "_OTHER"
        );
    }
}
