//! The fleet in etcd, by its JSON gateway (3.4 and later): `POST /v3/kv/…` and `/v3/lease/…`.
//!
//! A daemon holds the key `/forkd/v1/nodes/NAME` under a lease. The key is created only if there is none, so two daemons
//! never have one name; a daemon that starts again finds its own address there and takes the key over. When the daemon is
//! gone the lease ends, and with it the key.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use forkd_types::NodeName;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use thiserror::Error;

use crate::members::Member;

/// Keys of daemons start with this.
const NODES: &str = "/forkd/v1/nodes/";
/// The first key after all that start with [`NODES`].
const NODES_END: &str = "/forkd/v1/nodes0";
/// Seconds after which a daemon that says nothing is taken off the list.
const LEASE_SECS: u64 = 10;
/// How often a daemon says that it is there.
const KEEP: Duration = Duration::from_secs(3);
/// How long etcd may take to answer.
const ANSWER: Duration = Duration::from_secs(3);
/// The largest answer that is read: ten thousand daemons.
const MAX_ANSWER: usize = 4 << 20;

/// Why etcd could not be used.
#[derive(Debug, Error)]
pub enum EtcdError {
    /// An address is not one.
    #[error("{url:?} is not the address of an etcd: write http://HOST:PORT or https://HOST:PORT")]
    Address {
        /// The address as given.
        url: String,
    },
    /// No endpoint answered.
    #[error("etcd at {endpoint} does not answer")]
    Unreachable {
        /// The endpoint that was asked last.
        endpoint: String,
        /// The failure of the request.
        #[source]
        source: Box<reqwest::Error>,
    },
    /// An answer is too large or not understood.
    #[error("etcd at {endpoint} answers {status}: {detail}")]
    Answer {
        /// The endpoint that was asked.
        endpoint: String,
        /// The HTTP status.
        status: u16,
        /// The start of the answer.
        detail: String,
    },
    /// Another daemon has the name.
    #[error("the name {name} belongs to the daemon at {holder}")]
    NameTaken {
        /// The name that is taken.
        name: NodeName,
        /// The address of the other daemon.
        holder: String,
    },
}

/// The value of a daemon's key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Registration {
    version: u32,
    url: String,
}

const REGISTRATION_VERSION: u32 = 1;

/// A client of one etcd cluster.
#[derive(Debug)]
pub struct Etcd {
    endpoints: Vec<String>,
    http: reqwest::Client,
}

