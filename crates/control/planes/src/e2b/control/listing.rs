//! Routes that list sandboxes, page by page.
//!
//! A page ends with a token that names the last entry. The next page begins after that entry, whether or not it still
//! exists.

use std::cmp::Ordering;
use std::sync::Arc;

use axum::Json;
use axum::extract::{RawQuery, State};
use axum::http::HeaderValue;
use axum::response::{IntoResponse, Response};
use forkd_edge::auth::Actor;
use forkd_sandboxes::ops::pause;
use forkd_sandboxes::sandbox::Phase;

use super::owned::Caller;
use super::sandboxes::{live_detail, paused_detail};
use super::wire::{Detail, State as Shown};
use crate::e2b::error::{Answer, Refusal};
use crate::e2b::state::E2b;
use crate::e2b::text;

/// Entries of a page unless the request says otherwise, and the most.
const PAGE: usize = 100;

/// Which sandboxes to list, and in which order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Wanted {
    metadata: Vec<(String, String)>,
    running: bool,
    paused: bool,
    ascending: bool,
    started_after: Option<u64>,
    template: Option<String>,
    limit: usize,
    after: Option<(u64, String)>,
}

impl Wanted {
    fn parse(sent: &str) -> Answer<Self> {
        let query = text::query(sent);
        let get = |name: &str| text::value(&query, name).filter(|value| !value.is_empty());
        let states: Vec<&str> = get("state").map_or(vec!["running", "paused"], |states| {
            states.split(',').collect()
        });
        if let Some(odd) = states
            .iter()
            .find(|state| !matches!(**state, "running" | "paused"))
        {
            return Err(Refusal::bad(format!("{odd:?} is not a state")));
        }
        let limit = match get("limit") {
            None => PAGE,
            Some(limit) => limit
                .parse()
                .ok()
                .filter(|limit| (1..=PAGE).contains(limit))
                .ok_or_else(|| Refusal::bad(format!("limit is 1 to {PAGE}")))?,
        };
        let started_after = get("startedAfter")
            .map(|time| {
                text::parse_time_ms(time).ok_or_else(|| Refusal::bad("startedAfter is not a time"))
            })
            .transpose()?;
        let after = get("nextToken")
            .map(|token| {
                let (started, id) = token.split_once('_')?;
                Some((started.parse().ok()?, id.to_owned()))
            })
            .map(|parsed| parsed.ok_or_else(|| Refusal::bad("nextToken is not valid")))
            .transpose()?;
        Ok(Self {
            metadata: metadata(get("metadata").unwrap_or_default()),
            running: states.contains(&"running"),
            paused: states.contains(&"paused"),
            ascending: get("order") == Some("asc"),
            started_after,
            template: get("template").map(str::to_owned),
            limit,
            after,
        })
    }

    fn fits(&self, detail: &Detail) -> bool {
        let state = match detail.state {
            Shown::Running => self.running,
            Shown::Paused => self.paused,
        };
        let metadata = self
            .metadata
            .iter()
            .all(|(key, value)| detail.metadata.get(key) == Some(value));
        state
            && metadata
            && self
                .started_after
                .is_none_or(|after| detail.started_ms >= after)
            && self
                .template
                .as_ref()
                .is_none_or(|template| *template == detail.template_id)
    }

    fn order(&self, a: (u64, &str), b: (u64, &str)) -> Ordering {
        if self.ascending { a.cmp(&b) } else { b.cmp(&a) }
    }

    /// One page, and the token of the next.
    fn page(&self, mut all: Vec<Detail>) -> (Vec<Detail>, Option<String>) {
        all.retain(|detail| self.fits(detail));
        all.sort_by(|a, b| self.order(key(a), key(b)));
        if let Some((started, id)) = &self.after {
            all.retain(|detail| self.order(key(detail), (*started, id)) == Ordering::Greater);
        }
        let more = all.len() > self.limit;
        all.truncate(self.limit);
        let next = all.last().filter(|_| more);
        let next = next.map(|last| format!("{}_{}", last.started_ms, last.sandbox_id));
        (all, next)
    }
}

fn key(detail: &Detail) -> (u64, &str) {
    (detail.started_ms, &detail.sandbox_id)
}

/// The pairs of a metadata filter. The value of the query is a form whose keys and values are encoded once more.
fn metadata(form: &str) -> Vec<(String, String)> {
    text::query(form)
        .into_iter()
        .map(|(key, value)| (text::decode(&key, false), text::decode(&value, false)))
        .collect()
}

/// Every sandbox of the caller.
async fn all(e2b: &Arc<E2b>, actor: &Actor) -> Answer<Vec<Detail>> {
    let mut found = Vec::new();
    for sandbox in e2b.app.sandboxes.list() {
        let phase = sandbox.phase();
        let record = sandbox.record();
        let exists = !matches!(phase, Phase::Failed | Phase::Stopping | Phase::Launching);
        if exists && actor.owns(Some(&record.owner)) {
            found.push(live_detail(&record, phase));
        }
    }
    for record in pause::list(&e2b.app).await? {
        if actor.owns(Some(&record.owner)) {
            found.extend(paused_detail(&record));
        }
    }
    // A sandbox that is being suspended or resumed is in both lists for a moment.
    found.sort_by(|a, b| a.sandbox_id.cmp(&b.sandbox_id));
    found.dedup_by(|a, b| a.sandbox_id == b.sandbox_id);
    Ok(found)
}

/// Sandboxes that run or are paused, page by page.
pub async fn list(
    State(e2b): State<Arc<E2b>>,
    Caller(actor): Caller,
    RawQuery(query): RawQuery,
) -> Answer<Response> {
    let wanted = Wanted::parse(&query.unwrap_or_default())?;
    let (page, next) = wanted.page(all(&e2b, &actor).await?);
    let mut response = Json(page).into_response();
    if let Some(next) = next.and_then(|next| HeaderValue::from_str(&next).ok()) {
        response.headers_mut().insert("x-next-token", next);
    }
    Ok(response)
}

/// Sandboxes that run, all at once: the first version of the route.
pub async fn list_running(
    State(e2b): State<Arc<E2b>>,
    Caller(actor): Caller,
    RawQuery(query): RawQuery,
) -> Answer<Json<Vec<Detail>>> {
    let wanted = Wanted {
        paused: false,
        limit: usize::MAX,
        ..Wanted::parse(&query.unwrap_or_default())?
    };
    Ok(Json(wanted.page(all(&e2b, &actor).await?).0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detail(id: &str, started_ms: u64) -> Detail {
        Detail {
            template_id: "base".into(),
            sandbox_id: id.into(),
            client_id: "",
            alias: "base".into(),
            started_at: String::new(),
            end_at: String::new(),
            envd_version: "",
            cpu_count: 1,
            memory_mb: 1,
            disk_size_mb: 1,
            state: Shown::Running,
            metadata: [("grp".to_owned(), "a b".to_owned())].into(),
            lifecycle: None,
            envd_access_token: None,
            domain: None,
            started_ms,
        }
    }

    fn ids(page: &[Detail]) -> Vec<&str> {
        page.iter()
            .map(|detail| detail.sandbox_id.as_str())
            .collect()
    }

    #[test]
    fn pages_follow_each_other_without_gap_or_repetition() {
        let all = || {
            vec![
                detail("a", 1),
                detail("b", 2),
                detail("c", 2),
                detail("d", 3),
            ]
        };
        let mut wanted = Wanted::parse("limit=2").unwrap();
        let (page, next) = wanted.page(all());
        assert_eq!(ids(&page), ["d", "c"]);
        wanted = Wanted::parse(&format!("limit=2&nextToken={}", next.unwrap())).unwrap();
        let (page, next) = wanted.page(all());
        assert_eq!((ids(&page), next), (vec!["b", "a"], None));
        let ascending = Wanted::parse("order=asc").unwrap().page(all());
        assert_eq!(ids(&ascending.0), ["a", "b", "c", "d"]);
    }

    #[test]
    fn the_metadata_filter_is_encoded_three_times() {
        let wanted = Wanted::parse("metadata=grp%3Da%252520b").unwrap();
        assert_eq!(wanted.metadata, [("grp".to_owned(), "a b".to_owned())]);
        assert!(wanted.fits(&detail("a", 1)));
        let other = Wanted::parse("metadata=grp%3Dx").unwrap();
        assert!(!other.fits(&detail("a", 1)));
    }

    #[test]
    fn odd_queries_are_refused() {
        for bad in [
            "limit=0",
            "limit=101",
            "limit=x",
            "state=gone",
            "startedAfter=now",
            "nextToken=x",
        ] {
            assert!(Wanted::parse(bad).is_err(), "{bad}");
        }
    }
}