impl Etcd {
    /// A client of these endpoints. Does not connect yet.
    pub fn new(endpoints: &[String]) -> Result<Self, EtcdError> {
        for url in endpoints {
            let is_http = reqwest::Url::parse(url)
                .is_ok_and(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
            if !is_http {
                return Err(EtcdError::Address { url: url.clone() });
            }
        }
        let http = reqwest::Client::builder().timeout(ANSWER).no_proxy();
        // Without TLS no root certificates are needed: a minimal Debian has none.
        let http = if endpoints.iter().all(|url| url.starts_with("http://")) {
            http.tls_certs_only([])
        } else {
            http
        };
        let http = http.build().map_err(|source| EtcdError::Unreachable {
            endpoint: endpoints.join(", "),
            source: Box::new(source),
        })?;
        let trimmed = |url: &String| url.trim_end_matches('/').to_owned();
        Ok(Self {
            endpoints: endpoints.iter().map(trimmed).collect(),
            http,
        })
    }

    /// The daemons that hold a lease. An entry that is not understood is left out.
    pub async fn members(&self) -> Result<Vec<Member>, EtcdError> {
        let range = json!({ "key": encode(NODES), "range_end": encode(NODES_END) });
        let answer: RangeAnswer = self.ask("/v3/kv/range", &range).await?;
        Ok(answer
            .kvs
            .iter()
            .filter_map(|entry| entry.registration())
            .map(|found| Member { url: found.url })
            .collect())
    }

    /// Registers a daemon and keeps it registered until the returned future is dropped. Never returns by itself.
    pub async fn keep_joined(&self, name: &NodeName, url: &str) {
        let mut was_joined = true;
        loop {
            match self.join(name, url).await {
                Ok(lease) => {
                    tracing::info!(%name, url, "joined the fleet");
                    was_joined = true;
                    self.keep_alive(lease).await;
                    tracing::warn!(%name, "the lease in etcd is gone");
                }
                Err(error) if was_joined => {
                    tracing::warn!(%name, error = forkd_types::chain(&error), "not in the fleet");
                    was_joined = false;
                }
                Err(_) => {}
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }

    /// Registers a daemon once and returns its lease.
    pub async fn join(&self, name: &NodeName, url: &str) -> Result<String, EtcdError> {
        let grant = json!({ "TTL": LEASE_SECS });
        let lease: LeaseAnswer = self.ask("/v3/lease/grant", &grant).await?;
        let value = serde_json::to_string(&Registration {
            version: REGISTRATION_VERSION,
            url: url.to_owned(),
        })
        .unwrap_or_default();
        let key = encode(&format!("{NODES}{name}"));
        let value = encode(&value);
        let put = json!({ "request_put": { "key": key, "value": value, "lease": lease.id } });
        // Free, or this daemon's own from an earlier life.
        let free =
            json!([{ "key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0" }]);
        let own = json!([{ "key": key, "target": "VALUE", "result": "EQUAL", "value": value }]);
        let mut holder = String::new();
        for condition in [free, own] {
            let txn = json!({
                "compare": condition,
                "success": [put],
                "failure": [{ "request_range": { "key": key } }],
            });
            let answer: TxnAnswer = self.ask("/v3/kv/txn", &txn).await?;
            if answer.succeeded {
                return Ok(lease.id);
            }
            let found = answer
                .responses
                .first()
                .and_then(|one| one.range.kvs.first());
            if let Some(found) = found.and_then(Entry::registration) {
                holder = found.url;
            }
        }
        let revoke = json!({ "ID": lease.id });
        let _: Value = self.ask("/v3/lease/revoke", &revoke).await?;
        Err(EtcdError::NameTaken {
            name: name.clone(),
            holder,
        })
    }

    /// Keeps a lease alive. Returns when it is gone.
    async fn keep_alive(&self, lease: String) {
        let body = json!({ "ID": lease });
        loop {
            tokio::time::sleep(KEEP).await;
            let answer: Result<KeepAnswer, _> = self.ask("/v3/lease/keepalive", &body).await;
            match answer {
                Ok(answer) if answer.result.ttl.is_empty() => return,
                Ok(_) => {}
                // etcd may come back before the lease ends.
                Err(error) => tracing::debug!(error = forkd_types::chain(&error), "etcd"),
            }
        }
    }

    /// Asks each endpoint until one answers.
    async fn ask<T: DeserializeOwned>(&self, path: &str, body: &Value) -> Result<T, EtcdError> {
        let mut last = None;
        for endpoint in &self.endpoints {
            match self.ask_one(endpoint, path, body).await {
                Err(error @ EtcdError::Unreachable { .. }) => last = Some(error),
                outcome => return outcome,
            }
        }
        Err(last.unwrap_or(EtcdError::Address { url: String::new() }))
    }

    async fn ask_one<T: DeserializeOwned>(
        &self,
        endpoint: &str,
        path: &str,
        body: &Value,
    ) -> Result<T, EtcdError> {
        let unreachable = |source| EtcdError::Unreachable {
            endpoint: endpoint.to_owned(),
            source: Box::new(source),
        };
        let request = self.http.post(format!("{endpoint}{path}")).json(body);
        let mut answer = request.send().await.map_err(unreachable)?;
        let status = answer.status();
        let refused = |detail: String| EtcdError::Answer {
            endpoint: endpoint.to_owned(),
            status: status.as_u16(),
            detail,
        };
        let mut text = Vec::new();
        while let Some(chunk) = answer.chunk().await.map_err(unreachable)? {
            text.extend_from_slice(&chunk);
            if text.len() > MAX_ANSWER {
                return Err(refused("more than it may".to_owned()));
            }
            // A keep-alive is a stream of JSON lines, and one is enough.
            if text.ends_with(b"\n") {
                break;
            }
        }
        let start = || String::from_utf8_lossy(&text[..text.len().min(200)]).into_owned();
        if !status.is_success() {
            return Err(refused(start()));
        }
        serde_json::from_slice(&text).map_err(|error| refused(format!("{error}: {}", start())))
    }
}

fn encode(text: &str) -> String {
    STANDARD.encode(text)
}

#[derive(Debug, Deserialize)]
struct LeaseAnswer {
    #[serde(rename = "ID")]
    id: String,
}

#[derive(Debug, Deserialize)]
struct KeepAnswer {
    result: Kept,
}

#[derive(Debug, Deserialize)]
struct Kept {
    /// Missing if the lease is gone.
    #[serde(rename = "TTL", default)]
    ttl: String,
}

#[derive(Debug, Default, Deserialize)]
struct RangeAnswer {
    #[serde(default)]
    kvs: Vec<Entry>,
}

#[derive(Debug, Deserialize)]
struct Entry {
    #[serde(default)]
    value: String,
}

impl Entry {
    fn registration(&self) -> Option<Registration> {
        let value = STANDARD.decode(&self.value).ok()?;
        let found: Registration = serde_json::from_slice(&value).ok()?;
        (found.version == REGISTRATION_VERSION).then_some(found)
    }
}

#[derive(Debug, Deserialize)]
struct TxnAnswer {
    #[serde(default)]
    succeeded: bool,
    #[serde(default)]
    responses: Vec<TxnResponse>,
}

#[derive(Debug, Deserialize)]
struct TxnResponse {
    #[serde(rename = "response_range", default)]
    range: RangeAnswer,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_that_are_not_understood_are_left_out() {
        let entry = |text: &str| Entry {
            value: encode(text),
        };
        let good = entry(r#"{"version":1,"url":"http://a:1"}"#);
        assert_eq!(good.registration().unwrap().url, "http://a:1");
        for text in ["", "{}", r#"{"version":2,"url":"http://a:1"}"#, "\u{0}"] {
            assert_eq!(entry(text).registration(), None, "{text:?}");
        }
        assert_eq!(
            Entry {
                value: "%".to_owned()
            }
            .registration(),
            None
        );
    }

    #[test]
    fn addresses_are_checked() {
        for bad in ["", "a:1", "ftp://a", "unix:///x"] {
            assert!(Etcd::new(&[bad.to_owned()]).is_err(), "{bad}");
        }
        assert!(Etcd::new(&["http://127.0.0.1:2379/".to_owned()]).is_ok());
    }
}
